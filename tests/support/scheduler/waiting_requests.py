"""Requests as the waiting queue sees them: of a tenant, with a priority and a time of arrival."""

import itertools

from scheduler_svc.dispatch.waiting_queue import WaitingQueue
from scheduler_svc.policy.order import OrderPolicy, PriorityFairOrder
from scheduler_svc.requests.request import Event, Request
from scheduler_svc.requests.sampling import Sampling
from tests.support.sampling_params import sampling_params

_ARRIVALS = itertools.count()
_SAMPLING = Sampling(sampling_params(max_tokens=8))


class _NoSink:
    def push(self, event: Event) -> None:
        pass

    def push_token(self, request_id: str, token_id: int) -> None:
        pass


def waiting_request(
    *, tenant: str = "", priority: int = 0, arrival_s: float = 0.0, num_tokens: int = 3
) -> Request:
    """The next request to arrive."""
    arrival = next(_ARRIVALS)
    return Request(
        request_id=f"w{arrival}", token_ids=[5] * num_tokens, num_prompt_tokens=num_tokens, sampling=_SAMPLING,
        arrival=arrival, arrival_s=arrival_s, sink=_NoSink(), end=num_tokens + 8, priority=priority, tenant=tenant,
    )  # fmt: skip


def queue_of(*requests: Request, order: OrderPolicy | None = None) -> WaitingQueue:
    """A queue that these requests were added to, in that order."""
    queue = WaitingQueue(order or PriorityFairOrder())
    for request in requests:
        queue.add(request)
    return queue


def take_all(queue: WaitingQueue, now: float = 0.0) -> list[Request]:
    """Takes the head until nothing is left."""
    order = []
    while (head := queue.peek(now)) is not None:
        assert queue.remove(head)
        order.append(head)
    return order
