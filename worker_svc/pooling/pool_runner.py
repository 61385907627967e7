"""Runs a pooling model's plans: whole prompts at once, in a static shape, without a KV cache."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

from protos.errors import Internal
from protos.steps import Admission, Pool, PoolShape, SlotOutput, StepPlan
from worker_svc.devices.attention import RowsInput
from worker_svc.devices.base import Device
from worker_svc.phases import Progress
from worker_svc.pooling.pooler import normalize_rows, pool_rows
from worker_svc.shapes.geometry import PoolGeometry
from worker_svc.shapes.model_description import PoolingDescription


class PoolingModel(Protocol):
    """What the runner needs from a model; `vllm_adapter.model.VllmModel` implements it."""

    def row_plans(self, rows: RowsInput) -> dict[str, Any]:
        """Returns the attention metadata that `forward` takes for a step's rows."""
        ...

    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, plans: Mapping[str, Any]
    ) -> torch.Tensor:
        """Returns hidden states [tokens, hidden] for token ids [tokens]."""
        ...

    def project(self, pooled: torch.Tensor) -> torch.Tensor:
        """Returns embeddings [rows, size] for pooled hidden states, float32 [rows, hidden]."""
        ...


class PoolRunner:
    """A pooling model and the prompts in its slots. Not thread-safe: one thread runs all plans."""

    def __init__(
        self, model: PoolingModel, device: Device, description: PoolingDescription, geometry: PoolGeometry
    ) -> None:
        """Allocates nothing.

        Args:
            model: with its weights loaded.
            device: where the model runs.
            description: how the model pools.
            geometry: the static shapes.
        """
        self._model = model
        self._device = device
        self._description = description
        self._shapes = geometry.shapes
        self._longest = max(shape.prompt_len for shape in geometry.shapes)
        self._slots: dict[int, Admission] = {}

    @torch.inference_mode()
    def warm_up(self, progress: Progress) -> None:
        """Runs every shape once, on padding only."""
        for done, shape in enumerate(self._shapes):
            progress(done, len(self._shapes), f"pooling of {shape.batch} x {shape.prompt_len} tokens")
            self._embed([], shape)
        progress(len(self._shapes), len(self._shapes), "done")

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> list[SlotOutput]:
        """Runs one step. A request fails alone if its admission is refused or its result is not finite.

        Returns:
            One output for each refused admission, then one for each other slot of the work, in the work's
            order.

        Raises:
            Internal: if the plan contradicts earlier plans.
        """
        for slot in plan.release:
            self._slots.pop(slot, None)
        refused: dict[int, SlotOutput] = {}
        for request in plan.admit:
            if (error := self._admit(request)) is not None:
                refused[request.slot] = SlotOutput(request.slot, (), error=error)
        if plan.work is None:
            return list(refused.values())
        if not isinstance(plan.work, Pool):
            raise Internal("the plan generates tokens, but this is a pooling model")
        requests = self._requests_of(plan.work, refused)
        rows = self._embed(requests, plan.work.shape) if requests else []
        outputs = [_output(request.slot, row) for request, row in zip(requests, rows, strict=True)]
        return [*refused.values(), *outputs]

    def reset(self) -> None:
        """Frees every slot."""
        self._slots.clear()

    def _admit(self, request: Admission) -> Internal | None:
        """Puts a request into its slot, or returns why it cannot."""
        if request.slot in self._slots:
            return Internal(f"the plan admits a request to slot {request.slot}, which is taken")
        if not 1 <= len(request.token_ids) <= self._longest:
            return Internal(
                f"the plan admits {len(request.token_ids)} tokens to slot {request.slot};"
                f" 1 to {self._longest} fit"
            )
        self._slots[request.slot] = request
        return None

    def _requests_of(self, work: Pool, refused: Mapping[int, SlotOutput]) -> list[Admission]:
        """Returns the admitted requests of a step, checked against its shape."""
        shape = work.shape
        if shape not in self._shapes or len(work.slots) > shape.batch:
            raise Internal(
                f"the plan pools {len(work.slots)} slots in {shape.batch} x {shape.prompt_len} tokens"
            )
        if len(set(work.slots)) != len(work.slots):
            raise Internal("the plan names a slot twice")
        requests = []
        for slot in work.slots:
            if slot in refused:
                continue
            request = self._slots.get(slot)
            if request is None:
                raise Internal(f"the plan names slot {slot}, which is free")
            if len(request.token_ids) > shape.prompt_len:
                raise Internal(
                    f"slot {slot} has {len(request.token_ids)} tokens; a row holds {shape.prompt_len}"
                )
            requests.append(request)
        return requests

    def _embed(self, requests: Sequence[Admission], shape: PoolShape) -> list[list[float]]:
        """Returns the embeddings of requests that fit `shape`; the remaining rows are padding."""
        batch, row_len = shape.batch, shape.prompt_len
        tokens = torch.zeros((batch, row_len), dtype=torch.int64)
        lengths = torch.ones(batch, dtype=torch.int64)
        for row, request in enumerate(requests):
            lengths[row] = len(request.token_ids)
            tokens[row, : len(request.token_ids)] = torch.tensor(request.token_ids, dtype=torch.int64)
        device = self._device.torch_device
        lengths = lengths.to(device)
        positions = torch.arange(row_len, device=device).repeat(batch)
        plans = self._model.row_plans(RowsInput.of(lengths, row_len))
        hidden = self._model.forward(tokens.to(device).flatten(), positions, plans)
        pooled = pool_rows(hidden.view(batch, row_len, -1), lengths, self._description.method)
        raw = self._model.project(pooled).float()
        if not requests:
            return []
        default = self._description.normalize
        choices = [
            request.pooling.normalize
            if request.pooling and request.pooling.HasField("normalize")
            else default
            for request in requests
        ]
        normalize = torch.tensor(choices, device=device)[:, None]
        raw = raw[: len(requests)]
        rows: list[list[float]] = torch.where(normalize, normalize_rows(raw), raw).tolist()
        return rows


def _output(slot: int, row: Sequence[float]) -> SlotOutput:
    if not torch.isfinite(torch.tensor(row)).all():
        return SlotOutput(slot, (), error=Internal("the model's result for this request is not finite"))
    return SlotOutput(slot, (), pooled=row)
