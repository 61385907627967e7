"""A runner for models without layers, so that tests need no kernels and no weights."""

from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from worker_svc.devices.cuda.device import CudaDevice
from worker_svc.graphs.capture import Recording
from worker_svc.plans.geometry import AttentionLayer, GroupKind, group_layers

GROUPS = group_layers(
    [AttentionLayer(name, 2, 1, 16, window, torch.float32) for name, window in (("full", 0), ("window", 8))],
    GroupKind.IN_PLACE_WINDOW,
)
"""A group with full attention, and one whose window of 8 tokens slides in place."""


class PlainDevice(CudaDevice):
    """A CUDA device on the CPU. The model has no layers, so no kernel runs."""

    torch_device: ClassVar[torch.device] = torch.device("cpu")


class LayerlessModel:
    """The parts of a model that need no layers; a subclass adds ``forward`` and ``logits``."""

    def bind_caches(self, caches: dict[str, torch.Tensor]) -> None:
        """Does nothing: there are no layers."""

    def attention_plans(self, groups: Sequence[tuple[Sequence[str], Any]]) -> dict[str, Any]:
        """Returns one plan per layer."""
        return {name: plan for names, plan in groups for name in names}

    def record(self, token_ids: torch.Tensor, positions: torch.Tensor) -> Recording:
        """Is never called at optimization level 0."""
        raise NotImplementedError
