"""The requests that decode together, and the steps before which they need room."""

from collections import Counter
from collections.abc import Callable

from scheduler_svc.kv.cache import KvCache
from scheduler_svc.replica.stats import BucketStats, SchedulerStats
from scheduler_svc.requests.request import Request, RequestState, Sink


class DecodeBatch:
    """The requests that run one token with every decode step.

    All of them advance by one token per step, so the step before which each needs its next block is known in
    advance and noted in a calendar. A decode step therefore costs only a few operations per request.
    """

    def __init__(
        self, kv: KvCache, stats: SchedulerStats, charge: Callable[[str, int], None], observe_batch: Callable[[int], None]
    ) -> None:  # fmt: skip
        """Starts empty.

        Args:
            kv: has the requests' blocks.
            stats: counts steps and stalls.
            charge: charges a tenant for its rows of a step.
            observe_batch: receives the number of rows of each step.
        """
        self._kv = kv
        self._prefixes = kv.prefixes
        self._stats = stats
        self._charge = charge
        self._observe_batch = observe_batch
        self.members: dict[str, Request] = {}
        """The requests by id, in the order in which they began to decode."""
        self.has_first_tokens = False
        """Whether some request has generated nothing yet; its first token takes the slower path of
        results."""
        self.stalled_since: float | None = None
        """Clock reading since which chunks have kept the batch from decoding; None while it decodes."""
        self._tenants: Counter[str] = Counter()
        self.rows: tuple[Request, ...] = ()
        """The requests in batch order, as of the last :meth:`prepare`."""
        self.slots: tuple[int, ...] = ()
        """Their slots, in the same order."""
        self.positions: tuple[int, ...] = ()
        """The position that the step computes for each, in the same order."""
        self.sinks: list[tuple[Sink, list[str], list[int] | None]] = []
        """The sinks of the requests; with each its requests' ids and their rows, None for all rows."""
        # The number of the step that `positions` is for. None if a result did not give every row one token:
        # positions must then be read from the requests.
        self._positions_step: int | None = None
        self._changed = False
        # Number of each request's present stay, by request id; stale entries elsewhere have another number.
        self._stays: dict[str, int] = {}
        self._num_stays = 0
        # Requests that decode from the next plan on and are not in the calendar yet, with their stay.
        self._joining: list[tuple[Request, int]] = []
        # Decode steps planned so far, and the requests that need room before each of them, with their stay.
        self._steps = 0
        self._calendar: dict[int, list[tuple[Request, int]]] = {}
        # Requests that got room ahead of such a step; it fills a block, which can be found from then on.
        self._filled: dict[int, list[tuple[Request, int]]] = {}

    def add(self, request: Request) -> None:
        """Adds a request that has a slot."""
        request.state = RequestState.DECODING
        self.members[request.request_id] = request
        self._tenants[request.tenant] += 1
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
        self._tenants[request.tenant] -= 1
        if not self._tenants[request.tenant]:
            del self._tenants[request.tenant]
        self._changed = True
        if not self.members:
            self.stalled_since = None

    def applied_row_by_row(self) -> None:
        """Notes a result with first tokens, or without exactly one token for each row."""
        self._positions_step = None
        self.has_first_tokens = any(request.can_fork for request in self.members.values())

    def count_step(self, count: int, bucket: int) -> None:
        """Counts a decode step of ``count`` rows, planned or run by a lease, and charges the tenants."""
        self._count_rows(count, bucket)
        self._steps += 1
        for tenant, rows in self._tenants.items():
            self._charge(tenant, rows)

    def count_step_outside(self, request: Request, bucket: int) -> None:
        """Counts a decode step of a request that is not in the batch."""
        self._count_rows(1, bucket)
        self._charge(request.tenant, 1)

    def _count_rows(self, count: int, bucket: int) -> None:
        stats = self._stats.buckets.get(bucket)
        if stats is None:
            stats = self._stats.buckets[bucket] = BucketStats()
        stats.steps += 1
        stats.rows += count
        self._observe_batch(count)

    # ---- stalls ----

    def stall(self, since_s: float) -> None:
        """Notes that a chunk sent at ``since_s`` keeps the batch, if it has members, from decoding."""
        if self.members and self.stalled_since is None:
            self.stalled_since = since_s

    def end_stall(self, now_s: float) -> None:
        """Counts a stall that ends with a decode step sent at ``now_s``."""
        assert self.stalled_since is not None
        stall = now_s - self.stalled_since
        self._stats.stall_s += stall
        self._stats.longest_stall_s = max(self._stats.longest_stall_s, stall)
        self.stalled_since = None

    # ---- room ----

    def prepare(self, make_room: Callable[[Request, int], bool]) -> tuple[Request, ...]:
        """Makes room for the next token of each request; returns the requests of the step.

        Args:
            make_room: called for each request that needs a block; may remove this or other requests.
        """
        if self._joining:
            joining, self._joining = self._joining, []
            for request, stay in joining:
                if self._stays.get(request.request_id) == stay:
                    self._enter(request, stay)
        if self._filled:
            self._index_filled()
        for request, stay in self._calendar.pop(self._steps, ()):
            if self._stays.get(request.request_id) != stay:
                continue  # it left, and may be back with another table
            self._prefixes.index_decoded(request.kv)
            if make_room(request, request.kv.num_computed + 1):
                self._enter(request, stay)
        if self._changed:
            self._changed = False
            self.rows = tuple(self.members.values())
            self.slots = tuple([request.slot for request in self.rows if request.slot is not None])
            self.sinks = self._by_sink()
            self._positions_step = None
        if self._positions_step is None:
            self.positions = tuple([len(request.token_ids) - 1 for request in self.rows])
        else:
            advanced = self._steps - self._positions_step
            self.positions = tuple([position + advanced for position in self.positions])
        self._positions_step = self._steps
        return self.rows

    def reserve(self, longest: int, grow: Callable[[Request, int], bool], *, behind: int = 0) -> int:
        """Makes room for steps in a row, which a lease allows, as long as there are free blocks.

        Args:
            longest: most steps. :meth:`prepare` made room for the next step already.
            grow: called for each request that needs a block; returns False if no block is free.
            behind: steps that have room and will run before these.

        Returns:
            The number of steps that can run without a block, or until a request reaches its limit.
        """
        first = self._steps + behind
        longest = min(longest, *[request.end - len(request.token_ids) - behind for request in self.rows])
        for step in range(first, first + longest):
            due = self._calendar.pop(step, ())
            for index, (request, stay) in enumerate(due):
                if self._stays.get(request.request_id) != stay:
                    continue
                if not grow(request, self._kv.capacity(request.kv, request.end) + 1):
                    self._calendar[step] = list(due[index:])
                    return step - first
                self._filled.setdefault(step, []).append((request, stay))
                self._enter(request, stay)
        return longest

    def renew(self, longest: int, grow: Callable[[Request, int], bool], *, behind: int) -> int:
        """Makes room for the steps after a lease whose results have begun to arrive; see :meth:`reserve`.

        Returns:
            Their number; 0 if the requests of the batch are no longer those of the lease.
        """
        if self._changed or self._joining:
            return 0
        if self._filled:
            self._index_filled()
        return self.reserve(longest, grow, behind=behind)

    def _by_sink(self) -> list[tuple[Sink, list[str], list[int] | None]]:
        """Returns `sinks` for the present rows."""
        if not self.rows:
            return []
        first = self.rows[0].sink
        if all(request.sink is first for request in self.rows):
            return [(first, list(self.members), None)]
        sinks: dict[int, tuple[Sink, list[str], list[int]]] = {}
        for row, request in enumerate(self.rows):
            _, request_ids, rows = sinks.setdefault(id(request.sink), (request.sink, [], []))
            request_ids.append(request.request_id)
            rows.append(row)
        return list(sinks.values())

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
        due = self._steps + capacity - request.kv.num_computed
        self._calendar.setdefault(due, []).append((request, stay))
