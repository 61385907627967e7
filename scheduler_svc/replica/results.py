"""Turns a worker's results into progress of requests and events for clients."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from protos.errors import Internal, TriptychError, Unavailable
from protos.steps import Decode, Prefill, SlotOutput, StepResult
from protos.triptych.v1 import common_pb2
from scheduler_svc.replica.plans import BatchRows, InFlight
from scheduler_svc.replica.quarantine import blame
from scheduler_svc.replica.slots import Slots
from scheduler_svc.requests.request import Event, Request
from scheduler_svc.requests.sampling import FinishReason


class ResultHandler:
    """Applies results to requests. A token without surprises costs a few operations."""

    def __init__(self, slots: Slots) -> None:
        """Applies them to the requests in these slots."""
        self._slots = slots
        self._decoding = slots.decoding
        self._waiters = slots.waiters
        self._kv = slots.kv
        self._owner = slots.owner
        self._stats = slots.stats
        self._clock = slots.clock

    def apply(self, step: InFlight, result: StepResult, *, first: bool) -> None:
        """Applies a result of a plan; ``first`` if it is the plan's first."""
        work = step.plan.work
        if result.report is not None:
            self._stats.report = result.report
        for request in self._waiters.copies_done(result.step):
            self._owner.requeue(request)
        if step.copies and first:
            self._kv.settle_copies(step.copies, done=result.error is None)
        if result.error is not None:
            self._apply_failure(step, result.error)
        elif result.num_steps and isinstance(work, Decode):
            if step.batch is None:
                self._apply_trial(work, step, result)
            else:
                self._apply_steps(work, step, result, step.batch)
        elif result.num_steps and isinstance(work, Prefill):
            self._apply_chunk(work, step, result)
        for output in result.outputs:
            if output.error is not None and output.slot not in step.ignored:
                self._fail_slot(output.slot, output.error)
        if isinstance(work, Prefill) and not result.num_steps and work.slot not in step.ignored:
            self._slots.preempt(step.requests[0], "fault")  # the worker does not have the request

    # ---- faults ----

    def _apply_failure(self, step: InFlight, error: TriptychError) -> None:
        for request, fails in blame(step, error, self._owner.is_hopeless):
            request.kv.cache_epoch = -1  # its keys and values are undefined: nothing more is indexed
            if fails:
                self._slots.finish(request, Event(request.request_id, error=error))
            else:
                self._slots.preempt(request, "fault")
        # Progress is unknown: restart the requests changed by this plan. A copy's sequence may have left its
        # slot.
        changed = {growth.slot for growth in step.plan.grow}
        copied_to = {copy.sequence for copy in step.copies}
        changed |= {one.slot for one in self._slots.requests if one.kv in copied_to and one.slot is not None}
        for slot in sorted(changed - step.left):
            changed_request = self._slots.at(slot)
            if changed_request is not None:
                self._slots.preempt(changed_request, "fault")

    def _fail_slot(self, slot: int, error: TriptychError) -> None:
        """Ends a request refused by the worker, or requeues it until its grammar or adapter is there."""
        request = self._slots.at(slot)
        if request is None:
            return
        request.kv.cache_epoch = -1  # its results may be wrong: nothing more is indexed
        if isinstance(error, Unavailable) and error.param == "adapter_id" and request.adapter is not None:
            self._slots.adapters.lost(request.adapter.adapter_id, request.adapter_load)
            self._slots.release(request)
            self._owner.requeue(request)
            return
        if isinstance(error, Unavailable) and request.sampling.grammar is not None:
            self._slots.release(request)
            self._owner.without_grammar(request)
            return
        error = self._stats.count_fault(request, error)
        self._slots.finish(request, Event(request.request_id, error=error))

    # ---- decode steps ----

    def _apply_steps(self, work: Decode, step: InFlight, result: StepResult, batch: BatchRows) -> None:
        """Applies the decode steps of a result in order."""
        count, rows, tokens = result.num_steps, len(batch.requests), result.token_ids
        for _ in range(count):
            self._stats.count_decode(rows, work.bucket, result.execute_us * 1e-6 / count)
        num_ignored = len(step.ignored)
        live, places = step.live_rows() if num_ignored else (batch, [])
        # An ignored row is free: a preempted request pays when it recomputes the token.
        for tenant, own in live.tenants.items():
            self._owner.charge(tenant, own * count)
        if self._decoding.stalled_since is not None:
            self._stats.count_stall(step.begun_s - self._decoding.stalled_since)
            self._decoding.stalled_since = None
        if not tokens:
            self._apply_rows(work, step, {output.slot: output for output in result.outputs}, result)
            return
        if len(tokens) != count * rows:
            raise Internal(f"{count} steps of plan {result.step} gave {len(tokens)} tokens for {rows} rows")
        for start in range(0, len(tokens), rows):
            column = tokens[start : start + rows] if count > 1 else tokens
            if batch.has_first_tokens:
                outputs = {
                    slot: SlotOutput(slot, (token,)) for slot, token in zip(work.slots, column, strict=True)
                }
                self._apply_rows(work, step, outputs, result)
                continue
            if len(step.ignored) != num_ignored:
                (live, places), num_ignored = step.live_rows(), len(step.ignored)
            if live.requests:
                self._apply_column(live, [column[place] for place in places] if num_ignored else column)

    def _apply_rows(
        self, work: Decode, step: InFlight, outputs: Mapping[int, SlotOutput], result: StepResult
    ) -> None:
        """Applies a step row by row: some left, are skipped, or gave their first or several tokens."""
        for slot, request in zip(work.slots, step.requests, strict=True):
            if slot not in step.ignored:
                self._apply_row(request, outputs.get(slot), result)
        if step.batch is not None and step.batch.has_first_tokens:
            self._decoding.refresh()

    def _apply_column(self, batch: BatchRows, tokens: Sequence[int]) -> None:
        """Applies a step with a token for each row: the common case, run once per token."""
        requests = batch.requests
        # Each request computes one token and gets one, so its `num_uncomputed` stays 1.
        ending: dict[str, Event] | None = None
        for request, token in zip(requests, tokens, strict=True):
            token_ids = request.token_ids
            token_ids.append(token)
            if token in request.stop_ids or len(token_ids) >= request.end:
                reason = request.stop.reason(token, request.num_output_tokens)
                if reason is not None:
                    ending = ending or {}
                    stop_token_id = token if reason is FinishReason.STOP else None
                    ending[request.request_id] = Event(
                        request.request_id, (token,), (), reason, stop_token_id
                    )
        self._stats.generated_tokens += len(requests)
        if ending:
            self._send_last_tokens(batch, tokens, ending)
            return
        for sink, request_ids, rows in batch.sinks:
            sink.push_tokens(request_ids, tokens if rows is None else [tokens[row] for row in rows])

    def _send_last_tokens(self, batch: BatchRows, tokens: Sequence[int], ending: dict[str, Event]) -> None:
        """Sends the tokens of a step; ``ending`` holds the last events of some requests."""
        for sink, request_ids, rows in batch.sinks:
            own = tokens if rows is None else [tokens[row] for row in rows]
            pairs = [pair for pair in zip(request_ids, own, strict=True) if pair[0] not in ending]
            if pairs:
                sink.push_tokens([request_id for request_id, _ in pairs], [token for _, token in pairs])
        for request in batch.requests:
            if (event := ending.get(request.request_id)) is not None:
                self._send(request, event)

    def _apply_trial(self, work: Decode, step: InFlight, result: StepResult) -> None:
        """Applies the decode step run by a suspect alone, which joins the decode batch."""
        slot, request = work.slots[0], step.requests[0]
        self._stats.count_decode(1, work.bucket, result.execute_us * 1e-6)
        self._owner.charge(request.tenant, 1)
        if slot in step.left:
            return
        self._slots.clear_suspect(request)
        self._apply_row(request, _output_of(slot, result), result)

    def _apply_row(self, request: Request, output: SlotOutput | None, result: StepResult) -> None:
        """Applies a request's row of a decode step."""
        if output is not None and output.error is not None:
            return  # nothing was computed, and the caller ends the request
        request.kv.num_uncomputed -= 1
        self._accept(request, output, result)

    # ---- chunks ----

    def _apply_chunk(self, chunk: Prefill, step: InFlight, result: StepResult) -> None:
        request = step.requests[0]
        self._stats.count_chunk(chunk.bucket, chunk.num_tokens, result.execute_us * 1e-6)
        self._decoding.stall(step.begun_s)
        if chunk.slot in step.left:
            return  # the request left while the step ran
        output = _output_of(chunk.slot, result)
        if output is not None and output.error is not None:
            return  # the caller ends the request
        if output is not None and output.prompt_logprobs:
            self._send_prompt_logprobs(request, chunk.start, output.prompt_logprobs)
        if request.trace is not None:
            request.trace.chunk(step.begun_s, self._clock(), first=chunk.start, count=chunk.num_tokens)
        self._index_chunk(request, chunk.start, chunk.start + chunk.num_tokens)
        if request.suspect and request.kv.num_computed >= request.cleared_at:
            self._slots.clear_suspect(request)
        if not self._slots.prefilled(request):
            return
        # Sequences of the same request continue from the computed prompt, as far as there is room.
        for waiter in self._waiters.prompt_computed(request):
            if not self._slots.fork(request, waiter):
                self._owner.requeue(waiter)
        if chunk.sample:
            self._accept(request, output, result)

    def _send_prompt_logprobs(
        self, request: Request, start: int, logprobs: Sequence[common_pb2.TokenLogprobs]
    ) -> None:
        """Sends the entries of a chunk from ``start``, except those already sent."""
        sent = request.delivery.num_prompt_logprobs
        new = tuple(logprobs[max(0, sent - start) :])
        if new:
            request.delivery.num_prompt_logprobs = sent + len(new)
            self._send(request, Event(request.request_id, prompt_logprobs=new))

    def _index_chunk(self, request: Request, start: int, end: int) -> None:
        """Indexes a computed chunk and requeues the requests waiting for it."""
        if request.prefills_forced:
            request.kv.num_computed = end
            self._kv.prefixes.index_decoded(request.kv)
            return
        self._kv.prefixes.index_chunk(request.kv, start, end)
        request.kv.num_computed = end
        for waiter in self._waiters.reached(request, start, end, self._slots.plans.latest):
            self._owner.requeue(waiter)

    # ---- tokens and events ----

    def _accept(self, request: Request, output: SlotOutput | None, result: StepResult) -> None:
        """Appends new tokens up to the end of the sequence, and sends them."""
        if output is None or not output.token_ids:
            error = Internal(f"step {result.step} gave no token for request {request.request_id}")
            self._slots.finish(request, Event(request.request_id, error=error))
            return
        event = _append(request, output)
        count = len(event.token_ids)
        self._stats.generated_tokens += count
        if count > 1:
            self._stats.forced_tokens += count - 1
            self._owner.charge(request.tenant, count - 1)
            if event.finish_reason is None:
                self._slots.prefill_forced(request)
        self._send(request, event)

    def _send(self, request: Request, event: Event) -> None:
        """Sends an event and keeps the request's statistics; after its last event the request leaves."""
        delivery = request.delivery
        if not delivery.announced:
            delivery.announced = True
            event = event.as_first(request)
            if request.group is None or not request.group.announced:
                self._stats.prompt_tokens += request.num_prompt_tokens
                self._stats.cached_prompt_tokens += min(request.kv.num_cached, request.num_prompt_tokens)
        if delivery.first_token_s is None and event.token_ids:
            delivery.first_token_s = now = self._clock()
            if request.trace is not None:
                request.trace.first_token(now)
            if delivery.first_scheduled_s is not None:
                self._stats.prefill_s.observe(now - delivery.first_scheduled_s)
        if event.finish_reason is None:
            request.sink.push(event)
            return
        self._stats.count_end(request, self._clock())
        self._slots.finish(request, event)


def _output_of(slot: int, result: StepResult) -> SlotOutput | None:
    """Returns the output of a step for its only slot, whose token may be in the column."""
    output = next((output for output in result.outputs if output.slot == slot), None)
    if not result.token_ids or (output is not None and (output.error is not None or output.token_ids)):
        return output
    return replace(output or SlotOutput(slot), token_ids=(result.token_ids[0],))


def _append(request: Request, output: SlotOutput) -> Event:
    """Appends an output's tokens up to the end of the sequence; returns the event for them."""
    accepted: list[int] = []
    reason: FinishReason | None = None
    for token in output.token_ids:
        request.token_ids.append(token)
        accepted.append(token)
        reason = request.stop.reason(token, request.num_output_tokens)
        if reason is not None:
            break
    request.kv.num_uncomputed += len(accepted)
    stop_token_id = accepted[-1] if reason is FinishReason.STOP else None
    return Event(request.request_id, tuple(accepted), output.logprobs[: len(accepted)], reason, stop_token_id)
