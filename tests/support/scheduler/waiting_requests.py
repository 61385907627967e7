"""Requests and queues for tests of the waiting queue."""

import itertools
from collections.abc import Sequence

from scheduler_svc.dispatch.queueing import WaitingQueue
from scheduler_svc.policy.order import OrderPolicy, PriorityFairOrder
from scheduler_svc.requests.request import Event, Request
from scheduler_svc.requests.sampling import Sampling, StopRule
from tests.support.sampling_params import sampling_params

_ARRIVALS = itertools.count()
_SAMPLING = Sampling(sampling_params(max_tokens=8))


class _NoSink:
    def push(self, event: Event) -> None:
        pass

    def push_tokens(self, request_ids: Sequence[str], token_ids: Sequence[int]) -> None:
        pass


def waiting_request(
    *, tenant: str = "", priority: int = 0, arrival_s: float = 0.0, num_tokens: int = 3
) -> Request:
    """Returns a request that arrives after all earlier ones."""
    arrival = next(_ARRIVALS)
    return Request(
        request_id=f"w{arrival}", token_ids=[5] * num_tokens, num_prompt_tokens=num_tokens, sampling=_SAMPLING,
        arrival=arrival, arrival_s=arrival_s, sink=_NoSink(), stop=StopRule.from_sampling(_SAMPLING, frozenset(), 8), priority=priority, tenant=tenant,
    )  # fmt: skip


def queue_of(*requests: Request, order: OrderPolicy | None = None) -> WaitingQueue:
    """Returns a queue to which the requests were added in this order."""
    queue = WaitingQueue(order or PriorityFairOrder())
    for request in requests:
        queue.add(request)
    return queue


def take_all(queue: WaitingQueue, now: float = 0.0) -> list[Request]:
    """Removes the head until the queue is empty; returns the requests in order."""
    order = []
    while (head := queue.peek(now)) is not None:
        assert queue.remove(head)
        order.append(head)
    return order
