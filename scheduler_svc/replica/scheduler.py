"""One replica's batches: which requests run, and what the worker does in the next step.

Synchronous and free of I/O: :meth:`ReplicaScheduler.step` decides a plan, :meth:`ReplicaScheduler.update`
takes in its result. The worker applies plans in order, so blocks may change owners as soon as they are
released, even while a step runs.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

from protos.errors import Internal
from protos.steps import Decode, Prefill, StepPlan, StepResult
from scheduler_svc.adapters.seats import AdapterSeats
from scheduler_svc.kv.cache import KvCache
from scheduler_svc.policy.rules import Interleave, preemption_victim
from scheduler_svc.replica.decode_batch import DecodeBatch, MicroBatches
from scheduler_svc.replica.outputs import Outputs
from scheduler_svc.replica.plans import BatchRows, InFlight, PlanBuilder, StepsInFlight
from scheduler_svc.replica.shared_prefill import SharedPrefills
from scheduler_svc.replica.slots import AdmitResult, RequestOwner, Slots
from scheduler_svc.replica.stats import SchedulerStats
from scheduler_svc.replica.suspects import Abandoned, Loss, accuse
from scheduler_svc.requests.request import Event, Request, RequestState
from scheduler_svc.shapes.buckets import bucket_for, chunk_for
from scheduler_svc.shapes.shape_config import ShapeConfig


class ReplicaOwner(RequestOwner, Protocol):
    """The calls of a replica's scheduler to the engine."""

    def released(self) -> None:
        """Notes that blocks became free or a plan has room again: a request that did not fit may fit now."""


class ReplicaScheduler:
    """Continuous batching over static graphs.

    A step is either one prefill chunk at batch size 1 or one decode batch at a bucket size, never both. A
    pipeline of several stages needs :class:`scheduler_svc.replica.pipeline.PipelineScheduler`.
    """

    def __init__(
        self, shapes: ShapeConfig, kv: KvCache, owner: ReplicaOwner, interleave: Interleave, *,
        clock: Callable[[], float],
        observe_batch: Callable[[int], None] = lambda _: None, max_lease: int = 1, plans_ahead: bool = False,
        adapters: AdapterSeats | None = None,
    ) -> None:  # fmt: skip
        """Starts with all slots free.

        Args:
            shapes: static shapes.
            kv: the replica's KV memory; used by this scheduler alone.
            owner: takes the requests that leave.
            interleave: chooses between prefill and decode.
            clock: monotonic seconds.
            observe_batch: receives the number of rows of each decode step.
            max_lease: decode steps that one plan may allow.
            plans_ahead: whether the worker takes a plan before the last result of the one before.
            adapters: counts the LoRA adapters; None if the worker runs none.
        """
        self.shapes = shapes
        """The static shapes."""
        self.kv = kv
        """The replica's KV memory."""
        self.adapters = adapters or AdapterSeats(0, 0, clock)
        """The LoRA adapters that the worker has, and those in use."""
        self.stats = SchedulerStats()
        """Counters."""
        self._owner = owner
        kv.on_release = owner.released
        self._interleave = interleave
        self._clock = clock
        self._max_lease = max_lease
        self._plans_ahead = plans_ahead
        self._copies = kv.copies
        self._kv_events = kv.events
        # Suspects and the decode batch take turns.
        self._trial_due = False
        # Set by a void result, until nothing is in flight: a plan that continues a void one is void, too.
        self._draining = False
        self._plan = PlanBuilder()
        self._in_flight = StepsInFlight()
        self._shared = SharedPrefills(kv.prefixes, kv.copies, self.stats)
        self._decoding = MicroBatches(shapes.stages, kv, self.stats, owner.charge, observe_batch)
        self._slots = Slots(
            shapes.stage_batch * shapes.stages, kv, self.adapters, self._decoding, self._plan, self._in_flight,
            self._shared, owner, self.stats, clock,
        )  # fmt: skip
        self._outputs = Outputs(
            self._slots, self._decoding, self._shared, self._in_flight, kv, owner, self.stats, clock
        )  # fmt: skip
        self._start()

    def _start(self) -> None:
        """Prepares planning: a pipeline needs more."""

    # ---- state ----

    @property
    def num_running(self) -> int:
        """Requests that have a slot."""
        return len(self._slots)

    @property
    def is_busy(self) -> bool:
        """Whether requests run here, or wait for one that does."""
        return bool(len(self._slots) or self._shared.num_waiting)

    @property
    def num_deferred(self) -> int:
        """Requests that wait here for a prefix."""
        return self._shared.num_waiting

    @property
    def prefill_backlog(self) -> int:
        """Tokens that running requests still have to prefill."""
        return self._slots.prefill_backlog

    @property
    def idle(self) -> bool:
        """Whether nothing runs, is in flight or waits for the next plan; no block will become free."""
        return not (len(self._slots) or self._in_flight or self._copies)

    @property
    def has_free_slot(self) -> bool:
        """Whether another request may be admitted, memory permitting."""
        return not self._slots.full

    @property
    def has_pending(self) -> bool:
        """Whether results of plans are outstanding."""
        return bool(self._in_flight)

    @property
    def running(self) -> list[Request]:
        """The requests that have a slot."""
        return self._slots.requests

    @property
    def least_urgent(self) -> int | None:
        """The priority of the least urgent running request."""
        return self._slots.least_urgent

    def fits(self, request: Request) -> bool:
        """Whether the whole life of a request fits the replica when nothing else runs."""
        return self.kv.fits(request.end)

    def cached_tokens(self, request: Request) -> int:
        """Returns how many leading tokens of a request are in the cache or being computed."""
        if self.shares_prompt(request):
            return request.num_prompt_tokens - 1
        return self._shared.cached_tokens(request)

    def shares_prompt(self, request: Request) -> bool:
        """Whether another sequence of the same request is here and has their prompt, or computes it."""
        return request.can_fork and next(self._slots.siblings_with_prompt(request), None) is not None

    # ---- admitting and releasing requests ----

    def admit(self, request: Request) -> AdmitResult:
        """Gives a waiting request a slot and blocks, or defers it until a shared prefix is computed."""
        adapter_fits = self.adapters.has_room(request.adapter, request.rank)
        if self._slots.full or not adapter_fits or not self._plan.has_room(request):
            return AdmitResult.NO_ROOM
        if request.can_fork and (result := self._admit_sibling(request)) is not None:
            return result
        if self._shared.defer_for_prefix(request):
            return AdmitResult.DEFERRED
        if not self.kv.admit(request.kv):
            return AdmitResult.NO_ROOM
        self._slots.assign_slot(request)
        return AdmitResult.ADMITTED

    def _admit_sibling(self, request: Request) -> AdmitResult | None:
        """Forks a sequence from a sibling, or defers it until the sibling has computed their prompt.

        None: no sibling is here or none can be forked, and the request is admitted like any other.
        """
        for origin in self._slots.siblings_with_prompt(request):
            if origin.state is RequestState.PREFILLING:
                self._shared.defer_for_prompt(request, origin)
                return AdmitResult.DEFERRED
            if self._slots.fork(origin, request):
                return AdmitResult.ADMITTED
        return None

    def stop(self, request: Request, event: Event) -> None:
        """Ends a request that runs or is deferred here with its last event; the next plan frees its slot."""
        self._slots.finish(request, event)

    def preempt_for(self, request: Request, candidates: Sequence[Request], reason: str) -> bool:
        """Preempts the first of some running requests, as few as make the waiting one fit for certain.

        Returns:
            Whether there is room now; nothing is preempted if not all of them would be enough.
        """
        if not self._plan.has_room(request) or not self.fits(request):
            return False
        users: Sequence[Request] = ()
        if not self.adapters.has_room(request.adapter, request.rank):
            # If the adapter is in use, a request that ranks before this one waits for its seat.
            found = None if self.adapters.uses(request.adapter) else self._slots.fewest_users(candidates)
            if found is None:
                return False
            users = found
        order = [*users, *(one for one in candidates if one not in users)]
        least = max(len(users), int(self._slots.full))
        if least > len(order):
            return False
        count = self.kv.num_to_leave(request.kv, [one.kv for one in order], least)
        for one in order[: count or 0]:
            self._slots.preempt(one, reason)
        return count is not None

    def footprint(self, request: Request) -> float:
        """Returns the share of the replica that a running request occupies: of its slots or its memory."""
        return max(1 / self.shapes.max_num_seqs, self.kv.share_of(request.kv))

    def abandon(self, loss: Loss) -> Abandoned:
        """Takes all requests off a lost replica; the loss may make suspects of those in unanswered steps."""
        accused = accuse(self._in_flight if loss.blames else (), self._slots.requests)
        suspects = accused.of_loss()
        return Abandoned(self._slots.clear(), suspects, suspects[0] if accused.alone else None)

    # ---- deciding ----

    def step(self) -> StepPlan | None:
        """Decides the next step.

        Must not be called while an earlier plan's last result is outstanding; see :meth:`interrupt`.

        Returns:
            The plan, or None if there is nothing to do.
        """
        prefilling, trials = self._slots.prefilling, self._slots.trials
        (decoding,) = self._decoding.batches
        work: Prefill | Decode | None = None
        requests: Sequence[Request] = ()
        batch: BatchRows | None = None
        while work is None:
            kind = self._interleave.choose(prefill=bool(prefilling), decode=bool(decoding.members or trials))
            if kind is None:
                break
            if kind == "prefill":
                requests = (prefilling[0],)
                work = self._plan_chunk(requests[0], self._make_room)
            elif trials and (self._trial_due or not decoding.members):
                self._trial_due = False
                requests = (trials[0],)
                work = self._plan_trial(requests[0])
            else:
                self._trial_due = True
                batch = decoding.prepare(self._make_room)
                requests = batch.requests
                work = self._plan_decode(decoding)
        if work is None and not self._copies and not self._plan.releases:
            return None
        return self._send(work, requests, batch)

    def interrupt(self) -> StepPlan | None:
        """Ends a lease that is in flight if there is a chunk to prefill or a slot to release or assign.

        Returns:
            A plan with the chunk if it is a chunk's turn, else without work. The worker takes it up after its
            current step, which is then the last of the lease.
        """
        if not self._in_flight.leasing:
            return None
        # This may run in the middle of a dispatch, so nothing may be preempted.
        if not self._draining and (plan := self._chunk_behind()) is not None:
            return plan
        if not (self._slots.prefilling or self._plan.releases or self._plan.admits):
            return None
        return self._send(None, ())

    def plan_ahead(self, *, may_preempt: bool = False) -> StepPlan | None:
        """Decides the step behind the only plan in flight, so that the worker need not wait for it.

        Call it after :meth:`interrupt`. Nothing is preempted (``may_preempt`` is for a pipeline), and nothing
        depends on a result that is missing: a chunk follows a decode step or an earlier chunk, a decode step
        of other requests follows a chunk, or a lease is renewed.

        Returns:
            The plan, or None if it must wait for results.
        """
        del may_preempt
        step = self._in_flight.alone
        if not self._plans_ahead or self._draining or step is None or step.alone or self._slots.trials:
            return None
        match step.plan.work:
            case Prefill() as chunk:
                if not self._decoding or self._interleave.prefill_due:
                    return self._next_chunk(step, chunk)
                return self._decode_behind(step, 0)
            case Decode(lease=lease):
                if lease == 1 and (plan := self._chunk_behind()) is not None:
                    return plan
                left = lease - step.num_results
                return self._decode_behind(step, left) if left <= max(self._max_lease // 2, 1) else None
            case _:
                return None

    def _chunk_behind(self) -> StepPlan | None:
        """Returns a plan with a chunk, if it is a chunk's turn; nothing is preempted for it."""
        prefilling = self._slots.prefilling
        # A suspect's chunk waits: nothing else may be in question if it fails.
        if not prefilling or prefilling[0].suspect or not self._interleave.prefill_due:
            return None
        requests = (prefilling[0],)
        if (chunk := self._plan_chunk(requests[0], self._grow)) is None:
            return None
        self._interleave.choose(prefill=True, decode=True)
        return self._send(chunk, requests)

    def _decode_behind(self, step: InFlight, num_steps: int) -> StepPlan | None:
        """Returns a plan with the next decode steps of the batch, ``num_steps`` of which are in flight.

        Behind these, it runs only if they run to their end; its blocks stay with their requests either way.
        """
        (decoding,), slots = self._decoding.batches, self._slots
        # A row that has left may end a lease; a chunk is of another request.
        if (num_steps and step.left) or (slots.prefilling and self._interleave.prefill_due):
            return None
        # Sequences of a request can share a window that slides in place only while nothing is in flight.
        if self.kv.slides_in_place and any(request.group is not None for request in step.requests):
            return None
        batch = BatchRows()
        if decoding.reserve_next(self._grow, behind=num_steps):
            batch = decoding.prepare(self._make_room, behind=num_steps)
        if not batch.requests:
            decoding.withdraw(num_steps)
            return None
        self._interleave.choose(prefill=bool(slots.prefilling), decode=True)
        return self._send(
            self._plan_decode(decoding, num_steps), batch.requests, batch, continues=num_steps > 0
        )

    def _next_chunk(self, step: InFlight, chunk: Prefill) -> StepPlan | None:
        """Returns a plan with the chunk behind one that runs, if a chunk follows in any case."""
        request = step.requests[0]
        if chunk.slot in step.left:
            return None
        last = chunk.num_tokens == request.num_to_prefill
        if last and not self._interleave.prefill_due:
            return None  # the request decodes next
        following = next((one for one in self._slots.prefilling if not last or one is not request), None)
        if following is None or following.suspect:
            return None
        continues = following is request
        # A window that slides in place may have to be kept before the next chunk moves it.
        if continues and self.kv.slides_in_place:
            return None
        work = self._plan_chunk(following, self._grow, behind=chunk.num_tokens if continues else 0)
        if work is None:
            return None
        self._interleave.choose(prefill=True, decode=bool(self._decoding))
        return self._send(work, (following,), continues=continues)

    def _send(
        self, work: Prefill | Decode | None, requests: Sequence[Request], batch: BatchRows | None = None, *,
        continues: bool = False,
    ) -> StepPlan:  # fmt: skip
        """Returns the plan with this work and everything that comes before it."""
        copies = self._copies.take()
        suspect = requests[0] if len(requests) == 1 and requests[0].suspect else None
        self.stats.count_plan(work is not None, ahead=bool(self._in_flight))
        plan, refused = self._plan.build(work, copies, suspect, continues=continues)
        if refused:
            self._owner.released()  # the next plan has room again
        self._in_flight.send(InFlight(plan, requests, copies, self._clock(), suspect is not None, batch))
        return plan

    def _plan_chunk(
        self, request: Request, make_room: Callable[[Request, int], bool], *, behind: int = 0
    ) -> Prefill | None:
        """Returns a request's next chunk, ``behind`` tokens that run already; None if there is no room."""
        assert request.slot is not None
        start = request.kv.num_computed + behind
        # A request resumes at a chunk boundary, so its chunks lie where a run without a prefix hit would put
        # them.
        rest = request.num_to_prefill - behind
        bucket = chunk_for(rest, self.shapes.chunk_sizes)
        end = start + min(bucket, rest)
        if not make_room(request, end):
            return None
        return Prefill(request.slot, start, end - start, end == len(request.token_ids), bucket)

    def _plan_trial(self, request: Request) -> Decode | None:
        assert request.slot is not None
        position = request.kv.num_computed
        if not self._make_room(request, position + 1):
            return None
        return Decode((request.slot,), (position,), bucket_for(1, self.shapes.buckets), 1)

    def _plan_decode(self, decoding: DecodeBatch, behind: int = 0) -> Decode | None:
        """Returns the steps of a prepared batch, ``behind`` steps that are in flight; None if it is empty."""
        rows = decoding.batch
        if not rows.requests:
            return None
        size = bucket_for(len(rows.requests), self.shapes.buckets)
        return Decode(rows.slots, decoding.positions, size, self._lease(decoding, behind))

    def _lease(self, decoding: DecodeBatch, behind: int) -> int:
        """Returns how many decode steps may run in a row, with blocks reserved for all of them."""
        if self._max_lease == 1 or self._slots.prefilling or self._slots.trials or self.num_deferred:
            return 1
        return decoding.reserve(self._max_lease, self._grow, behind=behind)

    def _make_room(self, request: Request, num_tokens: int) -> bool:
        """Grows a running request's tables, preempting others if needed.

        False: the request was preempted itself, or runs alone and copies in flight hold its blocks.
        """
        while not self._grow(request, num_tokens):
            running = self._slots.requests
            if len(running) == 1:
                # An admitted request fits an empty replica, so kept windows are in the way.
                if self._copies.drop_windows():
                    continue
                if self._in_flight:
                    return False
                raise Internal("out of KV blocks with no request to preempt")
            victim = preemption_victim(running)
            assert victim is not None
            self._slots.preempt(victim, "memory")
            if victim is request:
                return False
        return True

    def _grow(self, request: Request, num_tokens: int) -> bool:
        """Grows a request's tables; False, with no block allocated, if too few are free."""
        grown = self.kv.grow(request.kv, num_tokens)
        if grown is None:
            return False
        self._plan.grow(request, grown)
        return True

    def plan_afresh(self) -> None:
        """Plans nothing ahead until nothing is in flight; the next plan then follows from results alone."""
        self._draining = bool(self._in_flight)
        for batch in self._decoding.batches:
            batch.withdraw()

    # ---- results ----

    def update(self, result: StepResult) -> None:
        """Applies a result: tokens go to their requests' sinks, ended requests release slot and blocks.

        Raises:
            Internal: if results and plans do not match; the replica's state is then unknown.
        """
        step = self._in_flight.match(result, self._clock)
        if isinstance(step.plan.work, Decode) and not self._in_flight.has_chunk_behind(step):
            # The plan counted as one decode step when it was made.
            if result.void:
                self._interleave.withdraw()
            elif step.num_results > 1 and result.error is None:
                self._interleave.decoded()
        if self._draining or result.void:
            self._draining = bool(self._in_flight)
        self._outputs.apply(step, result)
        if self._kv_events.active:
            self._kv_events.flush()
