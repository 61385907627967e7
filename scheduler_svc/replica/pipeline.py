"""One replica's batches on a worker of several pipeline stages.

The worker passes each plan from stage to stage and answers it behind the last one, in the order of plans. So
the first stage is free for the next plan long before the result arrives. A decode step needs the tokens of
the step before it, so the decoding requests form one micro-batch for each stage. Each has at most one step in
flight, and while one passes through a stage, the others and the chunks of prompts keep the other stages busy.
"""

from collections import deque
from collections.abc import Callable
from typing import TypeAlias

from protos.steps import StepPlan
from scheduler_svc.replica.decode_batch import DecodeBatch
from scheduler_svc.replica.scheduler import ReplicaScheduler
from scheduler_svc.requests.request import Request

_Room: TypeAlias = Callable[[Request, int], bool]
"""Grows a request's tables to a number of tokens; returns whether it did."""


class PipelineScheduler(ReplicaScheduler):
    """Keeps every pipeline stage busy.

    Plans depend on no outstanding result: chunks of one prompt follow one another, and a micro-batch's next
    step is planned when its last one is answered. Leases would gain nothing, so every plan is one step.
    A suspect's work waits until nothing is in flight, and nothing is sent behind it.
    """

    def _start(self) -> None:
        # The micro-batches, the one first that was planned least recently.
        self._turns: deque[DecodeBatch] = deque(self._decoding.batches)
        self._max_lease = 1
        # One plan on each stage, and one that waits for the first stage.
        self._most = self.shapes.stages + 1

    def step(self) -> StepPlan | None:
        """See :meth:`ReplicaScheduler.step`."""
        trials = self._slots.trials
        if trials and (self._trial_due or not self._decoding):
            self._trial_due = False
            trial = self._plan_trial(trials[0])
            if trial is not None:
                self._interleave.choose(prefill=False, decode=True)
                return self._send(trial, (trials[0],))
        self._trial_due = bool(trials)
        plan = self._next_plan(self._make_room)
        if plan is None and (self._copies or self._plan.releases):
            return self._send(None, ())
        return plan

    def interrupt(self) -> StepPlan | None:
        """Returns None: no plan is a lease."""
        return None

    def plan_ahead(self, *, may_preempt: bool = False) -> StepPlan | None:
        """Decides the next step while others are in flight. Call it until it returns None.

        Args:
            may_preempt: see :meth:`ReplicaScheduler.plan_ahead`.

        Returns:
            The plan; None if the worker has enough plans, or if all work waits for results.
        """
        last = self._in_flight.last
        if last is None or last.alone or self._draining or self._slots.trials:
            return None
        if len(self._in_flight) >= self._most:
            return None
        return self._next_plan(self._make_room if may_preempt else self._grow)

    def _next_plan(self, make_room: _Room) -> StepPlan | None:
        """Returns the next chunk or decode step; None if there is none, or no room for it yet."""
        while True:
            due = not self._decoding or self._interleave.prefill_due
            request = self._next_prefilling() if due else None
            preempted = self.stats.preemptions.total()
            if request is not None:
                plan = self._chunk(request, make_room)
            elif (batch := self._next_batch()) is not None:
                plan = self._decode(batch, make_room)
            else:
                return None
            if plan is not None or self.stats.preemptions.total() == preempted:
                return plan
            # The request was preempted itself: there may be other work.

    @property
    def _stages_per_batch(self) -> int:
        """Stages for each micro-batch that has requests."""
        return self.shapes.stages // max(1, self._decoding.num_active)

    def _next_prefilling(self) -> Request | None:
        """Returns the first request with a chunk that can be sent now."""
        for request in self._slots.prefilling:
            sent = self._in_flight.chunk_tokens(request)
            if sent == request.num_to_prefill:
                continue
            # A window that slides in place may have to be kept before the next chunk moves it.
            if not sent or not self.kv.slides_in_place:
                return request
        return None

    def _chunk(self, request: Request, make_room: _Room) -> StepPlan | None:
        if request.suspect and self._in_flight:
            return None
        sent = self._in_flight.chunk_tokens(request)
        work = self._plan_chunk(request, make_room, behind=sent)
        if work is None:
            return None
        decodes = bool(self._decoding)
        self._interleave.choose(prefill=True, decode=decodes, turns=self._stages_per_batch)
        last = self._in_flight.last
        continues = bool(sent) and last is not None and last.requests[:1] == (request,) and last.batch is None
        return self._send(work, (request,), continues=continues)

    def _next_batch(self) -> DecodeBatch | None:
        """Returns the micro-batch that has waited longest for its next step."""
        for batch in self._turns:
            if batch.members and not self._in_flight.has_batch(batch.index):
                return batch
        return None

    def _decode(self, batch: DecodeBatch, make_room: _Room) -> StepPlan | None:
        self._decoding.rebalance(batch, self.shapes.buckets)
        if not batch.reserve_next(make_room):
            batch.withdraw()
            return None
        rows = batch.prepare(make_room)
        if not rows.requests:
            return None
        self._turns.remove(batch)
        self._turns.append(batch)
        self._interleave.choose(prefill=False, decode=True, turns=self._stages_per_batch)
        return self._send(self._plan_decode(batch), rows.requests, rows)
