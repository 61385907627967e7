"""Kernel graphs: replays a recorded step call by call on fixed addresses, without the model's Python code.

This works like a CUDA graph on any device. The same kernels run on the same shapes as in the model's own
forward, so the results are equal to the bit. No code is generated, so there is nothing to compile or cache.
"""

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils._pytree import tree_iter, tree_map_only

from worker_svc.devices.attention import AttentionCall
from worker_svc.devices.base import Device
from worker_svc.graphs.capture import KernelCall, LayerAttention, Recording, storage_id

ATTENTION = "attention"
"""The name of the device's attention among kernels, however many it consists of."""

_aten: Any = torch.ops.aten
_COPIES = frozenset({_aten._to_copy, _aten.clone})  # noqa: SLF001 - an operator's name


@torch.inference_mode()
def build_kernel_graph(recording: Recording, device: Device) -> "KernelGraph":
    """Prepares a recorded step for replay. The graph takes over the memory of its inputs."""
    calls = _without_constants(recording.calls, recording.inputs)
    memory = _MemoryPlan(calls, recording.allocated, recording.output)
    kernels: list[_Kernel] = []
    for call in calls:
        if isinstance(call, LayerAttention):
            bound = device.bind_attention(memory.relocated_call(call.call))
            kernels.append(_Kernel(ATTENTION, bound, (call.layer,)))
        else:
            kernels.append(_Kernel(call.op.name(), _bound(call, memory, device)))
    output = memory.relocated(recording.output)
    exact = all(device.is_exact(kernel.name, kernel.run) for kernel in kernels)
    return KernelGraph(
        tuple(kernels), _fused(kernels, device), recording.inputs, output, memory.num_bytes, exact
    )


@dataclass(frozen=True)
class _Kernel:
    name: str
    """Its operator, or `ATTENTION`."""
    run: Callable[..., Any]
    """Runs it; takes the plans of `layers`."""
    layers: tuple[str, ...] = ()
    """The layers of its attention plans."""


def _fused(kernels: Sequence[_Kernel], device: Device) -> tuple[_Kernel, ...]:
    layers = iter([layer for kernel in kernels for layer in kernel.layers])
    fused = device.fuse([kernel.run for kernel in kernels], [len(kernel.layers) for kernel in kernels])
    return tuple(_Kernel("", run, tuple(itertools.islice(layers, count))) for run, count in fused)


@dataclass(frozen=True)
class KernelGraph:
    """A recorded step.

    All replays use the same memory, so a result is valid until the next replay of the graph.
    """

    _kernels: tuple[_Kernel, ...]
    """In the order of the recorded kernels."""
    _fused: tuple[_Kernel, ...]
    """The same kernels, merged where the device can."""
    _inputs: tuple[torch.Tensor, ...]
    """Where a replay copies its inputs."""
    _output: torch.Tensor
    """Where the result is."""
    num_bytes: int
    """Memory of the graph, bytes."""
    is_exact: bool
    """Whether a token's result is equal, bit by bit, in any other exact graph of the model."""

    @property
    def operators(self) -> tuple[str, ...]:
        """The operators of the kernels besides attention, in order, for example "aten::silu"."""
        return tuple(kernel.name for kernel in self._kernels if not kernel.layers)

    @property
    def num_kernels(self) -> int:
        """The number of kernels besides attention."""
        return len(self.operators)

    @torch.inference_mode()
    def replay(self, inputs: Sequence[torch.Tensor], plans: Mapping[str, Any]) -> torch.Tensor:
        """Runs the step.

        Args:
            inputs: of the recorded shapes and types.
            plans: by layer name, an object with the device's attention plan.

        Returns:
            The result, in the graph's memory.
        """
        for static, tensor in zip(self._inputs, inputs, strict=True):
            static.copy_(tensor)
        for kernel in self._fused:
            kernel.run(*[plans[layer].plan for layer in kernel.layers])
        return self._output


def _without_constants(
    calls: Sequence[KernelCall | LayerAttention], inputs: Sequence[torch.Tensor]
) -> list[KernelCall | LayerAttention]:
    """Drops calls that read only weights, unless a later call writes their result: it is always the same."""
    writers: dict[int, int] = {}
    for call in calls:
        for storage in {storage_id(tensor) for tensor in call.written()}:
            writers[storage] = writers.get(storage, 0) + 1
    varying = {storage_id(tensor) for tensor in inputs}
    kept: list[KernelCall | LayerAttention] = []
    for call in calls:
        written = {storage_id(tensor) for tensor in call.written()}
        constant = (
            isinstance(call, KernelCall)
            and call.result is not None
            and all(writers[storage] == 1 for storage in written)
            and not any(storage_id(tensor) in varying for tensor in call.tensors())
        )
        if not constant:
            varying |= written
            kept.append(call)
    return kept


class _MemoryPlan:
    """Assigns memory to a step's intermediate tensors.

    Tensors needed at different times share it.
    """

    num_bytes: int
    """The memory in total."""

    def __init__(
        self, calls: Sequence[KernelCall | LayerAttention], allocated: AbstractSet[int], output: torch.Tensor
    ) -> None:
        """Plans the memory of calls. The output and tensors not `allocated` while recording keep theirs."""
        self.num_bytes = 0
        self._assigned: dict[int, torch.UntypedStorage] = {}
        last: dict[int, int] = {}
        first: dict[int, torch.Tensor] = {}
        ours = {storage_id(tensor) for call in calls for tensor in call.written()} & allocated
        for index, call in enumerate(calls):
            for tensor in call.tensors():
                if (key := storage_id(tensor)) in ours:
                    last[key] = index
                    first.setdefault(key, tensor)
        last[storage_id(output)] = len(calls)
        free: dict[int, list[torch.UntypedStorage]] = {}
        for index, call in enumerate(calls):
            used = list(dict.fromkeys(storage_id(t) for t in call.tensors() if storage_id(t) in ours))
            for key in used:
                if key not in self._assigned:
                    size = first[key].untyped_storage().nbytes()
                    self._assigned[key] = (
                        free[size].pop() if free.get(size) else self._allocate(first[key], size)
                    )
            for key in used:
                if last[key] == index:
                    storage = self._assigned[key]
                    free.setdefault(storage.nbytes(), []).append(storage)

    def _allocate(self, like: torch.Tensor, size: int) -> torch.UntypedStorage:
        self.num_bytes += size
        return torch.zeros(size, dtype=torch.uint8, device=like.device).untyped_storage()

    def relocated(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the tensor in its assigned memory; the tensor itself if it keeps its own."""
        storage = self._assigned.get(storage_id(tensor))
        if storage is None:
            return tensor
        empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return empty.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())

    def relocated_call(self, call: AttentionCall) -> AttentionCall:
        """Returns the call with its query, key, value and output in their assigned memory."""
        return replace(
            call,
            query=self.relocated(call.query),
            key=None if call.key is None else self.relocated(call.key),
            value=None if call.value is None else self.relocated(call.value),
            output=self.relocated(call.output),
        )


def _bound(call: KernelCall, memory: _MemoryPlan, device: Device) -> Callable[[], Any]:
    args, kwargs, result = tree_map_only(
        torch.Tensor, memory.relocated, (tuple(call.args), dict(call.kwargs), call.result)
    )
    if not kwargs and (lowered := device.lower(call.op, args, result)) is not None:
        return lowered
    if result is None:
        return functools.partial(_entry(call.op), *args, **kwargs)
    if call.op.overloadpacket in _COPIES:
        return functools.partial(_entry(_aten.copy_.default), result, args[0])
    if isinstance(result, torch.Tensor) and (out := _out_variant(call.op)) is not None:
        accepted = {argument.name for argument in out._schema.arguments}  # noqa: SLF001 - see above
        named = {name: value for name, value in kwargs.items() if name in accepted}
        return functools.partial(_entry(out), *args, **named, out=result)
    op = _entry(call.op)

    def run() -> None:
        made = op(*args, **kwargs)
        for target, source in zip(tree_iter(result), tree_iter(made), strict=True):
            if isinstance(target, torch.Tensor):
                target.copy_(source)

    return run


def _entry(op: Any) -> Any:
    """Returns the cheapest entry point of an operator."""
    return op._op  # noqa: SLF001 - the function of an operator's __call__


@functools.cache
def _out_variant(op: Any) -> Any:
    wanted = [(a.name, str(a.type)) for a in op._schema.arguments if not _is_about_memory(a)]  # noqa: SLF001
    for name in op.overloadpacket.overloads():
        candidate = getattr(op.overloadpacket, name)
        arguments = candidate._schema.arguments  # noqa: SLF001 - see above
        outs = [a for a in arguments if a.is_out]
        others = [(a.name, str(a.type)) for a in arguments if not a.is_out and not _is_about_memory(a)]
        if [a.name for a in outs] == ["out"] and others == wanted:
            return candidate
    return None


def _is_about_memory(argument: Any) -> bool:
    """Whether an argument only describes the result's memory, which `out` determines."""
    return argument.name in ("dtype", "layout", "device", "pin_memory", "memory_format")
