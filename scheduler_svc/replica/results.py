"""What comes back from a worker: tokens for clients, chunks that are computed, requests that end, and faults."""

from collections.abc import Sequence

from protos.errors import Internal, TriptychError, Unavailable
from scheduler_svc.replica.in_flight import Pending
from scheduler_svc.replica.outputs import append, end_of, prompt_of
from scheduler_svc.replica.slots import Running
from scheduler_svc.replica.step_plan import Decode, Pool, Prefill, SlotOutput, StepResult
from scheduler_svc.requests.request import Request


class Results:
    """Takes results in. One without surprises costs a few operations a request."""

    def __init__(self, running: Running) -> None:
        """Of the plans that ``running`` has sent."""
        self._running = running

    def take(self, pending: Pending, result: StepResult) -> None:
        """Takes in one result of a plan."""
        running, work = self._running, pending.plan.work
        ready = running.sharing.copied()
        if pending.copies is not None and pending.results == 1:
            running.kv.copied(pending.copies, done=result.error is None)
        if result.error is not None:
            self._take_failure(pending, result.error)
        elif isinstance(work, Decode):
            self._take_tokens(work, pending, result)
        elif isinstance(work, Prefill):
            self._take_chunk(work, pending, result)
        for output in result.outputs:
            if output.error is not None and output.slot not in pending.left:
                self._fail_slot(output.slot, output.error)
        for request in ready:
            running.owner.requeue(request)

    # ---- faults --------------------------------------------------------------------------------------------------------------------

    def _take_failure(self, pending: Pending, error: TriptychError) -> None:
        running = self._running
        for request, slot in zip(pending.requests, _slots_of(pending.plan.work), strict=True):
            if slot not in pending.left:
                running.fail(request, error)
        # Nobody knows how far the worker came: who was admitted, grown or copied to in that plan begins anew.
        changed = {*(new.slot for new in pending.plan.admit), *(growth.slot for growth in pending.plan.grow)}
        # Where they are here: an owner that left may have a slot of another replica by now.
        owners = pending.copies.owners if pending.copies else ()
        changed |= {one.slot for one in owners if running.holds(one) and one.slot is not None}
        for slot in sorted(changed - pending.left):
            unlucky = running.at(slot)
            if unlucky is not None:
                running.preempt(unlucky, "fault")

    def _fail_slot(self, slot: int, error: TriptychError) -> None:
        """Ends a request that the worker could not run or not even admit; one whose grammar it has lost waits for it again."""
        request = self._running.at(slot)
        if request is None:
            return
        if isinstance(error, Unavailable) and request.sampling.grammar is not None:
            self._running.leave(request)
            self._running.owner.without_grammar(request)
            return
        self._running.fail(request, error)

    # ---- decode steps --------------------------------------------------------------------------------------------------------------

    def _take_tokens(self, work: Decode, pending: Pending, result: StepResult) -> None:
        requests, left, decoding = pending.requests, pending.left, self._running.decoding
        if decoding.stalled_since is not None:
            # Chunks ran since the last decode step: from its end to this one's start, its requests stood still.
            stall = pending.planned_s - decoding.stalled_since
            stats = self._running.stats
            stats.stall_s += stall
            stats.longest_stall_s = max(stats.longest_stall_s, stall)
            decoding.stalled_since = None
        tokens = result.token_ids
        if len(tokens) != len(requests) or left or decoding.first_tokens:
            outputs = {output.slot: output for output in result.outputs}
            outputs.update(
                (slot, SlotOutput(slot, (token,))) for slot, token in zip(work.slots, tokens, strict=False)
            )
            for slot, request in zip(work.slots, requests, strict=True):
                if slot not in left:
                    request.num_computed += 1
                    self._accept(request, outputs.get(slot), result)
            decoding.told()
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
        self._running.stats.generated_tokens += len(requests)

    def _end(self, request: Request, token: int) -> None:
        event = end_of(request, token)
        if event is None:
            request.sink.push_token(request.request_id, token)
        else:
            self._running.tell(request, event)

    # ---- chunks --------------------------------------------------------------------------------------------------------------------

    def _take_chunk(self, chunk: Prefill, pending: Pending, result: StepResult) -> None:
        running, request = self._running, pending.requests[0]
        if running.decoding.members and running.decoding.stalled_since is None:
            running.decoding.stalled_since = pending.planned_s
        if chunk.slot in pending.left:
            return  # it has gone while the step ran
        output = next((output for output in result.outputs if output.slot == chunk.slot), None)
        if output is not None and output.error is not None:
            return  # the caller ends it
        if output is not None and output.prompt_logprobs:
            said = prompt_of(request, chunk.start, output.prompt_logprobs)
            if said is not None:
                running.tell(request, said)
        self._take_computed(request, chunk.start, chunk.start + chunk.num_tokens)
        if not running.prefilled(request, chunk.num_tokens):
            return
        # A prompt that several sequences share is computed: the others go on from there, as far as there is room.
        for waiter in running.sharing.computed_prompt(request):
            if not running.fork(request, waiter):
                running.owner.requeue(waiter)
        if not chunk.sample:
            return
        if result.token_ids:
            output = SlotOutput(chunk.slot, (result.token_ids[0],))
        self._accept(request, output, result)

    def _take_computed(self, request: Request, start: int, end: int) -> None:
        """Makes findable what a chunk computed, and lets those go on who waited for it."""
        running = self._running
        if request.jumped:
            request.num_computed = end
            running.kv.generated(request)
            return
        running.kv.computed(request, start, end)
        request.num_computed = end
        for waiter in running.sharing.computed(request, end):
            running.owner.requeue(waiter)

    def _accept(self, request: Request, output: SlotOutput | None, result: StepResult) -> None:
        """Appends new tokens up to the first one that ends the sequence, and tells the client."""
        running = self._running
        if output is not None and output.error is not None:
            return  # the caller ends it
        if output is None or not output.token_ids:
            error = Internal(f"step {result.step} gave no token for request {request.request_id}")
            running.fail(request, error)
            return
        event = append(request, output)
        count = len(event.token_ids)
        running.stats.generated_tokens += count
        if count > 1:
            running.stats.forced_tokens += count - 1
            running.owner.charge(request.tenant, count - 1)
            if event.finish_reason is None:
                running.jump(request)
        running.tell(request, event)


def _slots_of(work: Prefill | Decode | Pool | None) -> Sequence[int]:
    match work:
        case Prefill():
            return (work.slot,)
        case Decode() | Pool():
            return work.slots
        case None:
            return ()
