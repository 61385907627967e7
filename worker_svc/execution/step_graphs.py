"""The graphs of all steps: each prefill and decode bucket, without and with adapters."""

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
    """The steps of a runner: built once, then run by signature."""

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
        # `None` where the device captures nothing around the graph.
        self._chunks: dict[GraphSignature, Callable[..., tuple[torch.Tensor, ...]] | None] = {}
        self._decode_steps: dict[GraphSignature, DecodeStep] = {}
        self.logits_and_best = logits_and_best(model.logits, device, compiled=options.level > 0)
        self.graphs = GraphRunner(
            model, device, options, logits=self.logits_and_best if stage.layout.is_last_stage else None
        )

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
                first = self._stage.padding(tokens)
                hidden = self.run_chunk(None, first, positions, inputs, adapters=signature.adapters)
                if self._stage.layout.is_last_stage:
                    self.logits_and_best(hidden.to(self._device.torch_device)[:1])
            else:
                step = self.decode_step(signature.batch, adapters=signature.adapters)
                step.forward(*self._decode_padding(signature.batch))

    def run_chunk(
        self,
        work: Prefill | None,
        first: torch.Tensor,
        positions: torch.Tensor,
        inputs: Sequence[StepInput],
        *,
        adapters: bool,
    ) -> torch.Tensor:
        """Runs a chunk.

        Args:
            work: the chunk; `None` for padding.
            first: token ids, or the states computed by the stage before.
            positions: int64 [chunk].
            inputs: of each KV group.
            adapters: whether the request uses a LoRA adapter.

        Returns:
            Hidden states [chunk, hidden]; see `Model.forward`.
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

    def decode_step(self, bucket: int, *, adapters: bool) -> DecodeStep:
        """Returns the step of a bucket. Before the last stage of a pipeline, only its `forward` counts."""
        signature = _decode(bucket, adapters=adapters)
        if signature not in self._decode_steps:
            self._make_late(signature)
        return self._decode_steps[signature]

    def close(self) -> None:
        """Drops the captured steps, which would keep the cache's memory in use."""
        self._decode_steps.clear()
        self._chunks.clear()

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
        self.graphs.build(signature, first, positions, self._plans(inputs), *selection)
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
                return (hidden.to(self._device.torch_device),)
            logits, *best = self.logits_and_best(hidden)
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
