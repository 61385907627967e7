"""The requests that decode together, and the steps before which they need room.

A replica of one pipeline stage has one decode batch. A replica of several stages has one for each stage, its
micro-batches: while one of them passes through a stage, the others keep the other stages busy.
"""

from collections import Counter
from collections.abc import Callable, Collection

from scheduler_svc.kv.cache import KvCache
from scheduler_svc.replica.plans import BatchRows
from scheduler_svc.replica.stats import SchedulerStats
from scheduler_svc.requests.request import Request, RequestState, Sink


class DecodeBatch:
    """The requests that run one token with every decode step.

    All of them advance by one token per step, so the step before which each needs its next block is known in
    advance and noted in a calendar. A decode step therefore costs only a few operations per request.
    """

    def __init__(
        self, index: int, kv: KvCache, count_rows: Callable[[int, int, float], None], charge: Callable[[str, int], None]
    ) -> None:  # fmt: skip
        """Starts empty.

        Args:
            index: its place among the replica's micro-batches.
            kv: has the requests' blocks.
            count_rows: counts a step, given its rows, its bucket and its seconds.
            charge: charges a tenant for its rows of a step.
        """
        self.index = index
        """Its place among the replica's micro-batches."""
        self._kv = kv
        self._prefixes = kv.prefixes
        self._count_rows = count_rows
        self._charge = charge
        self.members: dict[str, Request] = {}
        """The requests by id, in the order in which they began to decode."""
        self.has_first_tokens = False
        """Whether some request has generated nothing yet; its first token takes the slower path of
        results."""
        self.batch = BatchRows(micro_batch=index)
        """The requests of the step that :meth:`prepare` was last called for."""
        self.positions: tuple[int, ...] = ()
        """The position that the step computes for each, in the same order."""
        # The index of the step that `positions` is for. None if a result did not give every row one token:
        # positions must then be read from the requests.
        self._positions_step: int | None = None
        self._changed = False
        # Number of each request's present stay, by request id; stale entries elsewhere have another number.
        self._stays: dict[str, int] = {}
        self._num_stays = 0
        # Requests that decode from the next plan on and are not in the calendar yet, with their stay.
        self._joining: list[tuple[Request, int]] = []
        # The first step of each request's stay, by request id.
        self._starts: dict[str, int] = {}
        # Decode steps answered so far, and the requests that need room before each of them, with their stay.
        self._steps = 0
        self._calendar: dict[int, list[tuple[Request, int]]] = {}
        # Requests that got room ahead of such a step; it fills a block, which can be found from then on.
        self._filled: dict[int, list[tuple[Request, int]]] = {}

    def add(self, request: Request) -> None:
        """Adds a request that has a slot."""
        request.state = RequestState.DECODING
        self.members[request.request_id] = request
        self._changed = True
        self.has_first_tokens |= request.can_fork
        self._num_stays += 1
        self._stays[request.request_id] = self._num_stays
        # The calendar starts with the next plan: the request has no part in a step or lease that is in
        # flight.
        self._joining.append((request, self._num_stays))

    def remove(self, request: Request) -> None:
        """Removes a request, after making findable what it decoded."""
        self._prefixes.index_decoded(request.kv)
        del self.members[request.request_id]
        del self._stays[request.request_id]
        self._starts.pop(request.request_id, None)
        self._changed = True

    def applied_row_by_row(self) -> None:
        """Notes a result with first tokens, or without exactly one token for each row."""
        self._positions_step = None
        self.has_first_tokens = any(request.can_fork for request in self.members.values())

    def count_step(self, batch: BatchRows, bucket: int, seconds: float) -> None:
        """Counts a decode step that ran for some seconds, and charges the tenants of its rows."""
        self._count_rows(len(batch.requests), bucket, seconds)
        self._steps += 1
        for tenant, rows in batch.tenants.items():
            self._charge(tenant, rows)

    # ---- room ----

    def prepare(self, make_room: Callable[[Request, int], bool], *, behind: int = 0) -> BatchRows:
        """Makes room for the next token of each request; returns the rows of the step.

        Args:
            make_room: called for each request that needs a block; may remove this or other requests.
            behind: decode steps that are in flight and not answered. Requests that end in them are left out.
        """
        step = self._steps + behind
        self._enter_joining(step)
        if self._filled:
            self._index_filled()
        for request, stay in self._calendar.pop(step, ()):
            if self._stays.get(request.request_id) != stay:
                continue  # it left, and may be back with another table
            self._prefixes.index_decoded(request.kv)
            if make_room(request, self._kv.capacity(request.kv, request.end) + 1):
                self._enter(request, stay)
        if self._changed or behind:
            rows = tuple([one for one in self.members.values() if self._tokens_at(one, step) < one.end])
            if self._changed or len(rows) != len(self.batch.requests):
                self.batch = _batch_of(rows, self.index)
                self._positions_step = None
            # Requests that are left out have not left yet, and may run on.
            self._changed = len(rows) != len(self.members)
        if self._positions_step is None:
            self.positions = tuple([self._tokens_at(request, step) - 1 for request in self.batch.requests])
        elif advanced := step - self._positions_step:
            self.positions = tuple([position + advanced for position in self.positions])
        self._positions_step = step
        return self.batch

    def reserve(self, longest: int, grow: Callable[[Request, int], bool], *, behind: int = 0) -> int:
        """Makes room for steps in a row, which a lease allows, as long as there are free blocks.

        Args:
            longest: most steps, the one that :meth:`prepare` made room for included.
            grow: called for each request that needs a block; returns False if no block is free.
            behind: as for :meth:`prepare`.

        Returns:
            The number of steps that can run without a block, or until a request reaches its limit.
        """
        first = self._steps + behind
        longest = min(
            longest, *[request.end - self._tokens_at(request, first) for request in self.batch.requests]
        )
        for step in range(first + 1, first + longest):
            if not self._reserve_step(step, grow):
                return step - first
        return longest

    def reserve_next(self, grow: Callable[[Request, int], bool], *, behind: int = 0) -> bool:
        """Makes room for the next token of each request if there are free blocks; returns whether it did."""
        step = self._steps + behind
        self._enter_joining(step)
        return self._reserve_step(step, grow)

    def withdraw(self, behind: int = 0) -> None:
        """Notes that the step that was prepared last is not run.

        Args:
            behind: as for :meth:`prepare`.
        """
        self._changed = True
        self._positions_step = None
        for request_id, start in list(self._starts.items()):
            if start >= self._steps + behind:
                # Its first step may come earlier than planned.
                del self._starts[request_id]
                self._num_stays += 1
                self._stays[request_id] = self._num_stays
                self._joining.append((self.members[request_id], self._num_stays))

    def _tokens_at(self, request: Request, step: int) -> int:
        """Returns how many tokens a request has before a step, if every step before it gives it one."""
        return len(request.token_ids) + step - max(self._steps, self._starts.get(request.request_id, 0))

    def _reserve_step(self, step: int, grow: Callable[[Request, int], bool]) -> bool:
        """Gives blocks to the requests that need room before a step; False if there are too few."""
        due = self._calendar.pop(step, ())
        for index, (request, stay) in enumerate(due):
            if self._stays.get(request.request_id) != stay:
                continue
            if not grow(request, self._kv.capacity(request.kv, request.end) + 1):
                self._calendar[step] = list(due[index:])
                return False
            self._filled.setdefault(step, []).append((request, stay))
            self._enter(request, stay)
        return True

    def _enter_joining(self, step: int) -> None:
        """Notes the requests in the calendar whose first step this is."""
        if not self._joining:
            return
        joining, self._joining = self._joining, []
        for request, stay in joining:
            if self._stays.get(request.request_id) == stay:
                self._starts[request.request_id] = step
                self._enter(request, stay)

    def _index_filled(self) -> None:
        """Makes the blocks findable that have been filled since they were reserved."""
        for step in [step for step in self._filled if step <= self._steps]:
            for request, stay in self._filled.pop(step):
                if self._stays.get(request.request_id) == stay:
                    self._prefixes.index_decoded(request.kv)

    def _enter(self, request: Request, stay: int) -> None:
        """Notes in the calendar when a request with room for its next token needs room again."""
        capacity = self._kv.capacity(request.kv, request.end)
        if capacity >= request.end:
            return
        due = max(self._steps, self._starts[request.request_id]) + capacity - request.kv.num_computed
        self._calendar.setdefault(due, []).append((request, stay))


class MicroBatches:
    """The decode batches of a replica, which advance independently of one another.

    A request joins the smallest batch. It stays there until it leaves, or until another batch has become so
    much smaller that moving it pays.
    """

    def __init__(
        self, count: int, kv: KvCache, stats: SchedulerStats, charge: Callable[[str, int], None],
        observe_batch: Callable[[int], None],
    ) -> None:  # fmt: skip
        """Starts empty.

        Args:
            count: the number of batches.
            kv: has the requests' blocks.
            stats: counts steps and stalls.
            charge: charges a tenant for its rows of a step.
            observe_batch: receives the number of rows of each step.
        """
        self._stats = stats
        self._charge = charge
        self._observe_batch = observe_batch
        self.batches = tuple([DecodeBatch(index, kv, self._count_rows, charge) for index in range(count)])
        """The batches by index."""
        # The batch of each request, by request id.
        self._homes: dict[str, DecodeBatch] = {}
        self.stalled_since: float | None = None
        """Clock reading since which chunks have kept all batches from decoding; None while one decodes."""

    def __len__(self) -> int:
        """The number of decoding requests."""
        return len(self._homes)

    @property
    def num_active(self) -> int:
        """Batches that have requests."""
        return sum(bool(batch.members) for batch in self.batches)

    def batch_of(self, rows: BatchRows) -> DecodeBatch:
        """Returns the batch that a step was planned for."""
        return self.batches[rows.micro_batch]

    def add(self, request: Request) -> None:
        """Adds a request that has a slot."""
        batch = min(self.batches, key=_size)
        self._homes[request.request_id] = batch
        batch.add(request)

    def remove(self, request: Request) -> None:
        """Removes a request, after making findable what it decoded."""
        self._homes.pop(request.request_id).remove(request)
        if not self._homes:
            self.stalled_since = None

    def rebalance(self, batch: DecodeBatch, buckets: Collection[int]) -> None:
        """Moves requests from a batch to the smallest one, if that is empty or this one's bucket falls.

        Args:
            batch: a batch without a step in flight.
            buckets: decode batch sizes.
        """
        size, smallest = len(batch.members), min(self.batches, key=_size)
        moved = (size - len(smallest.members)) // 2
        if moved <= 0:
            return
        if not smallest.members or any(size - moved <= bucket < size for bucket in buckets):
            for request in list(batch.members.values())[-moved:]:
                batch.remove(request)
                self._homes[request.request_id] = smallest
                smallest.add(request)

    def count_step_outside(self, request: Request, bucket: int, seconds: float) -> None:
        """Counts a decode step of a request that is in no batch."""
        self._count_rows(1, bucket, seconds)
        self._charge(request.tenant, 1)

    def _count_rows(self, count: int, bucket: int, seconds: float) -> None:
        self._stats.count_decode(count, bucket, seconds)
        self._observe_batch(count)

    # ---- stalls ----

    def stall(self, since_s: float) -> None:
        """Notes that a chunk that began at ``since_s`` keeps decoding requests, if there are any, waiting."""
        if self._homes and self.stalled_since is None:
            self.stalled_since = since_s

    def end_stall(self, now_s: float) -> None:
        """Counts a stall that ends with a decode step that began at ``now_s``."""
        assert self.stalled_since is not None
        stall = now_s - self.stalled_since
        self._stats.stall_s += stall
        self._stats.longest_stall_s = max(self._stats.longest_stall_s, stall)
        self.stalled_since = None


def _size(batch: DecodeBatch) -> int:
    return len(batch.members)


def _batch_of(requests: tuple[Request, ...], micro_batch: int) -> BatchRows:
    slots = tuple([request.slot for request in requests if request.slot is not None])
    tenants = Counter(request.tenant for request in requests)
    sinks: dict[int, tuple[Sink, list[str], list[int]]] = {}
    for row, request in enumerate(requests):
        _, request_ids, rows = sinks.setdefault(id(request.sink), (request.sink, [], []))
        request_ids.append(request.request_id)
        rows.append(row)
    if len(sinks) == 1:
        ((sink, request_ids, _),) = sinks.values()
        return BatchRows(requests, slots, [(sink, request_ids, None)], tenants, micro_batch)
    return BatchRows(requests, slots, list(sinks.values()), tenants, micro_batch)
