"""Models without layers and a device for them, so that tests need no kernels and no weights."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch

from protos.steps import GroupKind
from worker_svc.devices.cuda.device import CudaDevice
from worker_svc.graphs.capture import Recorder, Recording
from worker_svc.pooling import pool_rows
from worker_svc.shapes import AttentionLayer, PoolingMethod, group_layers

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

    def record(self, token_ids: torch.Tensor, positions: torch.Tensor, *_: torch.Tensor) -> Recording:
        """Is never called at optimization level 0."""
        raise NotImplementedError


POISON = 99
"""The token whose hidden state is NaN in `Echo`."""


class Echo:
    """A pooling model: a hidden state is a token's id and position, or NaN for one token and for padding."""

    def __init__(self, method: PoolingMethod = "MEAN") -> None:
        self.forwards: list[tuple[int, int]] = []
        """Rows and tokens per row of each call of the model's code."""
        self._method = method

    def row_plans(self, lengths: torch.Tensor, row_len: int | None) -> dict[str, Any]:
        del lengths, row_len
        return {}

    def forward(
        self, token_ids: torch.Tensor, places: torch.Tensor, plans: Mapping[str, Any], *_: torch.Tensor
    ) -> torch.Tensor:
        del plans
        lengths = places[0]
        rows, row_len = len(lengths), len(token_ids) // len(lengths)
        self.forwards.append((rows, row_len))
        tokens, positions = token_ids.view(rows, row_len), torch.arange(row_len).expand(rows, row_len)
        hidden = torch.stack([tokens, positions], dim=-1).float()
        unreal = (positions >= lengths[:, None]) | (tokens == POISON)
        return pool_rows(hidden.masked_fill(unreal[:, :, None], math.nan), lengths, self._method)

    def record(self, token_ids: torch.Tensor, places: torch.Tensor, *_: torch.Tensor) -> Recording:
        inputs = (token_ids.clone(), places.clone())
        recorder = Recorder(inputs)
        with recorder:
            embeddings = self.forward(*inputs, {})
        return recorder.finish(embeddings)
