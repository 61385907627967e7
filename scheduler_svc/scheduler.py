"""One replica's batches: which requests run, and what the worker does in the next step.

Synchronous and free of I/O: :meth:`ReplicaScheduler.step` decides a plan, :meth:`ReplicaScheduler.update` takes in its result. The worker
applies plans in order, so blocks may be given to another request as soon as they are released, even while a step runs.

A decode step costs a few operations a request: all decoding requests advance by one token a step, so when each of them needs its next
block is known in advance and written into a calendar, and what does not change from step to step is not computed again.
"""

import enum
from bisect import insort
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from protos.errors import Internal, TriptychError, Unavailable
from scheduler_svc.buckets import bucket_for
from scheduler_svc.geometry import Geometry
from scheduler_svc.kv_cache import KvCache
from scheduler_svc.kv_copies import Copies
from scheduler_svc.next_plan import NextPlan
from scheduler_svc.plan import Decode, Pool, Prefill, SlotOutput, StepPlan, StepResult
from scheduler_svc.policy.interleave import Interleave
from scheduler_svc.policy.preemption import LatestOfLeastUrgent, PreemptionPolicy
from scheduler_svc.prefixes_in_progress import Awaited, PrefixesInProgress
from scheduler_svc.request import Event, FinishReason, Logprobs, Request, RequestState
from scheduler_svc.stats import BucketStats, SchedulerStats


class Owner(Protocol):
    """To whom requests go when they leave a replica; the engine is one."""

    def requeue(self, request: Request) -> None:
        """The request waits again, with the tokens it has."""

    def forget(self, request: Request) -> None:
        """The request has ended."""

    def charge(self, tenant: str, tokens: int) -> None:
        """A tenant was served that many tokens."""

    def without_grammar(self, request: Request) -> None:
        """The replica has not got the request's grammar (any more): it waits until somebody has compiled it."""

    def released(self) -> None:
        """Blocks became free: who found no room may find some now."""

    def drop_pins(self, scheduler: "ReplicaScheduler") -> bool:
        """Gives up pinned prefixes of a replica that cannot go on otherwise; whether there were any."""


class Admitted(enum.Enum):
    """What became of an attempt to admit a request."""

    YES = enum.auto()
    DEFERRED = enum.auto()
    """It waits here for a prefix that another request computes."""
    NO_ROOM = enum.auto()


@dataclass(slots=True)
class _Pending:
    """A plan whose result is not back.

    Attributes:
        requests: who is in its work, in the plan's order.
        left: slots that were given up since.
        results: how many came.
    """

    plan: StepPlan
    requests: Sequence[Request]
    copies: Copies | None
    planned_s: float
    left: set[int] = field(default_factory=set)
    results: int = 0


class ReplicaScheduler:
    """Continuous batching over static graphs: prefill chunks at batch size 1, decode at buckets, never both in a step.

    Attributes:
        kv: the replica's KV memory.
        stats: counters.
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
        self._free_slots = list(range(geometry.max_num_seqs - 1, -1, -1))
        self._slots: list[Request | None] = [None] * geometry.max_num_seqs
        self._priorities: Counter[int] = Counter()
        # By rank.
        self._prefilling: list[Request] = []
        self.prefill_backlog = 0
        # In the order in which they began to decode; a dict for O(1) removal.
        self._decoding: dict[str, Request] = {}
        self._tenant_rows: Counter[str] = Counter()
        self._rows: tuple[Request, ...] | None = ()
        self._row_slots: tuple[int, ...] = ()
        # Whether some of them has generated nothing yet: its first token is told in another way than all others.
        self._first_tokens = False
        # Who will decode from the next plan on, and is not in the calendar yet: (request, its `num_decodes`).
        self._beginners: list[tuple[Request, int]] = []
        # Decode steps planned so far, and who needs room before which of them: (request, its `num_decodes`).
        self._decode_steps = 0
        self._calendar: dict[int, list[tuple[Request, int]]] = {}
        self._in_progress = PrefixesInProgress()
        # Requests whose prefix is computed, but whose window's copy goes with the next plan.
        self._soon: list[Request] = []
        self._next = NextPlan()
        self._pending: deque[_Pending] = deque()
        self._stalled_since: float | None = None

    # ---- what there is -------------------------------------------------------------------------------------------------------------

    @property
    def geometry(self) -> Geometry:
        """The static shapes."""
        return self._geometry

    @property
    def num_running(self) -> int:
        """Requests that have a slot."""
        return len(self._slots) - len(self._free_slots)

    @property
    def num_deferred(self) -> int:
        """Requests that wait here for a prefix."""
        return self._in_progress.num_waiting + len(self._soon)

    @property
    def idle(self) -> bool:
        """Whether nothing runs, is under way or waits for the next plan: no blocks become free by themselves."""
        return not self.num_running and not self._pending and not self.kv.copies

    @property
    def has_free_slot(self) -> bool:
        """Whether another request may be admitted, memory permitting."""
        return bool(self._free_slots)

    @property
    def least_urgent(self) -> int | None:
        """The priority of the least urgent running request."""
        return max(self._priorities, default=None)

    def cached_tokens(self, request: Request) -> int:
        """Leading tokens of a request that are in the cache or being computed."""
        if self.shares_prompt(request):
            return request.num_prompt_tokens - 1
        keys, limit = self.kv.keys_of(request)
        computing = self._in_progress.longest(keys, limit, self.kv.unit)
        return max(self.kv.longest_hit(keys, limit), computing) * self._geometry.granule

    def shares_prompt(self, request: Request) -> bool:
        """Whether another sequence of the same request is here that has the request's prompt or computes it."""
        return request.branches and next(self._sharers(request), None) is not None

    # ---- requests come and go ------------------------------------------------------------------------------------------------------

    def admit(self, request: Request) -> Admitted:
        """Gives a waiting request a slot and blocks, with the next plan; or lets it wait here for a prefix that is being computed."""
        if not self._free_slots or not self._next.takes(request):
            return Admitted.NO_ROOM
        if request.branches and (branched := self._branch(request)) is not None:
            return branched
        keys, limit = self.kv.keys_of(request)
        shared = self._in_progress.longest(keys, limit, self.kv.unit)
        computing = self._in_progress.owner(keys[shared - 1]) if shared else None
        # It does not wait behind what is less urgent than itself: that may be a long time in coming.
        if computing and computing.rank < request.rank and shared > self.kv.longest_hit(keys, limit):
            computing.junction = max(computing.junction, shared)
            return self._defer(request, keys[shared - 1], computing)
        if not self.kv.admit(request):
            return Admitted.NO_ROOM
        self._take_slot(request)
        self._owner.charge(request.tenant, len(request.token_ids) - request.num_computed)
        if not request.num_to_prefill:
            self._start_decoding(request)
            return Admitted.YES
        request.state = RequestState.PREFILLING
        self._in_progress.start(
            request, keys, request.num_computed // self._geometry.granule, limit, self.kv.unit
        )
        insort(self._prefilling, request, key=lambda one: one.rank)
        self.prefill_backlog += request.num_to_prefill
        return Admitted.YES

    def _branch(self, request: Request) -> Admitted | None:
        """Forks a sequence from another one of its request, or has it wait for that one's prompt.

        Returns:
            None if there is no such sequence here, or none that can be forked from: the request goes the way of all others.
        """
        for origin in self._sharers(request):
            if origin.state is RequestState.PREFILLING:
                assert request.family is not None
                return self._defer(request, request.family, origin)
            if self._fork(origin, request):
                return Admitted.YES
        return None

    def _sharers(self, request: Request) -> Iterator[Request]:
        """Sequences of the same request that have its prompt here, or compute it and will have all of it."""
        if request.family is None:
            return
        prompt = request.num_prompt_tokens - 1
        if not prompt:
            return  # a single token: nothing to share
        for one in request.family.members:
            if one.slot is None or self._slots[one.slot] is not one:
                continue  # it waits, or runs elsewhere
            if one.branches if one.state is RequestState.PREFILLING else one.num_computed >= prompt:
                yield one

    def _fork(self, origin: Request, request: Request) -> bool:
        """Lets a sequence decode from the end of the prompt that ``origin`` has computed; False without a slot, without room or if it is too late."""
        if not self._free_slots or (self._pending and self.kv.slides_in_place):
            return False
        if not self._next.takes(request):
            return False
        prompt = request.num_prompt_tokens - 1
        if not self.kv.fork(origin, request, prompt):
            return False
        # Room for the token that it runs first, or it would only be admitted to be preempted.
        if self.kv.grow(request, prompt + 1) is None:
            self.kv.release(request)
            return False
        self._take_slot(request)
        self._owner.charge(request.tenant, 1)
        self._start_decoding(request)
        self.stats.forks += 1
        return True

    def _defer(self, request: Request, awaited: Awaited, computing: Request) -> Admitted:
        self._in_progress.wait(request, awaited, computing)
        request.state, request.replica_id = RequestState.DEFERRED, computing.replica_id
        self.stats.deferred += 1
        return Admitted.DEFERRED

    def _take_slot(self, request: Request) -> None:
        slot = request.slot = self._free_slots.pop()
        self._slots[slot] = request
        request.jumped = False
        request.num_admissions += 1
        if request.first_scheduled_s is None:
            request.first_scheduled_s = self._clock()
            self.stats.queue_s.observe(request.first_scheduled_s - request.arrival_s)
        self._priorities[request.priority] += 1
        self._next.admit(request)

    def _start_decoding(self, request: Request) -> None:
        """The request, which has a slot, runs one token with every decode step from now on."""
        request.state = RequestState.DECODING
        request.num_decodes += 1
        self._decoding[request.request_id] = request
        self._tenant_rows[request.tenant] += 1
        self._rows = None
        self._first_tokens |= request.branches
        # A step that is under way, of a lease perhaps, is not one of its own.
        self._beginners.append((request, request.num_decodes))

    def abort(self, request: Request) -> None:
        """Ends a request that runs or is deferred here. Its slot is released with the next plan."""
        self._finish(request, Event(request.request_id, finish_reason=FinishReason.ABORT))

    def make_way(self, request: Request) -> bool:
        """Preempts a running request that is less urgent than the waiting one, if that could help.

        Returns:
            Whether somebody gave way; :meth:`admit` may still find too little room then.
        """
        lesser = [one for one in self._slots if one is not None and self.preemption.outranks(request, one)]
        victim = self.preemption.victim(lesser)
        if victim is None or not self._next.takes(request) or not self.kv.could_admit(request, lesser):
            return False
        self._preempt(victim, "priority")
        return True

    def abandon(self) -> list[Request]:
        """Takes all requests off a replica that is lost, ready to be queued again with the tokens they have."""
        # Those first: who leaves would otherwise put them back itself, unseen by the caller.
        deferred = [*self._in_progress.waiting, *self._soon]
        for request in deferred:
            self._in_progress.cancel(request)
        self._soon.clear()
        requests = [request for request in self._slots if request is not None]
        for request in requests:
            self._leave(request)
        self._pending.clear()
        return requests + deferred

    # ---- deciding ------------------------------------------------------------------------------------------------------------------

    def step(self) -> StepPlan | None:
        """Decides the next step.

        Returns:
            The plan, or None if there is nothing to do. Must not be called while an earlier plan's last result is outstanding; see
            :meth:`interrupt`.
        """
        work: Prefill | Decode | None = None
        requests: Sequence[Request] = ()
        while work is None and (self._prefilling or self._decoding):
            kind = self._interleave.choose(prefill=bool(self._prefilling), decode=bool(self._decoding))
            if kind == "prefill":
                requests = (self._prefilling[0],)
                work = self._plan_chunk(requests[0])
            else:
                self._grow_due()
                requests = self._batch()
                work = self._plan_decode(requests)
        copies = self.kv.copies.take()
        if work is None and copies is None and not self._next.releases:
            return None
        return self._send(work, requests, copies)

    def _send(
        self, work: Prefill | Decode | None, requests: Sequence[Request], copies: Copies | None
    ) -> StepPlan:
        """The plan that has this work, and all that is to be said before it."""
        plan, turned_away = self._next.take(work, copies)
        if turned_away:
            self._owner.released()  # the next plan has room again
        self._pending.append(_Pending(plan, requests, copies, self._clock()))
        return plan

    def interrupt(self) -> StepPlan | None:
        """Ends a lease that is under way, if somebody has something else to do: a chunk to prefill, a slot to give up, or to join in.

        Returns:
            A plan without work. The worker goes on to it after the step that it is in, whose result is then the lease's last.
        """
        busy = self._pending[-1].plan.work if self._pending else None
        if not (isinstance(busy, Decode) and busy.lease > 1):
            return None
        if not (self._prefilling or self._next.releases or self._next.admits):
            return None
        return self._send(None, (), self.kv.copies.take())

    @property
    def has_pending(self) -> bool:
        """Whether results of plans are outstanding."""
        return bool(self._pending)

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

    def _batch(self) -> tuple[Request, ...]:
        """The decoding requests; also brings ``_row_slots`` up to date."""
        if self._rows is None:
            self._rows = tuple(self._decoding.values())
            self._row_slots = tuple([request.slot for request in self._rows if request.slot is not None])
        return self._rows

    def _plan_decode(self, requests: tuple[Request, ...]) -> Decode | None:
        count = len(requests)
        if not count:
            return None
        bucket = bucket_for(count, self._geometry.buckets)
        lease = self._lease(requests)
        self._count_decode(count, bucket)
        return Decode(self._row_slots, tuple([request.num_computed for request in requests]), bucket, lease)

    def _count_decode(self, count: int, bucket: int) -> None:
        stats = self.stats.buckets.get(bucket)
        if stats is None:
            stats = self.stats.buckets[bucket] = BucketStats()
        stats.steps += 1
        stats.rows += count
        self._observe_batch(count)
        self._decode_steps += 1
        for tenant, rows in self._tenant_rows.items():
            self._owner.charge(tenant, rows)

    def _lease(self, requests: Sequence[Request]) -> int:
        """How many decode steps may run in a row: nothing else is to be done, nobody needs room and nobody reaches its end before."""
        longest = self._max_lease
        if longest == 1 or self._prefilling or self.num_deferred:
            return 1
        for step in range(1, longest):
            if self._decode_steps + step in self._calendar:
                longest = step
                break
        return min(longest, *[request.end - len(request.token_ids) for request in requests])

    def _grow_due(self) -> None:
        """Makes sure that every decoding request has room for its next token."""
        beginners, self._beginners = self._beginners, []
        for request, decode in beginners:
            if request.num_decodes == decode and request.state is RequestState.DECODING:
                self._enter(request)
        for request, decode in self._calendar.pop(self._decode_steps, ()):
            if request.num_decodes != decode or request.state is not RequestState.DECODING:
                continue  # it has left or jumped since, and may be back with another table
            self.kv.generated(request)
            if self._make_room(request, request.num_computed + 1):
                self._enter(request)

    def _enter(self, request: Request) -> None:
        """Writes into the calendar when a decoding request needs room again."""
        capacity = self.kv.capacity(request)
        if capacity >= request.end:
            return
        due = self._decode_steps + capacity - request.num_computed
        self._calendar.setdefault(due, []).append((request, request.num_decodes))

    def _make_room(self, request: Request, num_tokens: int) -> bool:
        """Grows a running request's tables; preempts where there is no room. False if the request itself had to give way."""
        while (grown := self.kv.grow(request, num_tokens)) is None:
            running = [one for one in self._slots if one is not None]
            if len(running) == 1:
                # Its whole life fits; what stands in the way is kept for others.
                if self.kv.copies.drop_windows() or self._owner.drop_pins(self):
                    continue
                raise Internal("out of KV blocks with no request to preempt")
            victim = self.preemption.victim(running)
            assert victim is not None
            self._preempt(victim, "memory")
            if victim is request:
                return False
        slot = request.slot
        assert slot is not None
        self._next.grow(request, slot, grown)
        return True

    def _preempt(self, victim: Request, reason: str) -> None:
        self.stats.preemptions[reason] += 1
        self._leave(victim)
        self._owner.requeue(victim)

    # ---- taking in -----------------------------------------------------------------------------------------------------------------

    def update(self, result: StepResult) -> None:
        """Takes in a plan's result: tokens go to their requests' sinks, requests that end give up slot and blocks.

        Raises:
            Internal: if results and plans do not match; the replica's state is unknown then.
        """
        pending = self._answered(result)
        soon, self._soon = self._soon, []
        if pending.copies is not None and pending.results == 1:
            self.kv.copied(pending.copies, done=result.error is None)
        if result.error is not None:
            self._update_failed(pending, result.error)
        elif isinstance(pending.plan.work, Decode):
            self._update_decode(pending.plan.work, pending, result)
        elif isinstance(pending.plan.work, Prefill):
            self._update_chunk(pending.plan.work, pending, result)
        for output in result.outputs:
            if output.error is not None and output.slot not in pending.left:
                self._fail_slot(output.slot, output.error)
        for request in soon:
            self._owner.requeue(request)
        if self.idle:
            self._owner.released()  # nothing else will be, and pins may have to go
        if self.kv.events.active:
            self.kv.events.flush()

    def _answered(self, result: StepResult) -> _Pending:
        """The plan that a result is of; forgotten if this is its last one."""
        pending = self._pending[0] if self._pending else None
        if pending is None or pending.plan.step != result.step:
            raise Internal(
                f"the worker answered step {result.step}, expected {pending.plan.step if pending else 'none'}"
            )
        work = pending.plan.work
        if isinstance(work, Decode) and pending.results:
            if pending.results == work.lease:
                raise Internal(
                    f"the worker ran more steps than the {work.lease} that plan {result.step} allowed"
                )
            self._count_decode(len(pending.requests), work.bucket)
            self._interleave.decoded()
        pending.results += 1
        if result.last or result.error is not None or not (isinstance(work, Decode) and work.lease > 1):
            self._pending.popleft()
        return pending

    def _update_failed(self, pending: _Pending, error: TriptychError) -> None:
        for request, slot in zip(pending.requests, _slots_of(pending.plan.work), strict=True):
            if slot not in pending.left:
                self._fail(request, error)
        # Nobody knows how far the worker came: who was admitted, grown or copied to in that plan begins anew.
        changed = {*(new.slot for new in pending.plan.admit), *(growth.slot for growth in pending.plan.grow)}
        # Where they are here: an owner that left may have a slot of another replica by now.
        owners = pending.copies.owners if pending.copies else ()
        changed |= {slot for slot, request in enumerate(self._slots) if request in owners}
        for slot in sorted(changed - pending.left):
            unlucky = self._slots[slot]
            if unlucky is not None:
                self._preempt(unlucky, "fault")

    def _fail_slot(self, slot: int, error: TriptychError) -> None:
        """Ends a request that the worker could not run or not even admit; one whose grammar it has lost waits for it again."""
        request = self._slots[slot]
        if request is None:
            return
        if isinstance(error, Unavailable) and request.sampling.grammar is not None:
            self._leave(request)
            self._owner.without_grammar(request)
            return
        self._fail(request, error)

    def _update_decode(self, work: Decode, pending: _Pending, result: StepResult) -> None:
        requests, left = pending.requests, pending.left
        if self._stalled_since is not None:
            # Chunks ran since the last decode step: from its end to this one's start, its requests stood still.
            stall = pending.planned_s - self._stalled_since
            self.stats.stall_s += stall
            self.stats.longest_stall_s = max(self.stats.longest_stall_s, stall)
            self._stalled_since = None
        tokens = result.token_ids
        if len(tokens) != len(requests) or left or self._first_tokens:
            outputs = {output.slot: output for output in result.outputs}
            outputs.update(
                (slot, SlotOutput(slot, (token,))) for slot, token in zip(work.slots, tokens, strict=False)
            )
            for slot, request in zip(work.slots, requests, strict=True):
                if slot not in left:
                    request.num_computed += 1
                    self._accept(request, outputs.get(slot), result)
            self._first_tokens = any(request.branches for request in self._decoding.values())
            return
        # The common case, once per token of all requests.
        for request, token in zip(requests, tokens, strict=True):
            token_ids = request.token_ids
            token_ids.append(token)
            request.num_computed += 1
            if token in request.stop_ids or len(token_ids) >= request.end:
                self._end(request, token)
            else:
                request.sink.push_token(request.request_id, token)
        self.stats.generated_tokens += len(requests)

    def _update_chunk(self, chunk: Prefill, pending: _Pending, result: StepResult) -> None:
        request = pending.requests[0]
        if self._decoding and self._stalled_since is None:
            self._stalled_since = pending.planned_s
        if chunk.slot in pending.left:
            return  # it has gone while the step ran
        output = next((output for output in result.outputs if output.slot == chunk.slot), None)
        if output is not None and output.error is not None:
            return  # the caller ends it
        if output is not None and output.prompt_logprobs:
            self._tell_prompt(request, chunk.start, output.prompt_logprobs)
        end = chunk.start + chunk.num_tokens
        if request.jumped:
            request.num_computed = end
            self.kv.generated(request)
        else:
            self.kv.computed(request, chunk.start, end)
            request.num_computed = end
            self._release_waiters(request, end)
        self.prefill_backlog -= chunk.num_tokens
        if request.num_to_prefill:
            return
        self._prefilling.remove(request)
        self._start_decoding(request)
        if request.family is not None:
            self._release_branches(request)
        if not chunk.sample:
            return
        if result.token_ids:
            output = SlotOutput(chunk.slot, (result.token_ids[0],))
        self._accept(request, output, result)

    def _tell_prompt(self, request: Request, start: int, logprobs: tuple[Logprobs, ...]) -> None:
        """Passes on what a chunk that begins at ``start`` says of the prompt, but for what an earlier admission has said already."""
        new = logprobs[max(0, request.num_prompt_told - start) :]
        if new:
            request.num_prompt_told += len(new)
            self._tell(request, Event(request.request_id, prompt_logprobs=new))

    def _release_branches(self, origin: Request) -> None:
        """A prompt that several sequences share is computed: the others go on from there, as far as there is room."""
        assert origin.family is not None
        for request in self._in_progress.computed(origin.family):
            if not self._fork(origin, request):
                self._owner.requeue(request)

    def _release_waiters(self, request: Request, end: int) -> None:
        keys, limit = self.kv.keys_of(request)
        boundary, rest = divmod(end, self._geometry.granule)
        if rest or boundary > limit:
            return
        waiters = self._in_progress.computed(keys[boundary - 1])
        if self.kv.copies:
            self._soon += waiters
            return
        for waiter in waiters:
            self._owner.requeue(waiter)

    def _accept(self, request: Request, output: SlotOutput | None, result: StepResult) -> None:
        """Appends new tokens up to the first one that ends the sequence, and tells the client."""
        if output is not None and output.error is not None:
            return  # the caller ends it
        if output is None or not output.token_ids:
            self._fail(
                request, Internal(f"step {result.step} gave no token for request {request.request_id}")
            )
            return
        accepted: list[int] = []
        finish: FinishReason | None = None
        stop_token: int | None = None
        for token in output.token_ids:
            request.token_ids.append(token)
            accepted.append(token)
            if self._stops(request, token):
                finish, stop_token = FinishReason.STOP, token
            elif len(request.token_ids) >= request.end:
                finish = FinishReason.LENGTH
            if finish is not None:
                break
        self.stats.generated_tokens += len(accepted)
        event = Event(
            request.request_id, tuple(accepted), output.logprobs[: len(accepted)], finish, stop_token
        )
        if len(accepted) > 1:
            self.stats.forced_tokens += len(accepted) - 1
            self._owner.charge(request.tenant, len(accepted) - 1)
            if finish is None:
                self._jump(request)
        self._tell(request, event)

    def _stops(self, request: Request, token: int) -> bool:
        """Whether the token just appended ends the sequence; before its least number of tokens only the model's own do, of a grammar that is through."""
        if token not in request.stop_ids:
            return False
        sampling = request.sampling
        return request.num_output_tokens >= sampling.min_tokens or (
            sampling.grammar is not None and token in request.end_ids
        )

    def _jump(self, request: Request) -> None:
        """A decoding request got tokens that are not computed yet: it prefills them, from where it is, before it decodes again."""
        self._stop_decoding(request)
        request.state, request.jumped = RequestState.PREFILLING, True
        insort(self._prefilling, request, key=lambda one: one.rank)
        self.prefill_backlog += request.num_to_prefill

    def _stop_decoding(self, request: Request) -> None:
        self.kv.generated(request)
        del self._decoding[request.request_id]
        self._tenant_rows[request.tenant] -= 1
        if not self._tenant_rows[request.tenant]:
            del self._tenant_rows[request.tenant]
        self._rows = None
        if not self._decoding:
            self._stalled_since = None

    def _end(self, request: Request, token: int) -> None:
        """The token just appended was a request's last one, unless it is an end token that came too early."""
        stopped = self._stops(request, token)
        if not stopped and len(request.token_ids) < request.end:
            request.sink.push_token(request.request_id, token)
            return
        finish = FinishReason.STOP if stopped else FinishReason.LENGTH
        self._tell(request, Event(request.request_id, (token,), (), finish, token if stopped else None))

    def _tell(self, request: Request, event: Event) -> None:
        if not request.announced:
            request.announced = True
            event = event.announcing(request)
        if request.first_token_s is None and event.token_ids:
            request.first_token_s = now = self._clock()
            if request.first_scheduled_s is not None:
                self.stats.prefill_s.observe(now - request.first_scheduled_s)
        if event.finish_reason is None:
            request.sink.push(event)
            return
        if request.first_token_s is not None:
            self.stats.decode_s.observe(self._clock() - request.first_token_s)
        self._finish(request, event)

    def _fail(self, request: Request, error: TriptychError) -> None:
        self._finish(request, Event(request.request_id, error=error))

    def _finish(self, request: Request, event: Event) -> None:
        if request.slot is not None:
            self._leave(request)
        elif not self._in_progress.cancel(request):
            self._soon.remove(request)
        request.state = RequestState.FINISHED
        request.sink.push(event)
        self._owner.forget(request)

    def _leave(self, request: Request) -> None:
        """Takes slot and blocks from a running request."""
        slot = request.slot
        if slot is None:
            raise Internal(f"request {request.request_id} has no slot to give up")
        if request.state is RequestState.PREFILLING:
            self._prefilling.remove(request)
            self.prefill_backlog -= request.num_to_prefill
            keys, limit = self.kv.keys_of(request)
            for waiter in self._in_progress.given_up(request, keys[:limit]):
                self._owner.requeue(waiter)
        elif request.state is RequestState.DECODING:
            self._stop_decoding(request)
        request.state = RequestState.WAITING
        self._priorities[request.priority] -= 1
        if not self._priorities[request.priority]:
            del self._priorities[request.priority]
        self._next.release(request, slot)
        for pending in self._pending:
            pending.left.add(slot)
        self._slots[slot] = None
        self._free_slots.append(slot)
        request.slot = None
        self.kv.release(request)


def _slots_of(work: Prefill | Decode | Pool | None) -> Sequence[int]:
    match work:
        case Prefill():
            return (work.slot,)
        case Decode() | Pool():
            return work.slots
        case None:
            return ()
