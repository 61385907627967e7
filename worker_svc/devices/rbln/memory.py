"""Where an NPU's KV caches lie, and how their blocks are cleared and copied.

Within a block, tokens are the second dimension from the end, for both namespaces of operators.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from protos.errors import Internal
from worker_svc.devices.base import BlockCopies
from worker_svc.shapes import KvGroup

Allocate = Callable[[tuple[int, ...], torch.dtype], torch.Tensor]


class TensorMemory:
    """Memory for tensor operators: on the NPU, on this host, or of handles.

    Caches are [layers, …] of some layers of a KV group; `dim` counts their blocks.
    """

    def __init__(
        self, allocate: Allocate, resolve: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor
    ) -> None:
        """Allocates nothing; `resolve` returns the memory of a result of `allocate`, or of a view of it."""
        self.allocate = allocate
        self._resolve = resolve
        self._zeros: dict[tuple[torch.Size, torch.dtype], torch.Tensor] = {}

    def clear(self, caches: torch.Tensor, dim: int, block: int) -> None:
        target = self._resolve(caches).select(dim, block)
        target.copy_(self._zeros_like(target))

    def copies(self, groups: Sequence[KvGroup]) -> BlockCopies:
        return "tensors" if groups else "none"

    def copy(
        self, caches: Sequence[torch.Tensor], dim: int, source: int, target: int, num_tokens: int
    ) -> None:
        """Clears the rest of the target: an old NaN there would break a sequence."""
        tensors = [self._resolve(each) for each in caches]
        targets = [each.select(dim, target) for each in tensors]
        rests = [each for each in targets if num_tokens < each.shape[-2]]
        torch._foreach_copy_(
            [each[..., :num_tokens, :] for each in targets] + [each[..., num_tokens:, :] for each in rests],
            [each.select(dim, source)[..., :num_tokens, :] for each in tensors]
            + [self._zeros_like(each)[..., num_tokens:, :] for each in rests],
        )

    def _zeros_like(self, block: torch.Tensor) -> torch.Tensor:
        """Returns zeros to copy from: `fill_` of torch_rbln brings the tensor to the host and back."""
        key = block.shape, block.dtype
        if key not in self._zeros:
            self._zeros[key] = torch.zeros(block.shape, dtype=block.dtype).to(block.device)
        return self._zeros[key]


def on_npu(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Allocates zeroed memory on the NPU; a cache may be larger than this host's memory."""
    memory = torch.empty(shape, dtype=dtype, device="rbln")
    zeros = torch.zeros(shape[2:], dtype=dtype).to("rbln")
    for layer in memory:
        for part in layer:
            part.copy_(zeros)
    return memory


def on_host(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Allocates zeroed memory on this host."""
    return torch.zeros(shape, dtype=dtype)


def move_to_npu(model: torch.nn.Module) -> None:
    """Moves parameters and buffers to the NPU, one after the other.

    Each stays the same object: `Module.to` would copy a shared parameter for every module, and would leave
    references from outside on the host.
    """
    for tensor in [*model.parameters(), *model.buffers()]:
        if tensor.device.type == "rbln":
            continue  # vLLM's models share rotary embeddings within a process
        moved = tensor.detach().to("rbln")
        if isinstance(tensor, torch.nn.Parameter):
            moved = torch.nn.Parameter(moved, requires_grad=False)
        torch.utils.swap_tensors(tensor, moved)


class RuntimeMemory:
    """Memory of the vendor's runtime. The host has handles on the meta device and cannot clear blocks.

    The runtime's call copies a block in every cache of the graphs. Block ids of two KV groups mean different
    blocks, so only models with a single group can use it.
    """

    def __init__(self, context: Any, runtimes: list[Any]) -> None:
        """Allocates nothing. `context` learns which inputs stay in place; the compiler fills `runtimes`."""
        self._context = context
        self._runtimes = runtimes
        self._count = 0

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        handle = torch.empty(shape, dtype=dtype, device="meta")
        for layer in handle:
            self._context.mark_static_address(layer, f"kv_cache.{self._count}")
            self._count += 1
        return handle

    def clear(self, caches: torch.Tensor, dim: int, block: int) -> None:
        """Does nothing: the kernels never read past a sequence's end."""

    def copies(self, groups: Sequence[KvGroup]) -> BlockCopies:
        """Whether the runtime has the call is known once there is a runtime."""
        if len(groups) != 1 or (self._runtimes and not hasattr(self._runtimes[0], "_copy_kv_cache")):
            return "none"
        return "runtime"

    def copy(
        self,
        caches: Sequence[torch.Tensor],  # noqa: ARG002 - the runtime knows them
        dim: int,  # noqa: ARG002
        source: int,
        target: int,
        num_tokens: int,
    ) -> None:
        """Raises Internal before any graph was compiled."""
        if not self._runtimes:
            raise Internal("no graph has run yet, so there is no runtime that copies blocks")
        self._runtimes[0]._copy_kv_cache(source, target, num_tokens)  # noqa: SLF001 - the vendor's plugin calls it


KvMemory = TensorMemory | RuntimeMemory
"""The memory of all caches."""
