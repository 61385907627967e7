"""The batches of a replica: which requests run, and the next plan for the worker.

Synchronous and free of I/O: :meth:`ReplicaScheduler.next_plan` decides a plan,
:meth:`ReplicaScheduler.update` takes in its results. A plan is valid whatever became of those before it, so
the next is decided from the tokens computed for each request once all plans are done. The worker applies
plans in order, so blocks may change owners as soon as they are released, even while a step runs.
"""

from collections.abc import Callable, Sequence
from typing import Final

from protos.errors import Internal
from protos.steps import Decode, Prefill, StepPlan, StepResult
from scheduler_svc.adapters.seats import AdapterSeats
from scheduler_svc.kv.cache import KvCache
from scheduler_svc.policy.rules import Turns, next_to_prefill, runs_before
from scheduler_svc.replica.quarantine import EvictedRequests, Loss, accuse
from scheduler_svc.replica.results import ResultHandler
from scheduler_svc.replica.slots import ReplicaOwner, Slots
from scheduler_svc.requests.request import Event, Request, RequestState
from scheduler_svc.shapes.buckets import bucket_for, chunk_for
from scheduler_svc.shapes.shape_config import ShapeConfig

_CHUNKS_BOUND: Final = 2
"""Chunks that may precede the first chunk of a request with a slot. Until then, binding it to a slot gains
nothing, while the order of the queue, cached prefixes and other replicas still count."""

_LARGE_BATCH: Final = 32
"""Rows from which on the worker collects steps by default."""
_LARGE_BATCH_INTERVAL_S: Final = 0.005


class ReplicaScheduler:
    """Continuous batching over static graphs.

    A plan is one prefill chunk at batch size 1, or some steps of a decode batch at a bucket size, never both.
    One plan runs, and the next waits on the worker; on a pipeline one runs on each stage.
    """

    def __init__(
        self, shapes: ShapeConfig, kv: KvCache, owner: ReplicaOwner, turns: Turns, *, clock: Callable[[], float],
        lease_steps: int = 1, event_interval_s: float | None = None, adapters: AdapterSeats | None = None,
        depth: int | None = None,
    ) -> None:  # fmt: skip
        """Starts with all slots free.

        Args:
            shapes: static shapes.
            kv: the replica's KV memory; used by this scheduler alone.
            owner: takes the requests that leave.
            turns: chooses between prefill and decode.
            clock: monotonic seconds.
            lease_steps: most decode steps of one plan.
            event_interval_s: time for which the worker may collect the tokens of these steps; by default
                5 ms in batches of 32 rows or more, where a message a step would cost the most.
            adapters: counts the LoRA adapters; None if the worker runs none.
            depth: most plans on the worker at once; None for a pipeline's stages plus 1.
        """
        self.shapes, self.kv = shapes, kv
        self.adapters = adapters or AdapterSeats(0, 0, clock)
        self._owner = owner
        kv.on_release = owner.released
        self._turns = turns
        self._clock = clock
        self._lease_steps = lease_steps
        self._event_interval_s = event_interval_s
        self._depth = shapes.stages + 1 if depth is None else depth
        # Whether a request was refused, and the next chunk may make room for it.
        self._chunk_makes_room = False
        # Suspects and the decode batch take turns.
        self._trial_due = False
        # Whether nothing is sent until all plans are answered, because one failed.
        self._draining = False
        self._slots = slots = Slots(shapes, kv, self.adapters, owner, clock)
        self.stats = slots.stats
        self._plans, self._decoding = slots.plans, slots.decoding
        self._results = ResultHandler(slots)

    # ---- state ----

    @property
    def num_running(self) -> int:
        """Requests with a slot."""
        return len(self._slots)

    @property
    def num_deferred(self) -> int:
        """Requests waiting here for a prefix."""
        return len(self._slots.waiters)

    @property
    def is_busy(self) -> bool:
        """Whether requests run or wait here."""
        return bool(len(self._slots) or self.num_deferred)

    @property
    def prefill_backlog(self) -> int:
        """Tokens still to prefill for running requests."""
        return self._slots.prefill_backlog

    @property
    def has_free_slot(self) -> bool:
        """Whether another request may be admitted, in its turn and if memory permits."""
        return not self._slots.full

    @property
    def running(self) -> list[Request]:
        """The requests with a slot."""
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
        return self._slots.waiters.cached_tokens(request)

    def shares_prompt(self, request: Request) -> bool:
        """Whether another sequence of the same request computed their prompt here, or is doing so."""
        return request.can_fork and next(self._slots.siblings_with_prompt(request), None) is not None

    def footprint(self, request: Request) -> float:
        """Returns the share of the replica occupied by a running request: of its slots or its memory."""
        return max(1 / self.shapes.max_num_seqs, self.kv.share_of(request.kv))

    # ---- admitting and releasing requests ----

    def admit(self, request: Request) -> bool:
        """Gives a waiting request a slot and blocks, or defers it until a shared prefix is computed.

        Returns:
            Whether the request is here now.
        """
        if self._slots.full or not self.adapters.has_room(request.adapter, request.rank):
            return False
        if (request.can_fork and self._admit_sibling(request)) or self._slots.waiters.defer_for_prefix(
            request
        ):
            return True
        others = [one.kv for one in self._slots.prefilling]
        if not (self._has_turn(request) and self.kv.admit(request.kv, others)):
            self._chunk_makes_room = True
            return False
        self._slots.assign_slot(request)
        return True

    def _admit_sibling(self, request: Request) -> bool:
        """Forks a sequence from a sibling, or defers it until the sibling completes their prompt."""
        for origin in self._slots.siblings_with_prompt(request):
            if origin.state is RequestState.PREFILLING:
                self._slots.waiters.defer_for_prompt(request, origin)
                return True
            if self._slots.fork(origin, request):
                return True
        return False

    def _has_turn(self, request: Request) -> bool:
        """Whether a request's first chunk would be among the next to run."""
        if not self._slots.prefilling:
            return True
        chunk, rest = self.shapes.chunk, len(request.token_ids) - self.cached_tokens(request)
        before = sum(
            min(one.num_ungranted, chunk) for one in self._slots.prefilling if runs_before(one, request, rest)
        )
        return before < _CHUNKS_BOUND * chunk

    def stop(self, request: Request, event: Event) -> None:
        """Ends a request running or deferred here with its last event; the next plan frees its slot."""
        self._slots.finish(request, event)

    def preempt_for(self, request: Request, candidates: Sequence[Request], reason: str) -> bool:
        """Preempts the first of some running requests, as few as make the waiting request fit for certain.

        Returns:
            Whether there is room now; nothing is preempted if not all of them would be enough.
        """
        if not self._has_turn(request) or not self.fits(request):
            return False
        users: Sequence[Request] = ()
        if not self.adapters.has_room(request.adapter, request.rank):
            # An adapter in use without room is claimed: a request of a smaller rank waits for its seat.
            found = None if self.adapters.uses(request.adapter) else self._slots.fewest_users(candidates)
            if found is None:
                return False
            users = found
        order = [*users, *(one for one in candidates if one not in users)]
        least = max(len(users), int(self._slots.full))
        if least > len(order):
            return False
        others = [one.kv for one in self._slots.prefilling]
        count = self.kv.num_to_leave(request.kv, [one.kv for one in order], least, others)
        for one in order[: count or 0]:
            self._slots.preempt(one, reason)
        return count is not None

    def abandon(self, loss: Loss) -> EvictedRequests:
        """Takes all requests off a lost replica; the loss may make suspects of those in unanswered plans."""
        suspects, culprit = accuse(self._plans, loss, self._slots.requests)
        return EvictedRequests(self._slots.clear(), suspects, culprit)

    # ---- deciding ----

    def next_plan(self) -> StepPlan | None:
        """Decides the next plan. Call it until it returns None.

        Returns:
            The plan; None if the worker has enough plans, or there is nothing to do.
        """
        out, slots = len(self._plans), self._slots
        if self._draining or (out and self._last_is_suspect):
            return None
        depth = 1 if slots.has_suspects else self._depth
        waits = out >= depth
        # A chunk, or a joining request, may end decode work of several steps.
        interrupts = depth > 1 and self._plans.decodes_on
        if (waits and not interrupts) or out > depth:
            return None
        while True:
            preempted = self.stats.num_preempted
            plan = self._chunk(interrupts) if slots.prefilling else None
            if plan is None and not (waits and not self._decoding.has_joined):
                plan = self._trial() or self._decode(interrupts and self._decoding.has_joined)
            if plan is None and not waits and slots.prefilling:
                plan = self._chunk(interrupts, is_due=True)  # no row can decode now
            if plan is not None:
                return plan
            if self.stats.num_preempted == preempted:
                break  # else the request was preempted itself: there may be other work
        if not self._plans and (self.kv.copies or self._plans.releases):
            return self._plans.send(None, ())
        if interrupts and not any(step.here for step in self._plans):
            return self._plans.send(None, (), interrupts=True)  # nobody needs the remaining steps
        return None

    @property
    def _last_is_suspect(self) -> bool:
        return any(one.suspect for step in self._plans for one in step.requests[:1])

    def _chunk(self, interrupts: bool, *, is_due: bool = False) -> StepPlan | None:
        """Returns a plan with a chunk, if it is a chunk's turn, or is due anyway, and there is room."""
        request = next_to_prefill(self._may_prefill(), self._turns.chunks)
        if request is None:
            return None
        step_s = self.stats.times.decode.at(len(self._decoding))
        bucket = chunk_for(request.num_ungranted, self._chunk_sizes(step_s))
        tokens = min(bucket, request.num_ungranted)
        chunk_s = self.stats.times.of_bucket(bucket)
        rest_s = chunk_s * -(-request.num_ungranted // tokens)
        if (
            self._decoding
            and not is_due
            and not self._turns.prefill_due(
                request, self._clock(), chunk_s=chunk_s, rest_s=rest_s, step_s=step_s
            )
        ):
            return None
        start, end = request.granted, request.granted + tokens
        if not self._make_room(request, end):
            return None
        assert request.slot is not None
        work = Prefill(request.slot, start, tokens, end == len(request.token_ids), bucket)
        plan = self._plans.send(work, (request,), interrupts=interrupts, context_tokens=end)
        self._slots.chunk_sent(request, end)
        self._turns.sent_chunk(chunk_s, self._stages_per_batch)
        if self._chunk_makes_room:
            self._chunk_makes_room = False
            self._owner.released()
        return plan

    def _chunk_sizes(self, step_s: float) -> Sequence[int]:
        """Returns the buckets for the next chunk: those that keep the gap before a decode step on target."""
        sizes = self.shapes.chunk_sizes
        if not self._decoding:
            return sizes
        aligned = [size for size in sizes if size % self.kv.chunk_unit == 0]
        longest = self._turns.longest_chunk(aligned, self.stats.times.of_bucket, step_s)
        return [size for size in sizes if size <= longest]

    def _may_prefill(self) -> Sequence[Request]:
        """Returns the requests ready for their next chunk."""
        prefilling = self._slots.prefilling
        if not self.kv.slides_in_place:
            return prefilling
        # A window sliding in place may have to be kept before the next chunk moves it.
        return [one for one in prefilling if one.granted == one.kv.num_computed]

    def _trial(self) -> StepPlan | None:
        """Returns a plan with the decode step of a suspect, alone, if it is a suspect's turn."""
        trials = self._slots.trials
        if not trials or (self._decoding and not self._trial_due):
            self._trial_due = True
            return None
        self._trial_due = False
        request = trials[0]
        position = request.kv.num_computed
        if not self._make_room(request, position + 1):
            return None
        assert request.slot is not None
        work = Decode((request.slot,), bucket_for(1, self.shapes.buckets))
        return self._plans.send(work, (request,), context_tokens=position + 1)

    def _decode(self, interrupts: bool) -> StepPlan | None:
        """Returns a plan with the next steps of the decode batch whose turn it is."""
        if not self._decoding:
            return None
        rows, steps = self._decoding.grant(self._most_steps(), self._make_room)
        if not steps:
            return None
        batch = rows.batch
        work = Decode(
            batch.slots, bucket_for(len(batch.slots), self.shapes.buckets), steps,
            self._steps_per_result(len(batch.slots), steps),
        )  # fmt: skip
        self._turns.sent_steps(steps * self._stages_per_batch)
        return self._plans.send(
            work, batch.requests, batch, interrupts=interrupts, context_tokens=rows.context_tokens,
            paced=bool(self._slots.prefilling),
        )  # fmt: skip

    def _steps_per_result(self, rows: int, steps: int) -> int:
        """Returns how many of these decode steps the worker may answer together."""
        if steps == 1:
            return 1
        interval_s = self._event_interval_s
        if interval_s is None:
            interval_s = _LARGE_BATCH_INTERVAL_S if rows >= _LARGE_BATCH else 0.0
        if not interval_s or not (step_s := self.stats.times.decode.at(rows)):
            return 1
        return max(1, min(steps, int(interval_s / step_s)))

    def _most_steps(self) -> int:
        """Returns how many decode steps may run in a row before other work."""
        if self._slots.trials or self.num_deferred or self._decoding.num_active > 1:
            return 1
        if self._slots.prefilling:
            return min(self._lease_steps, self._turns.steps_before_chunk)
        return self._lease_steps

    @property
    def _stages_per_batch(self) -> int:
        """Pipeline stages for each decode batch in use."""
        return self.shapes.stages // max(1, self._decoding.num_active)

    def _make_room(self, request: Request, num_tokens: int) -> bool:
        """Grows a running request's tables, preempting others if needed.

        False: the request was preempted itself, or runs alone and copies in flight hold its blocks.
        """
        while not self._plans.grow(request, num_tokens):
            running = self._slots.requests
            if len(running) == 1:
                # An admitted request fits an empty replica, so kept windows are in the way.
                if self.kv.copies.drop_windows():
                    continue
                if self._plans:
                    return False
                raise Internal("out of KV blocks with no request to preempt")
            # The first in order always makes progress.
            victim = max(running, key=lambda request: request.rank)
            self._slots.preempt(victim, "memory")
            if victim is request:
                return False
        return True

    def drain(self) -> None:
        """Sends nothing until all plans are answered; the next then follows from results alone."""
        self._draining = bool(self._plans)
        self._decoding.refresh()

    # ---- results ----

    def update(self, result: StepResult) -> None:
        """Applies a result: tokens go to their requests' sinks, ended requests release slot and blocks.

        Raises:
            Internal: results and plans do not match; the replica's state is then unknown.
        """
        step = self._plans.match(result)
        first, last = step.num_steps == result.num_steps, result.last or result.error is not None
        step.answered = last
        self._results.apply(step, result, first=first)
        if last:
            if missing := step.num_left:
                self._decoding.refresh()
                if not self._plans.has_chunk_after(step):
                    self._turns.take_back(missing)
            self._plans.close(self._clock)
            if result.error is not None:
                self._draining = True
            self._draining = self._draining and bool(self._plans)
        if self.kv.events.active:
            self.kv.events.flush()
