"""Live requests of an engine, the queues of those on no replica, and the queues' limits."""

import itertools
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence

from protos.errors import InvalidArgument, Overloaded
from protos.limits import MAX_SEQUENCES
from scheduler_svc.engine.grammar_queue import GrammarQueue
from scheduler_svc.policy.order import ArrivalQueue, PriorityFairOrder
from scheduler_svc.policy.tenants import Tenants
from scheduler_svc.replica.pooling import PoolScheduler
from scheduler_svc.replica.scheduler import ReplicaScheduler
from scheduler_svc.requests.admission import Submission
from scheduler_svc.requests.request import Request, RequestState, SequenceGroup

SEQUENCES_PER_SLOT = 16
"""Most sequences of a request per slot of the deployment."""

RESUMED_FACTOR = 4
"""Resumed requests may fill the queue to this multiple of its limits, plus a request per slot."""

MOST_PASSED = 512
"""Most waiting requests of other lengths passed over to fill a pooling batch."""


class LiveRequests:
    """Registry of unfinished requests.

    A client request with several sequences is a :class:`Request` each; its id finds all of them.
    """

    def __init__(self) -> None:
        self._by_id: dict[str, Request] = {}
        self._groups: dict[str, SequenceGroup] = {}
        self.failed: list[SequenceGroup] = []
        """Groups with a failed sequence. Their other sequences are aborted before the next decision."""

    def __iter__(self) -> Iterator[Request]:
        """Yields every live sequence, in the order of submission."""
        return iter(self._by_id.values())

    def in_use(self, request_id: str, sequence_ids: Collection[str]) -> bool:
        """Returns whether a live request uses this id or any of these sequence ids."""
        return request_id in self._groups or not self._by_id.keys().isdisjoint(sequence_ids)

    def add(self, requests: Iterable[Request]) -> None:
        """Adds the sequences of a request."""
        for request in requests:
            self._by_id[request.request_id] = request
            if request.group is not None:
                self._groups[request.group.request_id] = request.group

    def sequences_of(self, request_id: str) -> list[Request]:
        """Returns the live sequences of a client request."""
        if request_id in self._groups:
            return list(self._groups[request_id].members)
        request = self._by_id.get(request_id)
        return [] if request is None or request.group is not None else [request]

    def remove(self, request: Request) -> None:
        """Removes a finished sequence."""
        self._by_id.pop(request.request_id, None)
        group = request.group
        if group is not None:
            group.members.remove(request)
            if (group.failed or not group.members) and self._groups.get(group.request_id) is group:
                del self._groups[group.request_id]
                self.failed.append(group)

    def take_failed(self) -> list[Request]:
        """Returns the live sequences of groups failed since the last call."""
        failed, self.failed = self.failed, []
        return [request for group in failed for request in group.members]


class WaitingQueue:
    """The queue shared by all replicas, sorted by its order.

    A request requeued after a preemption or a lost worker keeps its arrival and so its place. A skipped
    request stays in the queue, but :meth:`peek` passes over it until it is brought back.
    """

    def __init__(self, order: PriorityFairOrder) -> None:
        """Starts empty; `order` belongs to this queue alone."""
        self._order = order
        self.tenants = order.tenants
        """Counts the members, and requests waiting elsewhere, such as for a grammar."""
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
        """Adds a new member."""
        self._members[request.request_id] = request
        self.tenants.add(request)
        self._order.add(request)

    def peek(self, now: float) -> Request | None:
        """Returns the next request at clock reading `now`, without removing it."""
        return self._order.head(now)

    def remove(self, request: Request) -> bool:
        """Removes a request, skipped or not; returns whether it was a member."""
        if request not in self:
            return False
        self.unskip(request)
        del self._members[request.request_id]
        self._order.remove(request)
        self.tenants.remove(request)
        return True

    def take(self, now: float, joins: Callable[[Request], bool | None]) -> None:
        """Removes the requests accepted by `joins`, in order, until it returns None.

        The others keep their places. The search ends after :data:`MOST_PASSED` of them.
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
    """Every request on no replica: it waits for a grammar, then for a slot."""

    def __init__(self, order: PriorityFairOrder, clock: Callable[[], float]) -> None:
        """Starts empty; `order` belongs to the waiting queue alone, and `clock` gives monotonic seconds."""
        self.waiting = WaitingQueue(order)
        """Requests waiting for a slot or their LoRA adapter."""
        self.grammars = GrammarQueue(self.waiting.tenants)
        """Requests waiting for their grammar."""
        self._clock = clock
        # Requests waiting on a replica for a prefix, by id.
        self._deferred: dict[str, Request] = {}

    def __iter__(self) -> Iterator[Request]:
        """Yields every request once; the queues must not change meanwhile."""
        return itertools.chain(self.waiting, self.grammars)

    def remove_user(self, request: Request) -> None:
        """Ends the use of a grammar by a finished request."""
        self.undefer(request)
        self.grammars.remove_user(request)

    def add(self, request: Request) -> None:
        """Adds a live request to the queue for its grammar, or else for a slot."""
        self.undefer(request)
        if not self.grammars.hold(request):
            self.wait(request)
        elif request.trace is not None:
            request.trace.waits("grammar", self._clock())

    def wait(self, *requests: Request) -> None:
        """Adds requests to wait for a slot: their grammar, if any, is compiled."""
        for request in requests:
            request.state, request.waits_since_s = RequestState.WAITING, self._clock()
            self.waiting.add(request)
            if request.trace is not None:
                request.trace.waits("queue", self._clock())

    def settled(self, request: Request) -> None:
        """Removes a request settled on a replica; while it waits there for a prefix, it still counts here."""
        self.waiting.remove(request)
        if request.state is RequestState.DEFERRED:
            self._deferred[request.request_id] = request
            self.waiting.tenants.add(request)

    def undefer(self, request: Request) -> None:
        """Stops counting a request deferred on a replica."""
        if self._deferred.pop(request.request_id, None) is not None:
            self.waiting.tenants.remove(request)

    def remove(self, request: Request) -> bool:
        """Removes a request; returns whether it was in a queue."""
        return self.waiting.remove(request) or self.grammars.remove(request)


class Capacity:
    """Decides whether the queue accepts a submission.

    Limits derived from replicas keep their last values while no replica is ready.
    """

    def __init__(self, max_waiting: int, max_waiting_tokens: int) -> None:
        """Starts without replicas, with limits of waiting requests and of their prompt tokens."""
        self._max_waiting = max_waiting
        self._max_waiting_tokens = max_waiting_tokens
        self._num_slots = 0
        self.rejections: Counter[str] = Counter()
        """Requests refused by the queue, by exceeded limit."""
        self.max_request_tokens = 0
        """Longest sequence that fits the KV memory of some replica."""

    def measure(self, replicas: Iterable[ReplicaScheduler | PoolScheduler], model_len: int) -> None:
        """Recomputes the limits derived from the ready replicas and the model's longest sequence."""
        generating = [one for one in replicas if isinstance(one, ReplicaScheduler)]
        self._num_slots = sum(one.shapes.max_num_seqs for one in generating)
        self.max_request_tokens = max((one.kv.max_tokens(model_len) for one in generating), default=0)

    def check(self, submissions: Sequence[Submission], tenants: Tenants) -> None:
        """Refuses the submissions of a call if they do not fit into the queue, now or ever.

        An empty queue accepts a call of any size, because no later time would be better for it. The limits
        are several times higher for requests accepted by an earlier scheduler: their clients wait for the
        rest of the answers, and the requests running there outnumber the places here. A limit remains,
        because the earlier acceptance is unproven.

        Raises:
            InvalidArgument: too many sequences in a request for this deployment.
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
