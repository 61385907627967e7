"""Collectives within a stage, as operators of PyTorch.

As operators, they are recorded, compiled and captured with the layers around them. They look up the process'
group when they run: a process has one.
"""

from typing import Any, Final

import torch
from torch import distributed

_NAMESPACE: Final = "triptych_ranks"
_LIBRARY: Final = torch.library.Library(_NAMESPACE, "DEF")
_LIBRARY.define("all_reduce_(Tensor(a!) tensor) -> ()")
_LIBRARY.define("all_gather(Tensor tensor, int ranks) -> Tensor")


class _Stage:
    """The ranks of this process' stage."""

    group: Any = None
    """Their process group; `None` before the process has joined a group."""


def use_group(group: Any) -> None:
    """Makes the operators run on a process group of torch.distributed."""
    _Stage.group = group


def all_reduce_(tensor: torch.Tensor) -> torch.Tensor:
    """Adds up a tensor over the ranks of the stage, in place. Returns it."""
    _OPERATORS.all_reduce_(tensor)
    return tensor


def all_gather(tensor: torch.Tensor, ranks: int, dim: int) -> torch.Tensor:
    """Returns the tensors of all ranks of the stage, joined along a dimension in the ranks' order."""
    gathered: torch.Tensor = _OPERATORS.all_gather(tensor, ranks)
    dim %= tensor.dim()
    shape = list(tensor.shape)
    shape[dim] *= ranks
    return gathered.movedim(0, dim).reshape(shape)


def _all_reduce(tensor: torch.Tensor) -> None:
    distributed.all_reduce(tensor, group=_Stage.group)


def _all_gather(tensor: torch.Tensor, ranks: int) -> torch.Tensor:
    gathered = tensor.new_empty((ranks * tensor.shape[0], *tensor.shape[1:]))
    distributed.all_gather_into_tensor(gathered, tensor.contiguous(), group=_Stage.group)
    return gathered.view(ranks, *tensor.shape)


for _key in ("CPU", "CUDA"):
    _LIBRARY.impl("all_reduce_", _all_reduce, _key)
    _LIBRARY.impl("all_gather", _all_gather, _key)
torch.library.register_fake(f"{_NAMESPACE}::all_reduce_", lambda _: None, lib=_LIBRARY)
torch.library.register_fake(
    f"{_NAMESPACE}::all_gather", lambda tensor, ranks: tensor.new_empty((ranks, *tensor.shape)), lib=_LIBRARY
)
_OPERATORS: Final[Any] = getattr(torch.ops, _NAMESPACE)
