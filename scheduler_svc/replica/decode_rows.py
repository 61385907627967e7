"""The decoding requests of a replica: the rows of its decode steps, and the steps that they may run."""

from collections.abc import Callable, Iterable

from scheduler_svc.kv.cache import KvCache
from scheduler_svc.replica.plans import BatchRows, Changes, StepsInFlight, batch_of
from scheduler_svc.replica.stats import SchedulerStats
from scheduler_svc.requests.request import Request, RequestState

Room = Callable[[Request, int], bool]
"""Grows a request's tables to a number of tokens; returns whether it did."""


class DecodeRows:
    """Requests that decode together.

    Each advances by one token a step, so a request's place when all plans have run, its *granted* tokens, is
    known without results. A plan costs a few comparisons as long as the rows stay the same: only a row that
    runs out of blocks, or joins or leaves, costs more.
    """

    def __init__(self, kv: KvCache, changes: Changes, in_flight: StepsInFlight) -> None:
        """Starts empty.

        Args:
            kv: has the requests' blocks.
            changes: limits the admissions of a plan.
            in_flight: the plans that are sent already.
        """
        self._kv = kv
        self._changes = changes
        self._in_flight = in_flight
        self.members: dict[str, Request] = {}
        """The requests by id, in the order in which they began to decode."""
        self.has_joined = False
        """Whether a request has joined that no plan has a row for yet."""
        self.batch = BatchRows()
        """The rows of the latest plan."""
        self._changed = False
        # Whether members have no row because their admissions exceed what a plan can carry.
        self._leaves_out = False
        # Steps granted to the rows since they changed last. By row: before which step it needs blocks, and
        # after which it has all its tokens.
        self._step = 0
        self._rooms: list[int] = []
        self._first_to_grow = 0
        self._first_to_end = 0
        # The tokens that the first of these steps attends to.
        self._context = 0
        self.context_tokens = 0
        """Tokens that the first step of the latest plan attends to."""

    def add(self, request: Request) -> None:
        """Adds a request that has a slot."""
        request.state = RequestState.DECODING
        self.members[request.request_id] = request
        self._changed = self.has_joined = True

    def remove(self, request: Request) -> None:
        """Removes a request, after making findable what it decoded."""
        self._kv.prefixes.index_decoded(request.kv)
        del self.members[request.request_id]
        self._changed = True
        self.has_joined = self.has_joined and bool(self.members)

    def refresh(self) -> None:
        """Notes that granted steps did not run: places must be counted anew."""
        self._changed = True

    def grant(self, most_steps: int, grow: Room, make_room: Room) -> int:
        """Grants the rows steps in a row, with blocks for all of them.

        Args:
            most_steps: the most steps.
            grow: gives a request blocks if there are free ones.
            make_room: gives a request blocks, and may preempt this or other requests for them.

        Returns:
            The steps, until a row has all its tokens or blocks run out; 0 if there is no row, or no room
            for one step now. The rows are :attr:`batch`.
        """
        while True:
            if self._changed or self._step >= self._first_to_end:
                self._count_rows_anew()
            if not self.batch.requests:
                return 0
            steps = min(most_steps, self._first_to_end - self._step)
            if self._step + steps > self._first_to_grow:
                steps = self._reserve(steps, grow, make_room)
            if not self._changed:
                break
        self.context_tokens = self._context + self._step * len(self.batch.requests)
        self._step += steps
        if steps:
            self.has_joined = self._changed = self._leaves_out
        return steps

    def _count_rows_anew(self) -> None:
        """Reads from requests and plans in flight which rows the next step has, and how far each can go."""
        self._changed, self._step = False, 0
        in_flight = self._in_flight.granted()
        rows = [
            (request, granted)
            for request in self.members.values()
            if (granted := request.kv.num_computed + in_flight.get(request, 0)) + 1 < request.end
        ]
        fitting = self._changes.first_that_fit([request for request, _ in rows])
        self._leaves_out = len(fitting) < len(rows)
        del rows[len(fitting) :]
        self.batch = batch_of(tuple(fitting))
        # The last token of a sequence is never computed.
        self._first_to_end = min((request.end - 1 - granted for request, granted in rows), default=0)
        capacity = self._kv.capacity
        self._rooms = [capacity(request.kv, request.end) - granted for request, granted in rows]
        self._first_to_grow = min(self._rooms, default=0)
        self._context = sum(granted + 1 for _, granted in rows)

    def _reserve(self, steps: int, grow: Room, make_room: Room) -> int:
        """Gives blocks to the rows that need some; returns how many of these steps all rows can run."""
        kv, step = self._kv, self._step
        for row, request in enumerate(self.batch.requests):
            left = self._rooms[row] - step
            if left >= steps:
                continue
            kv.prefixes.index_decoded(request.kv)
            granted = kv.capacity(request.kv, request.end) - left
            if not grow(request, granted + steps):
                if left < 1 and (not make_room(request, granted + 1) or self._changed):
                    return 0
                steps = min(steps, max(left, 1))
            self._rooms[row] = kv.capacity(request.kv, request.end) - granted + step
        self._first_to_grow = min(self._rooms)
        return steps


class Decoding:
    """The decoding requests of a replica, in as many batches as its pipeline has stages.

    While a step of one batch passes through a stage, the others keep the other stages busy. A request joins
    the smallest batch. It stays there until it leaves, or until another batch has become so much smaller
    that moving it pays.
    """

    def __init__(
        self, count: int, kv: KvCache, changes: Changes, in_flight: StepsInFlight, stats: SchedulerStats,
        charge: Callable[[str, int], None], observe_batch: Callable[[int], None],
    ) -> None:  # fmt: skip
        """Starts empty.

        Args:
            count: the number of batches.
            kv: has the requests' blocks.
            changes: limits the admissions of a plan.
            in_flight: the plans that are sent already.
            stats: counts steps and stalls.
            charge: charges a tenant for its rows of a step.
            observe_batch: receives the number of rows of each step.
        """
        self._stats = stats
        self._charge = charge
        self._observe_batch = observe_batch
        # The one first that was planned least recently.
        self._batches = [DecodeRows(kv, changes, in_flight) for _ in range(count)]
        # The batch of each request, by request id.
        self._homes: dict[str, DecodeRows] = {}
        self.stalled_since: float | None = None
        """Clock reading since which chunks have kept all batches from decoding; None while one decodes."""

    def __len__(self) -> int:
        """The number of decoding requests."""
        return len(self._homes)

    @property
    def is_pipelined(self) -> bool:
        """Whether there are several batches, one for each stage."""
        return len(self._batches) > 1

    @property
    def num_active(self) -> int:
        """Batches that have requests."""
        return sum(bool(batch.members) for batch in self._batches)

    @property
    def has_joined(self) -> bool:
        """Whether a request has joined that no plan has a row for yet."""
        return any(batch.has_joined for batch in self._batches)

    def add(self, request: Request) -> None:
        """Adds a request that has a slot."""
        batch = min(self._batches, key=_size)
        self._homes[request.request_id] = batch
        batch.add(request)

    def remove(self, request: Request) -> None:
        """Removes a request, after making findable what it decoded."""
        self._homes.pop(request.request_id).remove(request)
        if not self._homes:
            self.stalled_since = None

    def refresh(self) -> None:
        """Notes that granted steps did not run."""
        for batch in self._batches:
            batch.refresh()

    def grant(
        self, most_steps: int, buckets: Iterable[int], grow: Room, make_room: Room
    ) -> tuple[DecodeRows, int]:
        """Grants steps to the batch that has waited longest of those that can decode.

        Args:
            most_steps: the most steps.
            buckets: decode batch sizes.
            grow: gives a request blocks if there are free ones.
            make_room: gives a request blocks, and may preempt this or other requests for them.

        Returns:
            The batch and its steps; 0 steps if no batch can decode.
        """
        for batch in tuple(self._batches):
            if not batch.members:
                continue
            if self.is_pipelined:
                self._rebalance(batch, buckets)
            if steps := batch.grant(most_steps, grow, make_room):
                self._batches.remove(batch)
                self._batches.append(batch)
                return batch, steps
        return self._batches[0], 0

    def _rebalance(self, batch: DecodeRows, buckets: Iterable[int]) -> None:
        """Moves requests from a batch to the smallest one, if that is empty or this one's bucket falls."""
        size, smallest = len(batch.members), min(self._batches, key=_size)
        moved = (size - len(smallest.members)) // 2
        if moved <= 0:
            return
        if not smallest.members or any(size - moved <= bucket < size for bucket in buckets):
            for request in list(batch.members.values())[-moved:]:
                batch.remove(request)
                self._homes[request.request_id] = smallest
                smallest.add(request)

    def count_steps(self, batch: BatchRows, bucket: int, steps: int, seconds: float) -> None:
        """Counts decode steps that ran for some seconds each, and charges the tenants of their rows."""
        rows = len(batch.requests)
        for _ in range(steps):
            self._count_rows(rows, bucket, seconds)
        for tenant, count in batch.tenants.items():
            self._charge(tenant, count * steps)

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


def _size(batch: DecodeRows) -> int:
    return len(batch.members)
