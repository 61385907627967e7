"""All live requests of an engine, the queues of those that no replica has, and the limits on them."""

import itertools
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence

from protos.errors import InvalidArgument, Overloaded
from protos.limits import MAX_SEQUENCES
from scheduler_svc.dispatch.grammar_queue import GrammarQueue
from scheduler_svc.policy.order import ArrivalQueue, PriorityFairOrder
from scheduler_svc.policy.tenants import Tenants
from scheduler_svc.replica.pooling import PoolScheduler
from scheduler_svc.replica.scheduler import ReplicaScheduler
from scheduler_svc.requests.admission import Submission
from scheduler_svc.requests.request import Request, RequestState, SequenceGroup

SEQUENCES_PER_SLOT = 16
"""Most sequences of one request for each slot of the deployment: a client occupies all slots that many times
over."""

RESUMED_FACTOR = 4
"""Resumed requests may fill the queue to this many times its bounds, and one more request for each slot."""


MOST_PASSED = 512
"""Waiting requests of other lengths that a pooling batch passes over, at most, before it runs unfilled."""


class LiveRequests:
    """Registry of every request that has not ended.

    A request with several sequences is one :class:`Request` per sequence; the client's id finds all of them.
    """

    def __init__(self) -> None:
        self._by_id: dict[str, Request] = {}
        self._groups: dict[str, SequenceGroup] = {}
        self.failed: list[SequenceGroup] = []
        """Groups in which a sequence failed. Their other sequences are aborted before the next decision."""

    def __len__(self) -> int:
        """The number of live sequences."""
        return len(self._by_id)

    def __iter__(self) -> Iterator[Request]:
        """Yields every live sequence, in the order of submission."""
        return iter(self._by_id.values())

    def in_use(self, request_id: str, sequence_ids: Collection[str]) -> bool:
        """Returns whether a live request has this id or one of these sequence ids."""
        return request_id in self._groups or not self._by_id.keys().isdisjoint(sequence_ids)

    def add(self, requests: Iterable[Request]) -> None:
        """Adds the sequences of one request."""
        for request in requests:
            self._by_id[request.request_id] = request
            if request.group is not None:
                self._groups[request.group.request_id] = request.group

    def sequences_of(self, request_id: str) -> list[Request]:
        """Returns the live sequences of the request that the client calls `request_id`."""
        if request_id in self._groups:
            return list(self._groups[request_id].members)
        request = self._by_id.get(request_id)
        return [] if request is None or request.group is not None else [request]

    def remove(self, request: Request) -> None:
        """Removes a sequence that has ended."""
        self._by_id.pop(request.request_id, None)
        group = request.group
        if group is not None:
            group.members.remove(request)
            if (group.failed or not group.members) and self._groups.get(group.request_id) is group:
                del self._groups[group.request_id]
                self.failed.append(group)

    def take_failed(self) -> list[Request]:
        """Returns the live sequences of groups that have failed since the last call."""
        failed, self.failed = self.failed, []
        return [request for group in failed for request in group.members]


class WaitingQueue:
    """The queue that all replicas share; its order decides which request is next.

    A request that returns after a preemption or a lost worker keeps its arrival and so its place.
    A skipped request stays in the queue, but :meth:`peek` passes over it until it is brought back.
    """

    def __init__(self, order: PriorityFairOrder) -> None:
        """Starts empty; `order` belongs to this queue alone."""
        self._order = order
        self.tenants = order.tenants
        """Counts the members, and what waits for a place here, such as for a grammar."""
        self._members: dict[str, Request] = {}
        self._skipped: dict[Hashable, ArrivalQueue] = {}  # by group
        self._group: dict[str, Hashable] = {}  # the group of each skipped request

    def __len__(self) -> int:
        return len(self._members)

    def __contains__(self, request: Request) -> bool:
        return self._members.get(request.request_id) is request

    def __iter__(self) -> Iterator[Request]:
        """Yields every member once, in no particular order; the queue must not change meanwhile."""
        return iter(self._members.values())

    def add(self, request: Request) -> None:
        """Adds a request that is not in the queue."""
        self._members[request.request_id] = request
        self.tenants.add(request)
        self._order.add(request)

    def peek(self, now: float) -> Request | None:
        """Returns the next request without removing it.

        `now` is in seconds on the clock of `Request.arrival_s`.
        """
        return self._order.head(now)

    def remove(self, request: Request) -> bool:
        """Removes a request, skipped or not; returns False if it is not in the queue."""
        if request not in self:
            return False
        self.unskip(request)
        del self._members[request.request_id]
        self._order.remove(request)
        self.tenants.remove(request)
        return True

    def take(self, now: float, joins: Callable[[Request], bool | None]) -> None:
        """Removes the requests that `joins` accepts, in order; it returns None to end the search.

        The others keep their places. Ends after :data:`MOST_PASSED` of them, however many wait.
        """
        passed: list[Request] = []
        while (request := self.peek(now)) is not None and (accepted := joins(request)) is not None:
            if accepted:
                self.remove(request)
                continue
            self._order.remove(request)
            passed.append(request)
            if len(passed) == MOST_PASSED:
                break
        for request in passed:
            self._order.add(request)

    def skip(self, request: Request, group: Hashable) -> None:
        """Lets other requests pass a member until :meth:`bring_back` retries the oldest of its `group`."""
        self._order.remove(request)
        self._skipped.setdefault(group, ArrivalQueue()).add(request)
        self._group[request.request_id] = group

    def unskip(self, request: Request) -> None:
        """Returns a request to its place in the order, if it is skipped."""
        if (group := self._group.pop(request.request_id, None)) is None:
            return
        self._skipped[group].remove(request)
        if not self._skipped[group].requests:
            del self._skipped[group]
        self._order.add(request)

    def bring_back(self, group: Hashable | None = None) -> None:
        """Returns the oldest skipped request of `group`, or of every group, to its place in the order."""
        for requests in list(self._skipped.values()) if group is None else [self._skipped.get(group)]:
            if requests:
                self.unskip(requests.head)

    def bring_all_back(self) -> None:
        """Returns every skipped request to its place, because the groups are no longer valid."""
        for request_id in list(self._group):
            self.unskip(self._members[request_id])


class Queues:
    """Every request that no replica has: it waits for a grammar, then for a slot."""

    def __init__(self, order: PriorityFairOrder, clock: Callable[[], float]) -> None:
        """Starts empty; `order` belongs to the waiting queue alone, and `clock` gives monotonic seconds."""
        self.waiting = WaitingQueue(order)
        """Requests that wait for a slot, or for a replica to load their LoRA adapter."""
        self.grammars = GrammarQueue(self.waiting.tenants)
        """Requests that wait for their grammar."""
        self._clock = clock
        # Requests that wait on a replica for a prefix, by id.
        self._deferred: dict[str, Request] = {}

    def __len__(self) -> int:
        return len(self.waiting) + len(self.grammars)

    def __iter__(self) -> Iterator[Request]:
        """Yields every request once; the queues must not change meanwhile."""
        return itertools.chain(self.waiting, self.grammars)

    def remove_user(self, request: Request) -> None:
        """Ends the use of its grammar by a request that ended."""
        self.undefer(request)
        self.grammars.remove_user(request)

    def add(self, request: Request) -> None:
        """Adds a live request to the queue where it belongs."""
        self.undefer(request)
        if not self.grammars.hold(request):
            self.wait(request)
        elif request.trace is not None:
            request.trace.waits("grammar", self._clock())

    def wait(self, *requests: Request) -> None:
        """Adds requests that have their grammars."""
        for request in requests:
            request.state, request.waits_since_s = RequestState.WAITING, self._clock()
            self.waiting.add(request)
            if request.trace is not None:
                request.trace.waits("queue", self._clock())

    def settled(self, request: Request) -> None:
        """Removes a request that a replica took; one that waits there for a prefix still counts here."""
        self.waiting.remove(request)
        if request.state is RequestState.DEFERRED:
            self._deferred[request.request_id] = request
            self.waiting.tenants.add(request)

    def undefer(self, request: Request) -> None:
        """Notes that a request waits on no replica any more."""
        if self._deferred.pop(request.request_id, None) is not None:
            self.waiting.tenants.remove(request)

    def remove(self, request: Request) -> bool:
        """Removes a request; returns False if it is in no queue."""
        return self.waiting.remove(request) or self.grammars.remove(request)


class Capacity:
    """Decides whether the queue takes a submission.

    The limits that depend on replicas keep their last values while no replica is ready.
    """

    def __init__(self, max_waiting: int, max_waiting_tokens: int) -> None:
        """Starts without replicas.

        Args:
            max_waiting: requests that may wait at once.
            max_waiting_tokens: prompt tokens that may wait at once.
        """
        self._max_waiting = max_waiting
        self._max_waiting_tokens = max_waiting_tokens
        self._num_slots = 0
        self.rejections: Counter[str] = Counter()
        """Requests that the queue refused, by the limit that they would have exceeded."""
        self.max_request_tokens = 0
        """Longest sequence that fits into the KV memory of some replica."""

    def measure(self, replicas: Iterable[ReplicaScheduler | PoolScheduler], model_len: int) -> None:
        """Recomputes the limits that depend on the ready replicas, given the model's longest sequence."""
        generating = [one for one in replicas if isinstance(one, ReplicaScheduler)]
        self._num_slots = sum(one.shapes.max_num_seqs for one in generating)
        self.max_request_tokens = max((one.kv.max_tokens(model_len) for one in generating), default=0)

    def check(self, submissions: Sequence[Submission], tenants: Tenants) -> None:
        """Refuses the submissions of a call if they do not fit into the queue, now or ever.

        An empty queue takes a call of any size, because no later time would be better for it. The queue takes
        several times as many requests that an earlier scheduler accepted: clients wait for the rest of
        their answers, and the requests that ran there are more than those that may wait here. It cannot be
        proved that they were accepted, so there is a limit.

        Raises:
            InvalidArgument: a request has too many sequences for this deployment.
            Overloaded: the queue is full.
        """
        max_waiting, max_tokens = self._max_waiting, self._max_waiting_tokens
        count = num_tokens = 0
        for submission in submissions:
            sequences, num_prompt = submission.sequences, len(submission.prompt_token_ids)
            count += len(sequences)
            num_tokens += len(sequences) * num_prompt + sum(map(len, sequences.values()))
            if len(sequences) > 1 and not submission.was_accepted:
                self._check_count(len(sequences), num_prompt)
        if submissions[0].was_accepted:
            max_waiting = RESUMED_FACTOR * max_waiting + self._num_slots
            max_tokens = RESUMED_FACTOR * max_tokens + self._num_slots * self.max_request_tokens
        limit = tenants.exceeds(submissions[0].tenant, count, num_tokens, max_waiting, max_tokens)
        if limit is not None:
            self.rejections[limit] += len(submissions)
            raise Overloaded(
                f"{tenants.num_requests} requests with {tenants.num_tokens} tokens are waiting; retry later",
                retry_after_ms=1000,
            )

    def _check_count(self, count: int, num_prompt: int) -> None:
        """Refuses more sequences of one prompt than may ever wait."""
        limit = min(MAX_SEQUENCES, self._max_waiting, SEQUENCES_PER_SLOT * self._num_slots)
        if count > limit:
            raise InvalidArgument(
                f"n must be at most {limit} here, not {count}; send several requests", param="n"
            )
        if count * num_prompt > self._max_waiting_tokens:
            raise InvalidArgument(
                f"{count} sequences of {num_prompt} prompt tokens exceed the {self._max_waiting_tokens} tokens that may wait; "
                "send several requests with a smaller n",
                param="n",
            )
