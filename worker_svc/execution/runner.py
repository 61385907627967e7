"""Runs a generating model's plans: applies a plan to the batch, runs its graph, selects tokens.

The steps are made once, as graphs of each prefill and decode bucket, without and with adapters, and then run
by signature.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

import torch

from protos.errors import Internal, TriptychError
from protos.steps import Admission, Decode, Prefill, SlotOutput, StepPlan, StepResult, without_slots
from worker_svc.devices.attention import PagedInput, StepInput, tensors_of, with_tensors
from worker_svc.devices.base import Device, upload
from worker_svc.devices.lora_stack import NO_ADAPTER
from worker_svc.execution.batch import Batch
from worker_svc.execution.kv_cache import KvCache
from worker_svc.execution.lockstep import PlanRefused
from worker_svc.execution.stage import Model, Stage
from worker_svc.execution.token_selection import (
    DecodeStep,
    PromptLogprobs,
    TokenSelector,
    captured_step,
    logits_and_best,
    make_sampler,
    plain_step,
)  # fmt: skip
from worker_svc.grammars.constraints import StepConstraints
from worker_svc.grammars.spec import spec_of
from worker_svc.graphs.graph_runner import GraphOptions, GraphRunner, GraphSignature
from worker_svc.lora.store import AdapterStore
from worker_svc.pending_step import NOT_FINITE, PendingStep
from worker_svc.phases import Progress, one_by_one
from worker_svc.ranks.group import RankGroup
from worker_svc.sampling.sampler import compute_logprobs
from worker_svc.sampling.state import SamplingVocabulary
from worker_svc.shapes import KvGroup, ShapeConfig


class Runner:
    """A model, its KV cache and its persistent batch. Not thread-safe: a single thread runs all plans."""

    cache: KvCache
    graphs: GraphRunner
    """The graphs of the model's layers."""

    def __init__(
        self,
        model: Model,
        device: Device,
        groups: Sequence[KvGroup],
        shapes: ShapeConfig,
        *,
        vocabulary: SamplingVocabulary,
        options: GraphOptions | None = None,
        constraints: StepConstraints | None = None,
        group: RankGroup | None = None,
        adapters: AdapterStore | None = None,
    ) -> None:
        """Allocates the cache and the batch. The model's weights are loaded, the shapes have `num_blocks`.

        Without options, steps become graphs at the device's default level.

        Raises:
            ConfigurationRefused: if the cache does not fit into memory.
        """
        self._model = model
        self._device = device
        self._groups = tuple(groups)
        self._shapes = shapes
        self._constraints = constraints
        self.cache = KvCache(device, groups, shapes.block_size, shapes.num_blocks)
        self._batch = Batch(shapes, groups, shapes.num_blocks, device.torch_device, vocabulary)
        if device.captures:
            # Captured steps hold these by their addresses.
            self._batch.sampling.allocate()
            self._batch.sampling.thinking.allocate()
            self._batch.sampling.workspace(shapes.decode_buckets[-1])
        self._stage = Stage(
            model, self._batch, group, device.torch_device, states_device=device.states_device,
            most_tokens=max(shapes.chunk, shapes.decode_buckets[-1]),
        )  # fmt: skip
        self._sample = make_sampler(self._batch)
        self._prompt_logprobs = PromptLogprobs(self._batch, shapes, model.logits)
        model.bind_caches(self.cache.by_layer())
        self._last_slots: list[int] = []
        self._last_rows = torch.empty(0, dtype=torch.int64)
        self._adapters = adapters
        self._layer_names = [[layer.name for layer in group.own_layers] for group in groups]
        # `None` where the device captures nothing around the graph.
        self._chunks: dict[GraphSignature, Callable[..., tuple[torch.Tensor, ...]] | None] = {}
        self._decode_steps: dict[GraphSignature, DecodeStep] = {}
        options = options or GraphOptions(level=device.default_level)
        self._logits_and_best = logits_and_best(model.logits, device, compiled=options.level > 0)
        self._selector = TokenSelector(self._batch, constraints, device.compile_draw())
        logits = self._logits_and_best if self._stage.layout.is_last_stage else None
        self.graphs = GraphRunner(model, device, options, logits=logits)

    def signatures(self) -> list[GraphSignature]:
        """Returns every kind of step in plans."""
        with_and_without = (False,) if self._adapters is None else (False, True)
        return [
            signature
            for adapters in with_and_without
            for signature in (
                # The largest first: the others reuse its memory where captured steps share a pool.
                *(_prefill(bucket, adapters=adapters) for bucket in reversed(self._shapes.chunk_sizes)),
                *(_decode(bucket, adapters=adapters) for bucket in self._shapes.decode_buckets),
            )
        ]

    @property
    def is_exact(self) -> bool:
        """Whether every kind of step gives a token the same bits; False while graphs are missing."""
        return all(self.graphs.is_exact(signature) for signature in self.signatures())

    @torch.inference_mode()
    def make_graphs(self, progress: Progress) -> None:
        """Makes the graph of every signature.

        Raises:
            ConfigurationRefused: if a graph cannot be made but is required.
        """
        for signature in one_by_one(self.signatures(), progress):
            self._make(signature)

    @torch.inference_mode()
    def warm_up(self, progress: Progress) -> None:
        """Runs every signature once, on padding only."""
        for signature in one_by_one(self.signatures(), progress):
            if signature.kind == "prefill":
                tokens, positions, inputs = self._batch.prefill_inputs(signature.query_len)
                first = self._stage.padding(tokens)
                hidden = self._run_chunk(None, first, positions, inputs, adapters=signature.adapters)
                if self._stage.layout.is_last_stage:
                    logits, *_ = self._logits_and_best(hidden.to(self._device.torch_device)[:1])
                    self._selector.warm_up(logits)
            else:
                step = self._decode_step(signature.batch, adapters=signature.adapters)
                results = step.forward(*self._decode_padding(signature.batch))
                if self._stage.layout.is_last_stage:
                    self._selector.warm_up(results[0])

    def execute(self, plan: StepPlan) -> list[SlotOutput]:
        """Launches a step and waits for its outputs; see `PendingStep.wait`."""
        return self.launch(plan).wait()

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> PendingStep:
        """Frees slots, copies blocks, admits requests, grows tables, and hands the first step to the device.

        Skips the slots of refused admissions, and in a decode step slots with several tokens to compute.

        Raises:
            PlanRefused: if the plan contradicts earlier plans. Its slots are in an undefined state then.
        """
        try:
            work, refused = self._apply_plan(plan)
        except Internal as error:
            raise PlanRefused(error.message) from error
        if work is None:
            return PendingStep(refused=refused)
        launched = self._prefill(work) if isinstance(work, Prefill) else self._decode(work)
        return replace(launched, work=work, refused=refused)

    def _apply_plan(self, plan: StepPlan) -> tuple[Prefill | Decode | None, list[SlotOutput]]:
        """Applies a plan except for its work. Returns the runnable work and the refused admissions."""
        self._release_all(plan.release)
        self.cache.copy(plan.copies)
        refused: dict[int, SlotOutput] = {}
        for request in plan.admit:
            try:
                self._admit(request)
            except TriptychError as error:
                refused[request.slot] = SlotOutput(request.slot, (), error=error)
        self._batch.copy_admitted()
        for growth in plan.grow:
            if growth.slot not in refused:
                self._batch.grow(growth)
                self.cache.clear(growth.group_id, growth.block_ids)
        work = without_slots(plan.work, refused)
        return None if work is None else self._batch.ready(work), list(refused.values())

    @torch.inference_mode()
    def apply(self, result: StepResult) -> None:
        """Applies the last stage's result of the oldest pending step."""
        self._stage.apply(result)

    def reset(self) -> None:
        """Frees every slot. Blocks keep their contents: the scheduler may have cached them as prefixes."""
        for slot in range(self._shapes.max_num_seqs):
            self._release(slot)
        if self._adapters is not None:
            self._adapters.forget_slots()

    def close(self) -> None:
        """Drops the captured steps: they reference the runner and keep the cache's memory in use."""
        self._decode_steps.clear()
        self._chunks.clear()

    def _release_all(self, slots: Sequence[int]) -> None:
        """Frees slots, all of them even if the device fails, because later plans reuse them."""
        failure: Exception | None = None
        for slot in slots:
            try:
                self._release(slot)
            except Exception as error:  # noqa: BLE001 - it fails the step, once all slots are free
                failure = failure or error
        if failure is not None:
            raise failure

    def _release(self, slot: int) -> None:
        self._prompt_logprobs.release(slot)
        if self._constraints is not None:
            self._constraints.release(slot)
        self._stage.release(slot)
        if self._adapters is not None:
            self._adapters.release(slot)
        self._batch.release(slot)

    def _admit(self, request: Admission) -> None:
        adapters = self._adapters
        if request.adapter_id and adapters is None:
            raise Internal(
                "the plan admits a request with an adapter, but this worker was started without --enable-lora"
            )
        adapter_slot = adapters.place(request.adapter_id) if adapters and request.adapter_id else NO_ADAPTER
        self._batch.admit(request, adapter_slot)
        try:
            if adapters and request.adapter_id:
                adapters.use(request.slot, request.adapter_id)
            self._prompt_logprobs.admit(request)
            if request.sampling.HasField("structured_output"):
                if self._constraints is None:
                    raise Internal(
                        "the plan admits a request with a grammar, but this worker has no grammar compiler"
                    )
                output = request.token_ids[request.prompt_len :]
                self._constraints.admit(request.slot, spec_of(request.sampling.structured_output), output)
            for group_id, block_ids in request.blocks.items():
                tokens = self._groups[group_id].tokens_per_block(self._shapes.block_size)
                hit = math.ceil(request.num_computed_tokens / tokens)
                self.cache.clear(group_id, block_ids[hit:])
        except BaseException:
            self._release(request.slot)
            raise

    def _prefill(self, work: Prefill) -> PendingStep:
        bucket = self._batch.bucket_of(work)
        tokens, positions, inputs = self._batch.prefill_inputs(bucket, work)
        (first,) = self._stage.receive(bucket) or (tokens,)
        adapters = self._uses_adapters((work.slot,))
        hidden = self._run_chunk(work, first, positions, inputs, adapters=adapters)
        if not self._stage.layout.is_last_stage:
            self._batch.advance_prefill(work, None)
            self._stage.pass_on(work, hidden)
            return PendingStep()
        prompt_logprobs = self._prompt_logprobs.compute(work, hidden)
        # Without access to a device's states, only its logits are checked.
        is_here = hidden.device == self._device.torch_device
        finite = hidden[: work.num_tokens].isfinite().all() if is_here else torch.tensor(True)
        if not work.sample:
            self._batch.advance_prefill(work, None)
            if prompt_logprobs and bool(finite):
                return PendingStep(outputs=[SlotOutput(work.slot, (), prompt_logprobs=prompt_logprobs)])
            return self._read_later(torch.where(finite, 0, NOT_FINITE)[None])
        last = slice(work.num_tokens - 1, work.num_tokens)
        logits, *best = self._logits_and_best(hidden.to(self._device.torch_device)[last])
        if is_here:
            logits = logits.where(finite, torch.nan)
        rows = upload([work.slot], self._device.torch_device)
        selection = self._selector.select(
            [work.slot],
            rows,
            logits,
            positions[last],
            self._sample,
            self._batch.sampling.thinking.advance,
            best,
        )
        self._batch.advance_prefill(work, selection.tokens)
        if selection.is_plain and not prompt_logprobs:
            return self._read_later(selection.reported[:1])
        (output,) = self._selector.outputs([work.slot], selection, compute_logprobs)
        return PendingStep(outputs=[replace(output, prompt_logprobs=prompt_logprobs)])

    def _read_later(self, tokens: torch.Tensor) -> PendingStep:
        """Starts to copy tokens to the host."""
        read = self._device.start_reading(tokens)
        return PendingStep(
            read_tokens=lambda: cast("list[int]", read().tolist()), runs_ahead=self._device.runs_ahead
        )

    def _decode(self, work: Decode) -> PendingStep:
        # All ranks order rows alike, as they know the same lengths.
        slots = self._batch.longest_first(work.slots) if self._device.sorts_rows else work.slots
        rows = self._rows_of(slots, work.bucket)
        given = self._stage.receive(work.bucket)
        step = self._decode_step(work.bucket, adapters=self._uses_adapters(work.slots))
        if not self._stage.layout.is_last_stage:
            (states,) = step.forward(rows, *given)
            self._stage.pass_on(work, states)
            return PendingStep()
        logits, positions, *best = step.forward(rows, *given)
        selection = self._selector.select(
            slots, rows, logits, positions, step.sample, step.end_thoughts, best
        )
        step.advance(rows, selection.tokens)
        self._batch.advance_decode(work.slots)
        places = {slot: place for place, slot in enumerate(slots)} if slots is not work.slots else None
        if selection.is_plain:
            reported = selection.reported[: len(slots)]
            return self._read_later(reported if places is None else reported[[places[s] for s in work.slots]])
        outputs = list(self._selector.outputs(slots, selection, step.compute_logprobs))
        if places is not None:
            outputs = [outputs[places[slot]] for slot in work.slots]
        return PendingStep(outputs=outputs)

    def _uses_adapters(self, slots: Sequence[int]) -> bool:
        return self._adapters is not None and self._batch.has_adapters(slots)

    def _rows_of(self, slots: Sequence[int], bucket: int) -> torch.Tensor:
        """Returns the slots of a step's rows, int64 [bucket]; steps with the same slots share a tensor."""
        padding = [self._batch.padding_row] * (bucket - len(slots))
        slots = [*slots, *padding]
        if slots != self._last_slots:
            self._last_slots = slots
            self._last_rows = upload(slots, self._device.torch_device)
        return self._last_rows

    def _run_chunk(
        self,
        work: Prefill | None,
        first: torch.Tensor,
        positions: torch.Tensor,
        inputs: Sequence[StepInput],
        *,
        adapters: bool,
    ) -> torch.Tensor:
        """Returns a chunk's hidden states [chunk, hidden]; without work, those of padding.

        `first` are token ids, or the states computed by the stage before.
        """
        signature = _prefill(positions.shape[0], adapters=adapters)
        if signature not in self._chunks:
            self._make_late(signature)
        selection = self._chunk_selection(signature, work)
        captured = self._chunks[signature]
        if captured is None:
            return self._forward(signature, first, positions, inputs, *selection)
        (hidden,) = captured(first, positions, *selection, *_tensors_of(inputs))
        return hidden

    def _decode_step(self, bucket: int, *, adapters: bool) -> DecodeStep:
        """Returns the step of a bucket. Before the last stage of a pipeline, only its `forward` counts."""
        signature = _decode(bucket, adapters=adapters)
        if signature not in self._decode_steps:
            self._make_late(signature)
        return self._decode_steps[signature]

    def _make_late(self, signature: GraphSignature) -> None:
        """Makes and counts a missing step: once the worker serves, a request waits for it."""
        self.graphs.count_late(signature)
        self._make(signature)

    def _make(self, signature: GraphSignature) -> None:
        """Makes a signature's graph on padding, and captures the step around it if the device captures."""
        if signature.kind == "prefill":
            tokens, positions, inputs = self._batch.prefill_inputs(signature.query_len)
            selection = self._chunk_selection(signature, None)
        else:
            rows, *_ = self._decode_padding(signature.batch)
            tokens, positions, inputs = self._batch.decode_inputs(rows)
            selection = self._row_selection(signature, rows)
        first = self._stage.padding(tokens)
        self.graphs.build(signature, first, positions, self._plans(signature, inputs), *selection)
        is_captured = self._device.captures and self.graphs.has(signature)
        if signature.kind == "prefill":
            self._chunks[signature] = (
                self._capture_chunk(signature, first, positions, inputs, selection) if is_captured else None
            )
        else:
            self._decode_steps[signature] = self._decode_step_of(signature, is_captured=is_captured)

    def _capture_chunk(
        self,
        signature: GraphSignature,
        first: torch.Tensor,
        positions: torch.Tensor,
        inputs: Sequence[StepInput],
        selection: Sequence[torch.Tensor],
    ) -> Callable[..., tuple[torch.Tensor, ...]]:
        # The device also knows the number of real tokens; the host's must not be part of the captured step.
        full = [
            replace(step, num_tokens=signature.query_len) if isinstance(step, PagedInput) else step
            for step in inputs
        ]

        def forward(
            tokens: torch.Tensor, positions: torch.Tensor, *rest: torch.Tensor
        ) -> tuple[torch.Tensor]:
            selected, given = rest[: len(selection)], iter(rest[len(selection) :])
            steps = [with_tensors(step, given) for step in full]
            return (self._forward(signature, tokens, positions, steps, *selected),)

        return self._device.capture(forward, [first, positions, *selection, *_tensors_of(inputs)])

    def _decode_step_of(self, signature: GraphSignature, *, is_captured: bool) -> DecodeStep:
        is_last = self._stage.layout.is_last_stage

        def forward(rows: torch.Tensor, *given: torch.Tensor) -> tuple[torch.Tensor, ...]:
            tokens, positions, inputs = self._batch.decode_inputs(rows)
            selection = self._row_selection(signature, rows)
            first = given[0] if given else tokens
            hidden = self._forward(signature, first, positions, inputs, *selection)
            if not is_last:
                return (hidden,)
            logits, *best = self._logits_and_best(hidden)
            return logits, positions, *best

        padding = self._decode_padding(signature.batch)
        if not is_captured:
            return plain_step(self._batch, forward)
        if is_last:
            return captured_step(self._device, self._batch, forward, padding)
        return plain_step(self._batch, self._device.capture(forward, padding))

    def _row_selection(self, signature: GraphSignature, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Returns the adapters' input of a decode step, if its rows may have adapters."""
        if not signature.adapters:
            return ()
        assert self._adapters is not None
        return (self._adapters.select(self._batch.adapters_of(rows)),)

    def _chunk_selection(self, signature: GraphSignature, work: Prefill | None) -> tuple[torch.Tensor, ...]:
        """Returns the same for a chunk; without work, for padding."""
        if not signature.adapters:
            return ()
        assert self._adapters is not None
        return (self._adapters.select(self._batch.chunk_adapters(signature.query_len, work)),)

    def _decode_padding(self, bucket: int) -> list[torch.Tensor]:
        """Returns the rows of a decode step of padding, and the hidden states after the first stage."""
        rows = torch.full((bucket,), self._batch.padding_row, device=self._device.torch_device)
        return [rows] if self._stage.layout.is_first_stage else [rows, self._stage.padding(rows)]

    def _plans(self, signature: GraphSignature, inputs: Sequence[StepInput]) -> dict[str, Any]:
        """Returns the attention metadata of each layer, unless the graph reads the device's own."""
        plans = [
            (names, self._device.plan(group, self._shapes.block_size, step))
            for names, group, step in zip(self._layer_names, self._groups, inputs, strict=True)
        ]
        return self._model.attention_plans(plans) if self.graphs.takes_plans(signature) else {}

    def _forward(
        self,
        signature: GraphSignature,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        inputs: Sequence[StepInput],
        *selection: torch.Tensor,
    ) -> torch.Tensor:
        return self.graphs.run(signature, tokens, positions, self._plans(signature, inputs), *selection)


def _prefill(bucket: int, *, adapters: bool) -> GraphSignature:
    return GraphSignature("prefill", 1, bucket, adapters)


def _decode(bucket: int, *, adapters: bool) -> GraphSignature:
    return GraphSignature("decode", bucket, 1, adapters)


def _tensors_of(inputs: Sequence[StepInput]) -> list[torch.Tensor]:
    return [tensor for step in inputs for tensor in tensors_of(step)]
