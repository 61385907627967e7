"""One replica's batches: which requests run, and what the worker does in the next step.

Synchronous and free of I/O: :meth:`ReplicaScheduler.step` decides a plan, :meth:`ReplicaScheduler.update` takes in its result. The worker
applies plans in order, so blocks may be given to another request by the very next plan after they were released.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from protos.errors import Internal
from scheduler_svc.buckets import bucket_for
from scheduler_svc.geometry import Geometry
from scheduler_svc.kv_cache import KvCache
from scheduler_svc.plan import Admission, Decode, Growth, Prefill, SlotOutput, StepPlan, StepResult
from scheduler_svc.policy.interleave import Interleave
from scheduler_svc.policy.preemption import choose_victim
from scheduler_svc.request import Event, FinishReason, Logprobs, Request, RequestState
from scheduler_svc.waiting import WaitingQueue


@dataclass(frozen=True, slots=True)
class _Pending:
    """A plan whose result is not back: who was in it, by slot, in the plan's order."""

    plan: StepPlan
    requests: tuple[Request, ...]


class ReplicaScheduler:
    """Continuous batching over static graphs: prefill chunks at batch size 1, decode at buckets, never both in a step.

    Attributes:
        kv: the replica's KV memory.
    """

    def __init__(
        self, geometry: Geometry, kv: KvCache, waiting: WaitingQueue, interleave: Interleave, *,
        eos_token_ids: frozenset[int], clock: Callable[[], float], on_finish: Callable[[Request], None],
    ) -> None:  # fmt: skip
        """Starts with all slots free.

        Args:
            geometry: static shapes.
            kv: the replica's KV memory; used by this scheduler alone.
            waiting: shared with other replicas.
            interleave: chooses between prefill and decode.
            eos_token_ids: the model's end tokens.
            clock: monotonic seconds.
            on_finish: called once for each request that ends here.
        """
        self._geometry = geometry
        self.kv = kv
        self._waiting = waiting
        self._interleave = interleave
        self._eos = eos_token_ids
        self._clock = clock
        self._on_finish = on_finish
        self._free_slots = list(range(geometry.max_num_seqs - 1, -1, -1))
        # In order of admission; dicts for O(1) removal.
        self._prefilling: dict[str, Request] = {}
        self._decoding: dict[str, Request] = {}
        self._released_slots: list[int] = []
        self._pending: deque[_Pending] = deque()
        self._step = 0

    @property
    def num_running(self) -> int:
        """Requests that have a slot."""
        return len(self._prefilling) + len(self._decoding)

    def owns(self, request: Request) -> bool:
        """Whether the request runs here."""
        return (self._decoding.get(request.request_id) or self._prefilling.get(request.request_id)) is request

    def step(self) -> StepPlan | None:
        """Decides the next step.

        Returns:
            The plan, or None if there is nothing to do. Must not be called while an earlier plan's result is outstanding.
        """
        admitted = self._admit()
        grown: list[Growth] = []
        work: Prefill | Decode | None = None
        requests: tuple[Request, ...] = ()
        kind = self._interleave.choose(prefill=bool(self._prefilling), decode=bool(self._decoding))
        if kind == "prefill":
            requests = (next(iter(self._prefilling.values())),)
            work = self._plan_chunk(requests[0])
        elif kind == "decode":
            grown = self._grow_decoding()
            requests = tuple(self._decoding.values())
            work = self._plan_decode(requests) if requests else None
        # Growing may have preempted a request that was admitted in this very step: it must not reach the worker.
        admissions = [self._admission(request) for request in admitted if request.slot is not None]
        release, self._released_slots = self._released_slots, []
        if work is None and not release:
            return None
        self._step += 1
        plan = StepPlan(self._step, work, release=tuple(release), admit=tuple(admissions), grow=tuple(grown))
        self._pending.append(_Pending(plan, requests))
        return plan

    def update(self, result: StepResult) -> None:
        """Takes in a plan's result: tokens go to their requests' sinks, requests that end give up slot and blocks.

        Raises:
            Internal: if results and plans do not match; the replica's state is unknown then.
        """
        pending = self._pending.popleft() if self._pending else None
        if pending is None or pending.plan.step != result.step:
            raise Internal(
                f"the worker answered step {result.step}, expected {pending.plan.step if pending else 'none'}"
            )
        outputs = {output.slot: output for output in result.outputs}
        match pending.plan.work:
            case Prefill() as chunk:
                self._update_chunk(pending.requests[0], chunk, outputs.get(chunk.slot), result)
            case Decode() as decode:
                for slot, request in zip(decode.slots, pending.requests, strict=True):
                    if request.slot != slot or request.finished:
                        continue  # aborted while the step ran
                    if self._failed(request, outputs.get(slot), result):
                        continue
                    request.num_computed += 1
                    self._accept(request, outputs[slot])
            case None:
                pass

    def abort(self, request: Request) -> None:
        """Ends a running request of this replica. Its slot is released with the next plan."""
        self._finish(request, Event(request.request_id, finish_reason=FinishReason.ABORT))

    def abandon(self) -> list[Request]:
        """Takes all running requests off a replica that is lost, ready to be queued again with the tokens they have."""
        requests = [*self._prefilling.values(), *self._decoding.values()]
        for request in requests:
            self._leave(request)
            request.state = RequestState.WAITING
        self._pending.clear()
        return requests

    # ---- deciding ------------------------------------------------------------------------------------------------------------------

    def _admit(self) -> list[Request]:
        """Moves waiting requests into free slots, in queue order, as long as their known tokens fit."""
        admitted = []
        while self._free_slots and (request := self._waiting.peek()) is not None and self.kv.admit(request):
            self._waiting.remove(request)
            request.slot = self._free_slots.pop()
            request.state = RequestState.PREFILLING
            if request.first_scheduled_s is None:
                request.first_scheduled_s = self._clock()
            self._prefilling[request.request_id] = request
            admitted.append(request)
        return admitted

    def _admission(self, request: Request) -> Admission:
        assert request.slot is not None
        return Admission(
            slot=request.slot,
            request_id=request.request_id,
            token_ids=tuple(request.token_ids),
            num_prompt_tokens=request.num_prompt_tokens,
            num_computed=request.num_computed,
            sampling=request.sampling,
            block_ids=tuple(tuple(block.block_id for block in table) for table in request.blocks),
        )

    def _plan_chunk(self, request: Request) -> Prefill:
        assert request.slot is not None
        start = request.num_computed
        # A request resumes at a chunk boundary, so that chunks lie where a run without a prefix hit would put them.
        count = min(self._geometry.chunk, len(request.token_ids) - start)
        return Prefill(request.slot, start, count, sample=start + count == len(request.token_ids))

    def _plan_decode(self, requests: Sequence[Request]) -> Decode:
        slots = tuple(request.slot for request in requests if request.slot is not None)
        positions = tuple(request.num_computed for request in requests)
        return Decode(slots, positions, bucket_for(len(slots), self._geometry.buckets))

    def _grow_decoding(self) -> list[Growth]:
        """Makes sure that every decoding request has room for its next token; preempts where there is none."""
        grown: dict[str, list[Growth]] = {}
        for request in list(self._decoding.values()):
            while request.slot is not None and request.num_computed >= self.kv.capacity(request):
                new = self.kv.grow(request)
                if new is None:
                    self._preempt(choose_victim([*self._decoding.values(), *self._prefilling.values()]))
                    continue
                slot = request.slot
                grown.setdefault(request.request_id, []).extend(
                    Growth(slot, group_id, (block_id,)) for group_id, block_id in enumerate(new)
                )
        return [
            growth
            for request_id, growths in grown.items()
            if request_id in self._decoding
            for growth in growths
        ]

    def _preempt(self, victim: Request | None) -> None:
        if victim is None:
            raise Internal("out of KV blocks with no request to preempt")
        self._leave(victim)
        victim.state = RequestState.WAITING
        self._waiting.add(victim)

    # ---- taking in -----------------------------------------------------------------------------------------------------------------

    def _update_chunk(
        self, request: Request, chunk: Prefill, output: SlotOutput | None, result: StepResult
    ) -> None:
        if request.slot != chunk.slot or request.finished:
            return  # aborted while the step ran
        if self._failed(request, output, result, needs_output=chunk.sample):
            return
        end = chunk.start + chunk.num_tokens
        self.kv.index(request, chunk.start, end)
        request.num_computed = end
        if chunk.sample:
            assert output is not None
            del self._prefilling[request.request_id]
            self._decoding[request.request_id] = request
            request.state = RequestState.DECODING
            self._accept(request, output)

    def _failed(
        self, request: Request, output: SlotOutput | None, result: StepResult, *, needs_output: bool = True
    ) -> bool:
        """Ends the request if its step failed; other requests are not touched."""
        error = result.error or (output.error if output else None)
        if error is None and needs_output and (output is None or not output.token_ids):
            error = Internal(f"step {result.step} gave no token for request {request.request_id}")
        if error is None:
            return False
        self._finish(request, Event(request.request_id, error=error))
        return True

    def _accept(self, request: Request, output: SlotOutput) -> None:
        """Appends sampled tokens up to the first one that ends the sequence, and tells the client."""
        accepted: list[int] = []
        finish: FinishReason | None = None
        stop_token: int | None = None
        for token in output.token_ids:
            request.token_ids.append(token)
            accepted.append(token)
            sampling = request.sampling
            if token in sampling.stop_token_ids or (token in self._eos and not sampling.ignore_eos):
                finish, stop_token = FinishReason.STOP, token
            elif (
                request.num_output_tokens >= sampling.max_tokens
                or len(request.token_ids) >= self._geometry.max_model_len
            ):
                finish = FinishReason.LENGTH
            if finish is not None:
                break
        event = self._event(request, tuple(accepted), output.logprobs[: len(accepted)], finish, stop_token)
        if finish is None:
            request.sink.push(event)
        else:
            self._finish(request, event)

    def _event(
        self, request: Request, tokens: tuple[int, ...], logprobs: tuple[Logprobs, ...],
        finish: FinishReason | None, stop_token: int | None,
    ) -> Event:  # fmt: skip
        first, request.announced = not request.announced, True
        if not first:
            return Event(request.request_id, tokens, logprobs, finish, stop_token)
        started = request.arrival_s if request.first_scheduled_s is None else request.first_scheduled_s
        return Event(
            request.request_id, tokens, logprobs, finish, stop_token, first=True,
            num_prompt_tokens=request.num_prompt_tokens, num_cached_tokens=request.num_cached,
            queue_s=started - request.arrival_s,
        )  # fmt: skip

    def _finish(self, request: Request, event: Event) -> None:
        self._leave(request)
        request.state = RequestState.FINISHED
        request.sink.push(event)
        self._on_finish(request)

    def _leave(self, request: Request) -> None:
        """Takes slot and blocks from a running request."""
        if request.slot is None:
            raise Internal(f"request {request.request_id} has no slot to give up")
        self._prefilling.pop(request.request_id, None)
        self._decoding.pop(request.request_id, None)
        self._released_slots.append(request.slot)
        self._free_slots.append(request.slot)
        request.slot = None
        self.kv.release(request)
