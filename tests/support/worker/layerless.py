"""Models without layers and a device for them, so that tests need no kernels and no weights."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch

from protos.kv_groups import GroupKind
from worker_svc.devices.attention import RowsInput
from worker_svc.devices.cuda.device import CudaDevice
from worker_svc.graphs.capture import Recording
from worker_svc.shapes.geometry import AttentionLayer, group_layers

GROUPS = group_layers(
    [AttentionLayer(name, 2, 1, 16, window, torch.float32) for name, window in (("full", 0), ("window", 8))],
    GroupKind.IN_PLACE_WINDOW,
)
"""A group with full attention, and one whose window of 8 tokens slides in place."""


class PlainDevice(CudaDevice):
    """A CUDA device on the CPU. The model has no layers, so no kernel runs."""

    torch_device: ClassVar[torch.device] = torch.device("cpu")

    def start_reading(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        copy = tensor.clone()  # at once: later steps overwrite the tensor
        return lambda: copy


class LayerlessModel:
    """The parts of a model that need no layers; a subclass adds `forward` and `logits`."""

    def bind_caches(self, caches: dict[str, torch.Tensor]) -> None:
        """Does nothing: there are no layers."""

    def attention_plans(self, groups: Sequence[tuple[Sequence[str], Any]]) -> dict[str, Any]:
        """Returns one plan per layer."""
        return {name: plan for names, plan in groups for name in names}

    def record(self, token_ids: torch.Tensor, positions: torch.Tensor) -> Recording:
        """Is never called at optimization level 0."""
        raise NotImplementedError


POISON = 99
"""The token whose hidden state is NaN in `Echo`."""


class Echo:
    """A pooling model whose hidden states are a token's id and position, and NaN for one token."""

    def __init__(self) -> None:
        self.forwards: list[tuple[int, ...]] = []

    def row_plans(self, rows: RowsInput) -> dict[str, Any]:
        self.forwards.append(tuple(rows.real.shape))
        return {"rows": rows}

    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, plans: Mapping[str, Any]
    ) -> torch.Tensor:
        hidden = torch.stack([token_ids, positions], dim=-1).float()
        padding = ~plans["rows"].real.flatten()
        hidden[padding | (token_ids == POISON)] = math.nan
        return hidden

    def project(self, pooled: torch.Tensor) -> torch.Tensor:
        return pooled
