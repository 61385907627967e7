"""The steps that plans may ask for, as graphs: each prefill and decode bucket, without and with adapters."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from protos.steps import Prefill
from worker_svc.devices.attention import PagedInput, StepInput, tensors_of, with_tensors
from worker_svc.devices.base import Device
from worker_svc.execution.batch import Batch
from worker_svc.execution.stage import Model, Stage
from worker_svc.execution.token_selection import DecodeStep, captured_step, logits_and_best, plain_step
from worker_svc.graphs.graph_runner import GraphOptions, GraphRunner, GraphSignature
from worker_svc.lora.store import AdapterStore
from worker_svc.phases import Progress, one_by_one
from worker_svc.shapes import KvGroup, ShapeConfig


class StepGraphs:
    """The steps of one runner: built once, then run by signature."""

    graphs: GraphRunner
    """The graphs of the model's layers."""

    def __init__(
        self,
        model: Model,
        device: Device,
        groups: Sequence[KvGroup],
        shapes: ShapeConfig,
        *,
        batch: Batch,
        stage: Stage,
        options: GraphOptions,
        adapters: AdapterStore | None,
    ) -> None:
        """Makes nothing yet. The model's weights are loaded and its caches bound."""
        self._model = model
        self._device = device
        self._groups = groups
        self._shapes = shapes
        self._batch = batch
        self._stage = stage
        self._adapters = adapters
        self._layer_names = [[layer.name for layer in group.own_layers] for group in groups]
        self._captured_prefills: dict[GraphSignature, Callable[..., tuple[torch.Tensor, ...]]] = {}
        self._decode_steps: dict[GraphSignature, DecodeStep] = {}
        # Before the last stage of a pipeline, a step ends with hidden states.
        self._stage_steps: dict[GraphSignature, Callable[..., tuple[torch.Tensor, ...]]] = {}
        self._made: set[GraphSignature] = set()
        self.logits_and_best = logits_and_best(model.logits, device, compiled=options.level > 0)
        self.graphs = GraphRunner(
            model, device, options, logits=self.logits_and_best if stage.layout.is_last_stage else None
        )

    def signatures(self) -> list[GraphSignature]:
        """Returns every kind of step that plans may ask for."""
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

    def make_all(self, progress: Progress) -> None:
        """Makes the graph of every signature.

        Raises:
            ConfigurationRefused: if a graph cannot be made but is required.
        """
        for signature in one_by_one(self.signatures(), progress):
            self._make(signature)

    def warm_up(self, progress: Progress) -> None:
        """Runs every signature once, on padding only."""
        for signature in one_by_one(self.signatures(), progress):
            if signature.kind == "prefill":
                tokens, positions, inputs = self._batch.prefill_inputs(signature.query_len)
                selection = self._chunk_selection(signature)
                hidden = self._run_chunk(
                    signature, self._stage.padding(tokens), positions, inputs, *selection
                )
                if self._stage.layout.is_last_stage:
                    self.logits_and_best(hidden.to(self._device.torch_device)[:1])
            else:
                self._warm_up_decode(signature)

    def _warm_up_decode(self, signature: GraphSignature) -> None:
        rows = self._padding_rows(signature.batch)
        given = self._padding_states(signature.batch)
        if self._stage.layout.is_last_stage:
            self.decode_step(signature.batch, adapters=signature.adapters).forward(rows, *given)
        else:
            self.stage_step(signature.batch, adapters=signature.adapters)(rows, *given)

    def run_chunk(self, work: Prefill, first: torch.Tensor, positions: torch.Tensor,
                  inputs: Sequence[StepInput]) -> torch.Tensor:  # fmt: skip
        """Runs a chunk.

        Args:
            work: the chunk.
            first: token ids, or what the stage before computed.
            positions: int64 [chunk].
            inputs: of each KV group.

        Returns:
            Hidden states [chunk, hidden]; see `Model.forward`.
        """
        adapters = self._batch.has_adapters((work.slot,))
        signature = _prefill(self._batch.bucket_of(work), adapters=adapters)
        return self._run_chunk(signature, first, positions, inputs, *self._chunk_selection(signature, work))

    def _run_chunk(
        self,
        signature: GraphSignature,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        inputs: Sequence[StepInput],
        *selection: torch.Tensor,
    ) -> torch.Tensor:
        self._ensure_made(signature)
        captured = self._captured_prefills.get(signature)
        if captured is None:
            return self._forward(signature, tokens, positions, inputs, *selection)
        (hidden,) = captured(tokens, positions, *selection, *_tensors_of(inputs))
        return hidden

    def decode_step(self, bucket: int, *, adapters: bool) -> DecodeStep:
        """Returns a bucket's step on the last stage."""
        signature = _decode(bucket, adapters=adapters)
        self._ensure_made(signature)
        return self._decode_steps[signature]

    def stage_step(self, bucket: int, *, adapters: bool) -> Callable[..., tuple[torch.Tensor, ...]]:
        """Returns a bucket's step before the last stage: from rows, and hidden states, to hidden states."""
        signature = _decode(bucket, adapters=adapters)
        self._ensure_made(signature)
        return self._stage_steps[signature]

    def close(self) -> None:
        """Drops the captured steps, which would keep the cache's memory in use."""
        self._decode_steps.clear()
        self._stage_steps.clear()
        self._captured_prefills.clear()
        self._made.clear()

    def _ensure_made(self, signature: GraphSignature) -> None:
        """Makes a step that is missing, and counts it: once the worker serves, a request waits for it."""
        if signature not in self._made:
            self.graphs.count_late(signature)
            self._make(signature)

    def _make(self, signature: GraphSignature) -> None:
        """Makes a signature's graph on padding, and captures the step around it if the device captures."""
        if signature.kind == "prefill":
            tokens, positions, inputs = self._batch.prefill_inputs(signature.query_len)
            tokens = self._stage.padding(tokens)
            selection = self._chunk_selection(signature)
            self.graphs.build(signature, tokens, positions, self._plans(inputs), *selection)
            if self._device.captures and self.graphs.has(signature):
                self._captured_prefills[signature] = self._capture_prefill(
                    signature, tokens, positions, inputs, selection
                )
        else:
            rows = self._padding_rows(signature.batch)
            tokens, positions, inputs = self._batch.decode_inputs(rows)
            selection = self._row_selection(rows, adapters=signature.adapters)
            tokens = self._stage.padding(tokens)
            self.graphs.build(signature, tokens, positions, self._plans(inputs), *selection)
            if self._stage.layout.is_last_stage:
                self._decode_steps[signature] = self._decode_step_of(signature, rows)
            else:
                self._stage_steps[signature] = self._stage_step_of(signature, rows)
        self._made.add(signature)

    def _capture_prefill(
        self,
        signature: GraphSignature,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        inputs: Sequence[StepInput],
        selection: Sequence[torch.Tensor],
    ) -> Callable[..., tuple[torch.Tensor, ...]]:
        # The number of real tokens is also on the device; the captured step must not contain the host's
        # number.
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

        return self._device.capture(forward, [tokens, positions, *selection, *_tensors_of(inputs)])

    def _decode_step_of(self, signature: GraphSignature, padding: torch.Tensor) -> DecodeStep:
        def forward(rows: torch.Tensor, *given: torch.Tensor) -> tuple[torch.Tensor, ...]:
            hidden, positions = self._forward_rows(signature, rows, *given)
            logits, *best = self.logits_and_best(hidden)
            return logits, positions, *best

        if self._device.captures and self.graphs.has(signature):
            given = self._padding_states(signature.batch)
            return captured_step(self._device, self._batch, forward, padding, given)
        return plain_step(self._batch, forward)

    def _stage_step_of(
        self, signature: GraphSignature, padding: torch.Tensor
    ) -> Callable[..., tuple[torch.Tensor, ...]]:
        def forward(rows: torch.Tensor, *given: torch.Tensor) -> tuple[torch.Tensor]:
            states, _ = self._forward_rows(signature, rows, *given)
            return (states.to(self._device.torch_device),)

        if self._device.captures and self.graphs.has(signature):
            return self._device.capture(forward, [padding, *self._padding_states(signature.batch)])
        return forward

    def _forward_rows(
        self, signature: GraphSignature, rows: torch.Tensor, *given: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns hidden states and positions of a decode step's rows."""
        tokens, positions, inputs = self._batch.decode_inputs(rows)
        selection = self._row_selection(rows, adapters=signature.adapters)
        first = given[0] if given else tokens
        return self._forward(signature, first, positions, inputs, *selection), positions

    def _row_selection(self, rows: torch.Tensor, *, adapters: bool) -> tuple[torch.Tensor, ...]:
        """Returns what the step takes besides, if rows may have adapters."""
        if not adapters:
            return ()
        assert self._adapters is not None
        return (self._adapters.select(self._batch.adapters_of(rows)),)

    def _chunk_selection(
        self, signature: GraphSignature, work: Prefill | None = None
    ) -> tuple[torch.Tensor, ...]:
        """Returns the same for a chunk; without work, for padding."""
        if not signature.adapters:
            return ()
        assert self._adapters is not None
        return (self._adapters.select(self._batch.chunk_adapters(signature.query_len, work)),)

    def _padding_rows(self, bucket: int) -> torch.Tensor:
        return torch.full((bucket,), self._batch.padding_row, device=self._device.torch_device)

    def _padding_states(self, bucket: int) -> tuple[torch.Tensor, ...]:
        """Returns what a decode step of padding takes besides its rows."""
        if self._stage.layout.is_first_stage:
            return ()
        return (self._stage.padding(self._padding_rows(bucket)),)

    def _plans(self, inputs: Sequence[StepInput]) -> dict[str, Any]:
        """Returns the attention metadata of each layer."""
        return self._model.attention_plans(
            [
                (names, self._device.plan(group, self._shapes.block_size, step))
                for names, group, step in zip(self._layer_names, self._groups, inputs, strict=True)
            ]
        )

    def _forward(
        self,
        signature: GraphSignature,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        inputs: Sequence[StepInput],
        *selection: torch.Tensor,
    ) -> torch.Tensor:
        return self.graphs.run(signature, tokens, positions, self._plans(inputs), *selection)


def _prefill(bucket: int, *, adapters: bool) -> GraphSignature:
    return GraphSignature("prefill", 1, bucket, adapters)


def _decode(bucket: int, *, adapters: bool) -> GraphSignature:
    return GraphSignature("decode", bucket, 1, adapters)


def _tensors_of(inputs: Sequence[StepInput]) -> list[torch.Tensor]:
    return [tensor for step in inputs for tensor in tensors_of(step)]
