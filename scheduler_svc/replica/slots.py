"""The requests that hold a slot on a replica: how they get it, decode, and give it up."""

from bisect import insort
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Protocol

from protos.errors import Internal
from scheduler_svc.kv.cache import KvCache
from scheduler_svc.replica.plans import PlanBuilder, StepsInFlight
from scheduler_svc.replica.shared_prefill import SharedPrefills
from scheduler_svc.replica.stats import BucketStats, SchedulerStats
from scheduler_svc.requests.request import Event, Request, RequestState, Sink


class RequestOwner(Protocol):
    """Takes the requests that leave a replica; the engine is one."""

    def requeue(self, request: Request) -> None:
        """Lets the request wait again, with the tokens that it has."""

    def forget(self, request: Request) -> None:
        """Drops a request that has ended."""

    def charge(self, tenant: str, tokens: int) -> None:
        """Charges a tenant for tokens served."""

    def without_grammar(self, request: Request) -> None:
        """Lets the request wait until its grammar, which the replica lacks, is compiled again."""

    def is_hopeless(self, request: Request) -> bool:
        """Whether steps of the request alone have failed often enough, and wherever it can run."""


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

    def reserve(self, longest: int, grow: Callable[[Request, int], bool]) -> int:
        """Makes room for further steps in a row, which a lease allows, as long as there are free blocks.

        Args:
            longest: most steps, the one that :meth:`prepare` made room for included.
            grow: called for each request that needs a block; returns False if no block is free.

        Returns:
            The number of steps that can run without a block, or until a request reaches its limit.
        """
        longest = min(longest, *[request.end - len(request.token_ids) for request in self.rows])
        for step in range(self._steps + 1, self._steps + longest):
            due = self._calendar.pop(step, ())
            for index, (request, stay) in enumerate(due):
                if self._stays.get(request.request_id) != stay:
                    continue
                if not grow(request, self._kv.capacity(request.kv, request.end) + 1):
                    self._calendar[step] = list(due[index:])
                    return step - self._steps
                self._filled.setdefault(step, []).append((request, stay))
                self._enter(request, stay)
        return longest

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


class Slots:
    """Slots and the requests in them. Each request prefills, is on trial, or is in the decode batch."""

    def __init__(
        self, max_num_seqs: int, kv: KvCache, decoding: DecodeBatch, plan: PlanBuilder, in_flight: StepsInFlight,
        shared: SharedPrefills, owner: RequestOwner, stats: SchedulerStats, clock: Callable[[], float],
    ) -> None:  # fmt: skip
        """Starts with all slots free.

        Args:
            max_num_seqs: number of slots.
            kv: has the requests' blocks.
            decoding: takes the requests that decode.
            plan: learns of requests that get or release a slot.
            in_flight: ignores results for released slots.
            shared: learns which prefixes are computed.
            owner: takes the requests that leave.
            stats: counters.
            clock: monotonic seconds.
        """
        self._kv = kv
        self._decoding = decoding
        self._plan = plan
        self._in_flight = in_flight
        self._shared = shared
        self._owner = owner
        self._stats = stats
        self._clock = clock
        self.prefilling: list[Request] = []
        """Requests with known tokens to compute, by rank."""
        self.prefill_backlog = 0
        """Tokens that `prefilling` still has to compute."""
        self.trials: list[Request] = []
        """Suspects whose next step is a decode step, which each of them runs alone."""
        self._slots: list[Request | None] = [None] * max_num_seqs
        self._free_slots = list(range(max_num_seqs - 1, -1, -1))
        self._priorities: Counter[int] = Counter()

    def __len__(self) -> int:
        return len(self._slots) - len(self._free_slots)

    @property
    def full(self) -> bool:
        """Whether no slot is free."""
        return not self._free_slots

    @property
    def requests(self) -> list[Request]:
        """All requests with a slot, by slot."""
        return [request for request in self._slots if request is not None]

    @property
    def least_urgent(self) -> int | None:
        """The priority of the least urgent request."""
        return max(self._priorities, default=None)

    def at(self, slot: int) -> Request | None:
        """Returns the request in a slot."""
        return self._slots[slot]

    # ---- getting a slot ----

    def assign_slot(self, request: Request) -> None:
        """Gives a slot to a request that has its blocks, to prefill its known tokens or else to decode."""
        slot = request.slot = self._free_slots.pop()
        self._slots[slot] = request
        request.prefills_forced = False
        self._priorities[request.priority] += 1
        delivery = request.delivery
        if delivery.first_scheduled_s is None:
            delivery.first_scheduled_s = self._clock()
            self._stats.queue_s.observe(delivery.first_scheduled_s - delivery.accepted_s)
        self._plan.admit(request)
        self._owner.charge(request.tenant, len(request.token_ids) - request.kv.num_computed)
        if not request.num_to_prefill:
            self._start_decoding(request)
            return
        self._shared.start(request)
        self._prefill(request)

    def siblings_with_prompt(self, request: Request) -> Iterator[Request]:
        """Yields other sequences of the same request here that have their prompt, or compute all of it."""
        if request.group is None:
            return
        prompt = request.num_prompt_tokens - 1
        if not prompt:
            return  # a single token: nothing to share
        for one in request.group.members:
            slot = one.slot
            # A member on another replica may have a slot beyond the number of slots here.
            if slot is None or slot >= len(self._slots) or self._slots[slot] is not one:
                continue
            prefilling = one.state is RequestState.PREFILLING
            if one.can_fork if prefilling else one.kv.num_computed >= prompt:
                yield one

    def fork(self, origin: Request, request: Request) -> bool:
        """Lets a sequence decode from the end of the prompt that ``origin`` has computed.

        Returns:
            False if there is no slot or too little room, or if ``origin``'s window has moved on.
        """
        if self.full or (self._in_flight and self._kv.slides_in_place) or not self._plan.has_room(request):
            return False
        prompt = request.num_prompt_tokens - 1
        if not self._kv.fork(origin.kv, request.kv, prompt):
            return False
        # Without room for its first step, the sequence would be admitted only to be preempted.
        if self._kv.grow(request.kv, prompt + 1) is None:
            self._kv.release(request.kv)
            return False
        self.assign_slot(request)
        self._stats.forks += 1
        return True

    # ---- prefilling ----

    def prefilled(self, request: Request, num_tokens: int) -> bool:
        """Counts a chunk that was run; returns whether it was the request's last, so that it decodes now."""
        self.prefill_backlog -= num_tokens
        if request.num_to_prefill:
            return False
        self.prefilling.remove(request)
        self._start_decoding(request)
        return True

    def _start_decoding(self, request: Request) -> None:
        if request.suspect:
            request.state = RequestState.DECODING
            self.trials.append(request)
        else:
            self._decoding.add(request)

    def _stop_decoding(self, request: Request) -> None:
        if request in self.trials:
            self.trials.remove(request)
        else:
            self._decoding.remove(request)

    def clear_suspect(self, request: Request) -> None:
        """Clears a suspect: a step of its own was answered."""
        request.clear()
        if request in self.trials:
            self.trials.remove(request)
            self._decoding.add(request)

    def prefill_forced(self, request: Request) -> None:
        """Moves a decoding request back to prefill, for tokens that its grammar forced."""
        self._stop_decoding(request)
        request.prefills_forced = True
        self._prefill(request)

    def _prefill(self, request: Request) -> None:
        request.state = RequestState.PREFILLING
        insort(self.prefilling, request, key=lambda one: one.rank)
        self.prefill_backlog += request.num_to_prefill

    # ---- giving up a slot ----

    def finish(self, request: Request, event: Event) -> None:
        """Ends a request that runs or is deferred here, with its last event."""
        if request.slot is not None:
            self.release(request)
        else:
            self._shared.cancel(request)
        request.state = RequestState.FINISHED
        request.sink.push(event)
        self._owner.forget(request)

    def preempt(self, request: Request, reason: str) -> None:
        """Takes a request off its slot and lets it wait again."""
        self._stats.preemptions[reason] += 1
        self.release(request)
        self._owner.requeue(request)

    def release(self, request: Request) -> None:
        """Takes slot and blocks from a request. The next plan tells the worker."""
        slot = request.slot
        if slot is None:
            raise Internal(f"request {request.request_id} has no slot to release")
        if request.state is RequestState.PREFILLING:
            self.prefilling.remove(request)
            self.prefill_backlog -= request.num_to_prefill
            for waiter in self._shared.stop(request):
                self._owner.requeue(waiter)
        elif request.state is RequestState.DECODING:
            self._stop_decoding(request)
        request.state = RequestState.WAITING
        self._priorities[request.priority] -= 1
        if not self._priorities[request.priority]:
            del self._priorities[request.priority]
        self._plan.release(request, slot)
        self._in_flight.ignore_slot(slot)
        self._slots[slot] = None
        self._free_slots.append(slot)
        request.slot = None
        self._kv.release(request.kv)

    def clear(self) -> list[Request]:
        """Takes all requests off a lost replica, those deferred here included; returns them."""
        # Deferred requests first: a released request would requeue them, unseen by the caller.
        deferred = self._shared.clear()
        requests = self.requests
        for request in requests:
            self.release(request)
        self._in_flight.clear()
        return requests + deferred
