"""Runs a generating model's plans: prepares inputs, executes the model, selects tokens."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

import torch

from protos.errors import Internal, TriptychError
from protos.steps import Admission, Decode, Pool, Prefill, SlotOutput, StepPlan, StepResult, without_slots
from worker_svc.devices.attention import PagedInput, StepInput, tensors_of, with_tensors
from worker_svc.devices.base import Device
from worker_svc.devices.upload import upload
from worker_svc.execution.batch import Batch
from worker_svc.execution.engine import Model, PlanRefused
from worker_svc.execution.kv_cache import KvCache
from worker_svc.execution.stage import Stage
from worker_svc.execution.token_selection import (
    DecodeStep,
    PromptLogprobs,
    TokenSelector,
    captured_step,
    logits_and_best,
    make_sampler,
    plain_step,
)
from worker_svc.grammars.constraints import StepConstraints
from worker_svc.grammars.spec import spec_of
from worker_svc.graphs.graph_runner import GraphOptions, GraphRunner, GraphSignature
from worker_svc.launched_step import LaunchedStep
from worker_svc.phases import Progress, one_by_one
from worker_svc.ranks.group import RankGroup
from worker_svc.sampling.logprobs import compute_logprobs
from worker_svc.sampling.state import SamplingVocabulary
from worker_svc.shapes.geometry import Geometry, KvGroup


class Runner:
    """A model, its KV cache and its persistent batch. Not thread-safe: one thread runs all plans."""

    cache: KvCache
    graphs: GraphRunner
    """The graphs that steps run as."""

    def __init__(
        self,
        model: Model,
        device: Device,
        groups: Sequence[KvGroup],
        geometry: Geometry,
        *,
        vocabulary: SamplingVocabulary,
        options: GraphOptions | None = None,
        constraints: StepConstraints | None = None,
        group: RankGroup | None = None,
    ) -> None:
        """Allocates the cache and the batch.

        Args:
            model: with its weights loaded.
            device: where the model runs.
            groups: the model's KV groups.
            geometry: with `num_blocks` set.
            vocabulary: the model's.
            options: how steps become graphs; `None` for the device's default level.
            constraints: matches outputs with grammars; `None` if the model does not support grammars.
            group: the replica's ranks; `None` for a replica of one.

        Raises:
            ConfigurationRefused: if the cache does not fit into memory.
        """
        self._model = model
        self._device = device
        self._groups = tuple(groups)
        self._geometry = geometry
        self._constraints = constraints
        self._layer_names = [[layer.name for layer in group.own_layers] for group in groups]
        self.cache = KvCache(device, groups, geometry.block_size, geometry.num_blocks)
        self._batch = Batch(geometry, groups, geometry.num_blocks, device.torch_device, vocabulary)
        if device.captures:
            self._fix_addresses()
        self._stage = Stage(
            model, self._batch, group, device.torch_device,
            most_tokens=max(geometry.chunk, geometry.decode_buckets[-1]),
        )  # fmt: skip
        self._selector = TokenSelector(self._batch, constraints)
        self._sample = make_sampler(self._batch)
        # Slots whose admission was refused, until the scheduler releases them.
        self._refused: set[int] = set()
        self._prompt_logprobs = PromptLogprobs(self._batch, geometry, model.logits)
        model.bind_caches(self.cache.by_layer())
        self._captured_prefill: Callable[..., tuple[torch.Tensor, ...]] | None = None
        self._last_slots: list[int] = []
        self._last_rows = torch.empty(0, dtype=torch.int64)
        self._decode_steps: dict[int, DecodeStep] = {}
        # Before the last stage of a pipeline, a step ends with hidden states.
        self._stage_steps: dict[int, Callable[..., tuple[torch.Tensor, ...]]] = {}
        self._made: set[GraphSignature] = set()
        options = options or GraphOptions(level=device.default_level)
        self._logits_and_best = logits_and_best(model.logits, device, compiled=options.level > 0)
        self.graphs = GraphRunner(
            model, device, options,
            logits=self._logits_and_best if self._stage.layout.is_last_stage else None,
        )  # fmt: skip

    def _fix_addresses(self) -> None:
        """Allocates what captured steps hold by its address, and what must not move afterwards."""
        self._batch.sampling.allocate()
        self._batch.sampling.workspace(self._geometry.decode_buckets[-1])

    def signatures(self) -> list[GraphSignature]:
        """Returns every kind of step that plans may ask for."""
        decode = [GraphSignature("decode", bucket, 1) for bucket in self._geometry.decode_buckets]
        return [GraphSignature("prefill", 1, self._geometry.chunk), *decode]

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
                tokens, positions, inputs = self._batch.prefill_inputs(None)
                hidden = self._prefill_hidden(self._stage.padding(tokens), positions, inputs)
                if self._stage.layout.is_last_stage:
                    self._logits_and_best(hidden.to(self._device.torch_device)[:1])
            else:
                self._warm_up_decode(signature.batch)

    def _warm_up_decode(self, bucket: int) -> None:
        rows = self._padding_rows(bucket)
        given = self._padding_states(bucket)
        self._ensure_made(GraphSignature("decode", bucket, 1))
        if self._stage.layout.is_last_stage:
            self._decode_steps[bucket].forward(rows, *given)
        else:
            self._stage_steps[bucket](rows, *given)

    def execute(self, plan: StepPlan) -> list[SlotOutput]:
        """Launches one step and waits for it; see `launch`.

        Returns one output for each refused admission, then one for each slot that produced a token, in order.
        """
        return self.launch(plan).wait(plan.work)

    @torch.inference_mode()
    def launch(self, plan: StepPlan, *, leased: bool = False) -> LaunchedStep:
        """Applies a plan and hands its step to the device.

        A request whose admission is refused fails alone. The rest of the plan, and plans that were sent
        before the scheduler knew, run without its slot.

        Args:
            plan: the plan.
            leased: whether this is a further step of a lease, which was checked with its first step.

        Raises:
            PlanRefused: if the plan contradicts earlier plans. The state of the slots that it names is then
                undefined.
        """
        if leased:
            assert isinstance(plan.work, Decode)
            return self._decode(plan.work)
        try:
            work, refused = self._apply_plan(plan)
        except Internal as error:
            raise PlanRefused(error.message) from error
        if work is None:
            return LaunchedStep(refused, has_work=False)
        launched = self._prefill(work) if isinstance(work, Prefill) else self._decode(work)
        if not self._stage.layout.is_last_stage:
            return launched
        whole = work is plan.work and not refused
        return launched if whole else LaunchedStep([*refused, *launched.wait(work)])

    def _apply_plan(self, plan: StepPlan) -> tuple[Prefill | Decode | None, list[SlotOutput]]:
        """Applies all of a plan but its work. Returns the work that is left, and the refused admissions."""
        self._release_all(plan.release)
        self.cache.copy(plan.copies)
        refused: dict[int, SlotOutput] = {}
        for request in plan.admit:
            self._refused.discard(request.slot)
            try:
                self._admit(request)
            except TriptychError as error:
                refused[request.slot] = SlotOutput(request.slot, (), error=error)
                # A request that has the slot already goes on with the next plan.
                if self._batch.is_free(request.slot):
                    self._refused.add(request.slot)
        self._batch.copy_admitted()
        for growth in plan.grow:
            if growth.slot not in self._refused and growth.slot not in refused:
                self._batch.grow(growth)
                self.cache.clear(growth.group_id, growth.block_ids)
        if isinstance(plan.work, Pool):
            raise Internal("the plan pools prompts, but this model generates tokens")
        work = without_slots(plan.work, self._refused.union(refused))
        if work is not None:
            self._batch.check(work)
        return work, list(refused.values())

    @torch.inference_mode()
    def apply(self, result: StepResult) -> None:
        """Applies the result of the oldest pending step, which the last stage reported."""
        self._stage.apply(result)

    def reset(self) -> None:
        """Frees every slot. Blocks keep their contents: the scheduler may have cached them as prefixes."""
        for slot in range(self._geometry.max_num_seqs):
            self._release(slot)

    def close(self) -> None:
        """Drops the captured steps, which reference the runner and would keep the cache's memory in use."""
        self._decode_steps.clear()
        self._stage_steps.clear()
        self._made.clear()
        self._captured_prefill = None

    def _release_all(self, slots: Sequence[int]) -> None:
        """Frees slots: all of them even if the device fails, because later plans give them away."""
        failure: Exception | None = None
        for slot in slots:
            try:
                self._release(slot)
            except Exception as error:  # noqa: BLE001 - it fails the step, once all slots are free
                failure = failure or error
        if failure is not None:
            raise failure

    def _release(self, slot: int) -> None:
        self._refused.discard(slot)
        self._prompt_logprobs.release(slot)
        if self._constraints is not None:
            self._constraints.release(slot)
        self._stage.release(slot)
        self._batch.release(slot)

    def _admit(self, request: Admission) -> None:
        self._batch.admit(request)
        try:
            self._prompt_logprobs.admit(request)
            if request.sampling.HasField("structured_output"):
                if self._constraints is None:
                    raise Internal(
                        "the plan admits a request with a grammar, but this worker has no grammar compiler"
                    )
                output = request.token_ids[request.prompt_len :]
                self._constraints.admit(request.slot, spec_of(request.sampling.structured_output), output)
            for group_id, block_ids in request.blocks.items():
                tokens = self._groups[group_id].tokens_per_block(self._geometry.block_size)
                hit = math.ceil(request.num_computed_tokens / tokens)
                self.cache.clear(group_id, block_ids[hit:])
        except BaseException:
            self._release(request.slot)
            raise

    def _prefill(self, work: Prefill) -> LaunchedStep:
        tokens, positions, inputs = self._batch.prefill_inputs(work)
        (first,) = self._stage.receive(self._geometry.chunk) or (tokens,)
        hidden = self._prefill_hidden(first, positions, inputs)
        if not self._stage.layout.is_last_stage:
            self._batch.advance_prefill(work, None)
            self._stage.pass_on(work, hidden.to(self._device.torch_device))
            return LaunchedStep()
        prompt_logprobs = self._prompt_logprobs.compute(work, hidden)
        if not work.sample:
            self._batch.advance_prefill(work, None)
            if prompt_logprobs:
                return LaunchedStep([SlotOutput(work.slot, (), prompt_logprobs=prompt_logprobs)])
            return self._read_later(positions[:0])
        last = slice(work.num_tokens - 1, work.num_tokens)
        logits, *best = self._logits_and_best(hidden.to(self._device.torch_device)[last])
        rows = upload([work.slot], self._device.torch_device)
        selection = self._selector.select([work.slot], rows, logits, positions[last], self._sample, *best)
        self._batch.advance_prefill(work, selection.tokens)
        if selection.is_plain and not prompt_logprobs:
            return self._read_later(selection.tokens[:1])
        (output,) = self._selector.outputs([work.slot], selection, compute_logprobs)
        return LaunchedStep([replace(output, prompt_logprobs=prompt_logprobs) if prompt_logprobs else output])

    def _read_later(self, tokens: torch.Tensor) -> LaunchedStep:
        """Starts to copy tokens to the host; reading none of them waits for the step, too."""
        read = self._device.start_reading(tokens)
        return LaunchedStep(
            read_tokens=lambda: cast("list[int]", read().tolist()), runs_ahead=self._device.runs_ahead
        )

    def _prefill_hidden(
        self, tokens: torch.Tensor, positions: torch.Tensor, inputs: Sequence[StepInput]
    ) -> torch.Tensor:
        """Returns a chunk's hidden states [chunk, hidden]; see `Model.forward`."""
        signature = GraphSignature("prefill", 1, self._geometry.chunk)
        self._ensure_made(signature)
        if self._captured_prefill is None:
            return self._forward(signature, tokens, positions, inputs)
        (hidden,) = self._captured_prefill(tokens, positions, *_tensors_of(inputs))
        return hidden

    def _decode(self, work: Decode) -> LaunchedStep:
        rows = self._rows_of(work)
        self._ensure_made(GraphSignature("decode", work.bucket, 1))
        given = self._stage.receive(work.bucket)
        if not self._stage.layout.is_last_stage:
            (states,) = self._stage_steps[work.bucket](rows, *given)
            self._stage.pass_on(work, states)
            return LaunchedStep()
        step = self._decode_steps[work.bucket]
        logits, positions, *tokens = step.forward(rows, *given)
        argmax = tokens[0] if tokens else None
        selection = self._selector.select(work.slots, rows, logits, positions, step.sample, argmax)
        step.advance(rows, selection.tokens)
        self._batch.advance_decode(work.slots)
        if selection.is_plain:
            return self._read_later(selection.tokens[: len(work.slots)])
        return LaunchedStep(list(self._selector.outputs(work.slots, selection, step.compute_logprobs)))

    def _rows_of(self, work: Decode) -> torch.Tensor:
        """Returns the slots of a step's rows, int64 [bucket]. Steps with the same slots share a tensor."""
        padding = [self._batch.padding_row] * (work.bucket - len(work.slots))
        slots = [*work.slots, *padding]
        if slots != self._last_slots:
            self._last_slots = slots
            self._last_rows = upload(slots, self._device.torch_device)
        return self._last_rows

    def _padding_states(self, bucket: int) -> tuple[torch.Tensor, ...]:
        """Returns what a decode step of padding takes besides its rows."""
        if self._stage.layout.is_first_stage:
            return ()
        return (self._stage.padding(self._padding_rows(bucket)),)

    def _ensure_made(self, signature: GraphSignature) -> None:
        """Makes a step that is missing, and counts it: once the worker serves, a request waits for it."""
        if signature not in self._made:
            self.graphs.count_late(signature)
            self._make(signature)

    def _make(self, signature: GraphSignature) -> None:
        """Makes a signature's graph on padding, and captures the step around it if the device captures."""
        if signature.kind == "prefill":
            tokens, positions, inputs = self._batch.prefill_inputs(None)
            tokens = self._stage.padding(tokens)
            self.graphs.build(signature, tokens, positions, self._plans(inputs))
            if self._device.captures and self.graphs.has(signature):
                self._captured_prefill = self._capture_prefill(signature, tokens, positions, inputs)
        else:
            rows = self._padding_rows(signature.batch)
            tokens, positions, inputs = self._batch.decode_inputs(rows)
            self.graphs.build(signature, self._stage.padding(tokens), positions, self._plans(inputs))
            if self._stage.layout.is_last_stage:
                self._decode_steps[signature.batch] = self._decode_step_of(signature, rows)
            else:
                self._stage_steps[signature.batch] = self._stage_step_of(signature, rows)
        self._made.add(signature)

    def _capture_prefill(
        self,
        signature: GraphSignature,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        inputs: Sequence[StepInput],
    ) -> Callable[..., tuple[torch.Tensor, ...]]:
        # The number of real tokens is also on the device; the captured step must not contain the host's
        # number.
        full = [
            replace(step, num_tokens=self._geometry.chunk) if isinstance(step, PagedInput) else step
            for step in inputs
        ]

        def forward(
            tokens: torch.Tensor, positions: torch.Tensor, *rest: torch.Tensor
        ) -> tuple[torch.Tensor]:
            given = iter(rest)
            steps = [with_tensors(step, given) for step in full]
            return (self._forward(signature, tokens, positions, steps),)

        return self._device.capture(forward, [tokens, positions, *_tensors_of(inputs)])

    def _decode_step_of(self, signature: GraphSignature, padding: torch.Tensor) -> DecodeStep:
        def forward(rows: torch.Tensor, *given: torch.Tensor) -> tuple[torch.Tensor, ...]:
            tokens, positions, inputs = self._batch.decode_inputs(rows)
            hidden = self._forward(signature, given[0] if given else tokens, positions, inputs)
            logits, *best = self._logits_and_best(hidden)
            return logits, positions, *best

        if self._device.captures and self.graphs.has(signature):
            given = self._padding_states(signature.batch)
            return captured_step(self._device, self._batch, forward, padding, given)
        return plain_step(self._batch, forward)

    def _stage_step_of(
        self, signature: GraphSignature, padding: torch.Tensor
    ) -> Callable[..., tuple[torch.Tensor, ...]]:
        """Returns a decode step before the last stage: from rows, and hidden states, to hidden states."""

        def forward(rows: torch.Tensor, *given: torch.Tensor) -> tuple[torch.Tensor]:
            tokens, positions, inputs = self._batch.decode_inputs(rows)
            states = self._forward(signature, given[0] if given else tokens, positions, inputs)
            return (states.to(self._device.torch_device),)

        if self._device.captures and self.graphs.has(signature):
            return self._device.capture(forward, [padding, *self._padding_states(signature.batch)])
        return forward

    def _padding_rows(self, bucket: int) -> torch.Tensor:
        return torch.full((bucket,), self._batch.padding_row, device=self._device.torch_device)

    def _plans(self, inputs: Sequence[StepInput]) -> dict[str, Any]:
        """Returns the attention metadata of each layer."""
        return self._model.attention_plans(
            [
                (names, self._device.plan(group, self._geometry.block_size, step))
                for names, group, step in zip(self._layer_names, self._groups, inputs, strict=True)
            ]
        )

    def _forward(
        self,
        signature: GraphSignature,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        inputs: Sequence[StepInput],
    ) -> torch.Tensor:
        return self.graphs.run(signature, tokens, positions, self._plans(inputs))


def _tensors_of(inputs: Sequence[StepInput]) -> list[torch.Tensor]:
    return [tensor for step in inputs for tensor in tensors_of(step)]
