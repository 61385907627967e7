"""Collectives within a stage, as operators of PyTorch.

As operators, they are recorded, compiled and captured with the surrounding layers. They look up the process'
only group when they run. A device's own compiler knows PyTorch's collectives instead, which Dynamo writes
with the name of their group.
"""

from typing import Any, Final, cast

import torch
from torch import distributed

from protos.service.logs import get_logger

_NAMESPACE: Final = "triptych_ranks"
_LIBRARY: Final = torch.library.Library(_NAMESPACE, "DEF")
_LIBRARY.define("all_reduce_(Tensor(a!) tensor) -> ()")
_LIBRARY.define("all_gather(Tensor tensor, int ranks) -> Tensor")


# Up to this size, reading the other ranks' memory directly beats a ring: decode steps' hidden states.
_ONE_SHOT_BYTES: Final = 512 << 10
# PyTorch has the kernel for these.
_ONE_SHOT_DTYPES: Final = (torch.float32, torch.bfloat16)


class _Stage:
    group: Any = None
    """Their process group; `None` before the process has joined a group."""
    shared: torch.Tensor | None = None
    """Memory that all ranks can read, as bytes; `None` where GPUs do not reach each other's memory."""
    compiled: bool = False
    """Whether the device's own compiler compiles collectives."""


def use_group(group: Any, device: torch.device, *, compiled: bool) -> None:
    """Makes the operators run on a process group of torch.distributed; all its ranks call this together.

    The group is `None` for a stage of one rank. `compiled` says whether the device's own compiler compiles
    the collectives.
    """
    _Stage.group = group
    _Stage.compiled = compiled
    if group is not None and distributed.get_backend(group) == "nccl":
        _Stage.shared = _shared_memory(group, device)


def _shared_memory(group: Any, device: torch.device) -> torch.Tensor | None:
    """Allocates memory readable by all ranks of a group; `None` on all ranks if any cannot."""
    from torch.distributed import _symmetric_memory as symmetric

    shared: torch.Tensor | None = None
    try:
        shared = symmetric.empty(_ONE_SHOT_BYTES, dtype=torch.uint8, device=device)
        symmetric.rendezvous(shared, group.group_name)
    except RuntimeError as error:
        get_logger().warning("no_shared_memory_between_gpus", reason=str(error).strip().splitlines()[0])
        shared = None
    # Half of a stage must not wait in one kind of all-reduce for the other half.
    everywhere = torch.tensor([shared is not None], dtype=torch.int32, device=device)
    distributed.all_reduce(everywhere, distributed.ReduceOp.MIN, group=group)
    return shared if everywhere.item() else None


def all_reduce_(tensor: torch.Tensor) -> torch.Tensor:
    """Adds up a tensor over the ranks of the stage, in place. Returns it."""
    if _Stage.compiled:
        distributed.all_reduce(tensor, group=_Stage.group)
        return tensor
    _OPERATORS.all_reduce_(tensor)
    return tensor


def all_gather(tensor: torch.Tensor, ranks: int, dim: int) -> torch.Tensor:
    """Returns the tensors of all ranks of the stage, joined along a dimension in the ranks' order."""
    gathered = _all_gather(tensor, ranks) if _Stage.compiled else _OPERATORS.all_gather(tensor, ranks)
    dim %= tensor.dim()
    shape = list(tensor.shape)
    shape[dim] *= ranks
    return cast("torch.Tensor", gathered.movedim(0, dim).reshape(shape))


def _all_reduce(tensor: torch.Tensor) -> None:
    distributed.all_reduce(tensor, group=_Stage.group)


def _all_reduce_on_gpus(tensor: torch.Tensor) -> None:
    shared = _Stage.shared
    fits = tensor.nbytes <= _ONE_SHOT_BYTES and tensor.is_contiguous() and tensor.dtype in _ONE_SHOT_DTYPES
    if shared is None or not fits:
        _all_reduce(tensor)
        return
    own = shared[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
    own.copy_(tensor)
    torch.ops.symm_mem.one_shot_all_reduce_out(own, "sum", _Stage.group.group_name, tensor)


def _all_gather(tensor: torch.Tensor, ranks: int) -> torch.Tensor:
    gathered = tensor.new_empty((ranks * tensor.shape[0], *tensor.shape[1:]))
    distributed.all_gather_into_tensor(gathered, tensor.contiguous(), group=_Stage.group)
    return gathered.view(ranks, *tensor.shape)


for _key in ("CPU", "CUDA"):
    _LIBRARY.impl("all_reduce_", _all_reduce_on_gpus if _key == "CUDA" else _all_reduce, _key)
    _LIBRARY.impl("all_gather", _all_gather, _key)
torch.library.register_fake(f"{_NAMESPACE}::all_reduce_", lambda _: None, lib=_LIBRARY)
torch.library.register_fake(
    f"{_NAMESPACE}::all_gather", lambda tensor, ranks: tensor.new_empty((ranks, *tensor.shape)), lib=_LIBRARY
)
_OPERATORS: Final[Any] = getattr(torch.ops, _NAMESPACE)
