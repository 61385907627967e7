"""Runs plans of a pooling model: all tokens of some requests at once, in a static shape, without a KV cache."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch

from protos.errors import Internal
from worker_svc.devices.base import Device, RowsInput
from worker_svc.execution.pooler import PoolingDescription, pool_rows, to_length_one
from worker_svc.plans.geometry import PoolGeometry, PoolShape
from worker_svc.plans.step_plan import Admission, Output, Plan, PoolWork


class PoolingModel(Protocol):
    """What the runner asks of a model; ``vllm_adapter.engine.VllmModel`` is one."""

    def row_plans(self, rows: RowsInput) -> dict[str, Any]:
        """Makes of a step's rows what :meth:`forward` wants."""
        ...

    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, plans: Mapping[str, Any]
    ) -> torch.Tensor:
        """Hidden states [tokens, hidden] of token ids [tokens]."""
        ...

    def project(self, pooled: torch.Tensor) -> torch.Tensor:
        """Embeddings [rows, size] of pooled hidden states, float32 [rows, hidden]."""
        ...


class PoolRunner:
    """One pooling model and the prompts of its slots. Not thread-safe: one thread runs all plans."""

    def __init__(
        self, model: PoolingModel, device: Device, description: PoolingDescription, geometry: PoolGeometry
    ) -> None:
        """Allocates nothing.

        Args:
            model: with its weights loaded.
            device: the model's.
            description: what the model makes of a prompt.
            geometry: the static shapes.
        """
        self._model = model
        self._device = device
        self._description = description
        self._shapes = geometry.shapes
        self._longest = max(shape.prompt_len for shape in geometry.shapes)
        self._slots: dict[int, Admission] = {}

    @torch.inference_mode()
    def warm_up(self, progress: Callable[[int, int, str], None]) -> None:
        """Runs every shape once, on padding alone."""
        for done, shape in enumerate(self._shapes):
            progress(done, len(self._shapes), f"pooling of {shape.batch} x {shape.prompt_len} tokens")
            self._embed([], shape)
        progress(len(self._shapes), len(self._shapes), "done")

    @torch.inference_mode()
    def execute(self, plan: Plan) -> list[Output]:
        """Runs one step. A request whose admission is refused or whose result is not finite fails alone.

        Returns:
            One output for each slot whose admission was refused, then one for each other slot of the work, in its order.

        Raises:
            Internal: if the plan contradicts earlier ones.
        """
        for slot in plan.release:
            self._slots.pop(slot, None)
        refused: dict[int, Output] = {}
        for request in plan.admit:
            if (error := self._admit(request)) is not None:
                refused[request.slot] = Output(request.slot, (), error=error)
        if plan.work is None:
            return list(refused.values())
        if not isinstance(plan.work, PoolWork):
            raise Internal("the plan generates, and this is a pooling model")
        requests = self._requests_of(plan.work, refused)
        rows = self._embed(requests, plan.work.shape) if requests else []
        outputs = [_output(request.slot, row) for request, row in zip(requests, rows, strict=True)]
        return [*refused.values(), *outputs]

    def reset(self) -> None:
        """Frees every slot."""
        self._slots.clear()

    def _admit(self, request: Admission) -> Internal | None:
        if request.slot in self._slots:
            return Internal(f"the plan admits a request to slot {request.slot}, which is taken")
        if not 1 <= len(request.token_ids) <= self._longest:
            return Internal(
                f"the plan admits {len(request.token_ids)} tokens to slot {request.slot}; 1 to {self._longest} fit"
            )
        self._slots[request.slot] = request
        return None

    def _requests_of(self, work: PoolWork, refused: Mapping[int, Output]) -> list[Admission]:
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
                    f"slot {slot} has {len(request.token_ids)} tokens, more than {shape.prompt_len} fit a row"
                )
            requests.append(request)
        return requests

    def _embed(self, requests: Sequence[Admission], shape: PoolShape) -> list[list[float]]:
        """The embeddings of some requests, which fit the shape; the other rows are padding."""
        batch, row_len = shape.batch, shape.prompt_len
        tokens = torch.zeros((batch, row_len), dtype=torch.int64)
        lengths = torch.ones(batch, dtype=torch.int64)
        for row, request in enumerate(requests):
            lengths[row] = len(request.token_ids)
            tokens[row, : len(request.token_ids)] = torch.tensor(request.token_ids, dtype=torch.int64)
        where = self._device.torch_device
        lengths = lengths.to(where)
        positions = torch.arange(row_len, device=where).repeat(batch)
        plans = self._model.row_plans(RowsInput.of(lengths, row_len))
        hidden = self._model.forward(tokens.to(where).flatten(), positions, plans)
        pooled = pool_rows(hidden.view(batch, row_len, -1), lengths, self._description.method)
        raw = self._model.project(pooled).float()
        if not requests:
            return []
        default = self._description.normalize
        wanted = [default if request.normalize is None else request.normalize for request in requests]
        normalize = torch.tensor(wanted, device=where)[:, None]
        raw = raw[: len(requests)]
        rows: list[list[float]] = torch.where(normalize, to_length_one(raw), raw).tolist()
        return rows


def _output(slot: int, row: Sequence[float]) -> Output:
    if not torch.isfinite(torch.tensor(row)).all():
        return Output(slot, (), error=Internal("the model's result for this request is not finite"))
    return Output(slot, (), pooled=row)
