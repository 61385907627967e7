"""One replica's batches: which requests run, and what the worker does in the next step.

Synchronous and free of I/O: :meth:`ReplicaScheduler.step` decides a plan, :meth:`ReplicaScheduler.update` takes in its result. The worker
applies plans in order, so blocks may be given to another request as soon as they are released, even while a step runs.
"""

import enum
from collections.abc import Callable, Sequence

from protos.errors import Internal
from scheduler_svc.kv.cache import KvCache
from scheduler_svc.kv.copies import Copies
from scheduler_svc.policy.interleave import Interleave
from scheduler_svc.policy.preemption import LatestOfLeastUrgent, PreemptionPolicy
from scheduler_svc.replica.in_flight import Pending
from scheduler_svc.replica.owner import Owner
from scheduler_svc.replica.results import Results
from scheduler_svc.replica.slots import Running
from scheduler_svc.replica.stats import BucketStats, SchedulerStats
from scheduler_svc.replica.step_plan import Decode, Prefill, StepPlan, StepResult
from scheduler_svc.requests.request import Event, FinishReason, Request, RequestState
from scheduler_svc.shapes.buckets import bucket_for
from scheduler_svc.shapes.geometry import Geometry


class Admitted(enum.Enum):
    """What became of an attempt to admit a request."""

    YES = enum.auto()
    DEFERRED = enum.auto()
    """It waits here for a prefix that another request computes."""
    NO_ROOM = enum.auto()


class ReplicaScheduler:
    """Continuous batching over static graphs: prefill chunks at batch size 1, decode at buckets, never both in a step.

    Attributes:
        kv: the replica's KV memory.
        stats: counters.
        preemption: chooses who gives way.
    """

    def __init__(
        self, geometry: Geometry, kv: KvCache, owner: Owner, interleave: Interleave, *,
        clock: Callable[[], float], preemption: PreemptionPolicy | None = None,
        observe_batch: Callable[[int], None] = lambda _: None, max_lease: int = 1,
    ) -> None:  # fmt: skip
        """Starts with all slots free.

        Args:
            geometry: static shapes.
            kv: the replica's KV memory; used by this scheduler alone.
            owner: gets back what does not stay.
            interleave: chooses between prefill and decode.
            clock: monotonic seconds.
            preemption: chooses who gives way.
            observe_batch: told the number of rows of each decode step.
            max_lease: decode steps that one plan may allow.
        """
        self._geometry = geometry
        self.kv = kv
        self.stats = SchedulerStats()
        self._owner = owner
        kv.on_release = owner.released
        self._interleave = interleave
        self._clock = clock
        self.preemption = preemption or LatestOfLeastUrgent()
        self._observe_batch = observe_batch
        self._max_lease = max_lease
        self._running = Running(geometry, kv, owner, self.stats, clock)
        self._decoding = self._running.decoding
        self._next = self._running.next
        self._in_flight = self._running.in_flight
        self._results = Results(self._running)

    # ---- what there is -------------------------------------------------------------------------------------------------------------

    @property
    def geometry(self) -> Geometry:
        """The static shapes."""
        return self._geometry

    @property
    def num_running(self) -> int:
        """Requests that have a slot."""
        return len(self._running)

    @property
    def num_deferred(self) -> int:
        """Requests that wait here for a prefix."""
        return self._running.sharing.num_waiting

    @property
    def prefill_backlog(self) -> int:
        """Tokens that running requests have to prefill still."""
        return self._running.prefill_backlog

    @property
    def idle(self) -> bool:
        """Whether nothing runs, is under way or waits for the next plan: no blocks become free by themselves."""
        return not self._running and not self._in_flight and not self.kv.copies

    @property
    def has_free_slot(self) -> bool:
        """Whether another request may be admitted, memory permitting."""
        return not self._running.full

    @property
    def has_pending(self) -> bool:
        """Whether results of plans are outstanding."""
        return bool(self._in_flight)

    @property
    def least_urgent(self) -> int | None:
        """The priority of the least urgent running request."""
        return self._running.least_urgent

    def cached_tokens(self, request: Request) -> int:
        """Leading tokens of a request that are in the cache or being computed."""
        return self._running.sharing.cached_tokens(request)

    def shares_prompt(self, request: Request) -> bool:
        """Whether another sequence of the same request is here that has the request's prompt or computes it."""
        return self._running.sharing.shares_prompt(request)

    # ---- requests come and go ------------------------------------------------------------------------------------------------------

    def admit(self, request: Request) -> Admitted:
        """Gives a waiting request a slot and blocks, with the next plan; or lets it wait here for a prefix that is being computed."""
        running = self._running
        if running.full or not self._next.takes(request):
            return Admitted.NO_ROOM
        if request.branches and (branched := self._branch(request)) is not None:
            return branched
        if running.sharing.wait_for_prefix(request):
            return Admitted.DEFERRED
        if not self.kv.admit(request):
            return Admitted.NO_ROOM
        running.seat(request)
        return Admitted.YES

    def _branch(self, request: Request) -> Admitted | None:
        """Forks a sequence from another one of its request, or has it wait for that one's prompt.

        Returns:
            None if there is no such sequence here, or none that can be forked from: the request goes the way of all others.
        """
        for origin in self._running.sharing.sharers(request):
            if origin.state is RequestState.PREFILLING:
                self._running.sharing.wait_for_prompt(request, origin)
                return Admitted.DEFERRED
            if self._running.fork(origin, request):
                return Admitted.YES
        return None

    def abort(self, request: Request) -> None:
        """Ends a request that runs or is deferred here. Its slot is released with the next plan."""
        self._running.finish(request, Event(request.request_id, finish_reason=FinishReason.ABORT))

    def make_way(self, request: Request) -> bool:
        """Preempts a running request that is less urgent than the waiting one, if that could help.

        Returns:
            Whether somebody gave way; :meth:`admit` may still find too little room then.
        """
        if not self._next.takes(request):
            return False
        lesser = [one for one in self._running.requests if self.preemption.outranks(request, one)]
        victim = self.preemption.victim(lesser)
        if victim is None or not self.kv.could_admit(request, lesser):
            return False
        self._running.preempt(victim, "priority")
        return True

    def abandon(self) -> list[Request]:
        """Takes all requests off a replica that is lost, ready to be queued again with the tokens they have."""
        return self._running.clear()

    # ---- deciding ------------------------------------------------------------------------------------------------------------------

    def step(self) -> StepPlan | None:
        """Decides the next step.

        Returns:
            The plan, or None if there is nothing to do. Must not be called while an earlier plan's last result is outstanding; see
            :meth:`interrupt`.
        """
        prefilling, decoding = self._running.prefilling, self._decoding
        work: Prefill | Decode | None = None
        requests: Sequence[Request] = ()
        while work is None:
            kind = self._interleave.choose(prefill=bool(prefilling), decode=bool(decoding.members))
            if kind is None:
                break
            if kind == "prefill":
                requests = (prefilling[0],)
                work = self._plan_chunk(requests[0])
            else:
                decoding.grow(self._make_room)
                requests = decoding.rows
                work = self._plan_decode(requests)
        copies = self.kv.copies.take()
        if work is None and copies is None and not self._next.releases:
            return None
        return self._send(work, requests, copies)

    def interrupt(self) -> StepPlan | None:
        """Ends a lease that is under way, if somebody has something else to do: a chunk to prefill, a slot to give up, or to join in.

        Returns:
            A plan without work. The worker goes on to it after the step that it is in, whose result is then the lease's last.
        """
        running = self._running
        if not self._in_flight.leasing:
            return None
        if not (running.prefilling or self._next.releases or self._next.admits):
            return None
        return self._send(None, (), self.kv.copies.take())

    def _send(
        self, work: Prefill | Decode | None, requests: Sequence[Request], copies: Copies | None
    ) -> StepPlan:
        """The plan that has this work, and all that is to be said before it."""
        plan, turned_away = self._next.take(work, copies)
        if turned_away:
            self._owner.released()  # the next plan has room again
        self._in_flight.send(Pending(plan, requests, copies, self._clock()))
        return plan

    def _plan_chunk(self, request: Request) -> Prefill | None:
        assert request.slot is not None
        start = request.num_computed
        # A request resumes at a chunk boundary, so that chunks lie where a run without a prefix hit would put them.
        end = start + min(self._geometry.chunk, request.num_to_prefill)
        if not self._make_room(request, end):
            return None
        self.stats.chunks += 1
        self.stats.prefill_tokens += end - start
        self.stats.chunk_tokens.observe(end - start)
        return Prefill(request.slot, start, end - start, sample=end == len(request.token_ids))

    def _plan_decode(self, requests: tuple[Request, ...]) -> Decode | None:
        count = len(requests)
        if not count:
            return None
        bucket = bucket_for(count, self._geometry.buckets)
        lease = self._lease()
        self._count_decode(count, bucket)
        positions = tuple([request.num_computed for request in requests])
        return Decode(self._decoding.slots, positions, bucket, lease)

    def _lease(self) -> int:
        """How many decode steps may run in a row: as long as nothing else is to be done."""
        if self._max_lease == 1 or self._running.prefilling or self.num_deferred:
            return 1
        return self._decoding.undisturbed(self._max_lease)

    def _count_decode(self, count: int, bucket: int) -> None:
        stats = self.stats.buckets.get(bucket)
        if stats is None:
            stats = self.stats.buckets[bucket] = BucketStats()
        stats.steps += 1
        stats.rows += count
        self._observe_batch(count)
        for tenant, rows in self._decoding.ran():
            self._owner.charge(tenant, rows)

    def _make_room(self, request: Request, num_tokens: int) -> bool:
        """Grows a running request's tables; preempts where there is no room. False if the request itself had to give way."""
        while (grown := self.kv.grow(request, num_tokens)) is None:
            running = self._running.requests
            if len(running) == 1:
                # Its whole life fits; what stands in the way is kept for others.
                if self.kv.copies.drop_windows() or self._owner.drop_pins(self):
                    continue
                raise Internal("out of KV blocks with no request to preempt")
            victim = self.preemption.victim(running)
            assert victim is not None
            self._running.preempt(victim, "memory")
            if victim is request:
                return False
        self._next.grow(request, grown)
        return True

    # ---- taking in -----------------------------------------------------------------------------------------------------------------

    def update(self, result: StepResult) -> None:
        """Takes in a plan's result: tokens go to their requests' sinks, requests that end give up slot and blocks.

        Raises:
            Internal: if results and plans do not match; the replica's state is unknown then.
        """
        pending = self._in_flight.answered(result)
        if pending.results > 1:
            # One more step of a lease, of which only the first was counted when it was planned.
            work = pending.plan.work
            assert isinstance(work, Decode)
            self._count_decode(len(pending.requests), work.bucket)
            self._interleave.decoded()
        self._results.take(pending, result)
        if self.idle:
            self._owner.released()  # nothing else will be, and pins may have to go
        if self.kv.events.active:
            self.kv.events.flush()
