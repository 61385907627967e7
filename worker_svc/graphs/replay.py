"""Graphs of kernels: a recorded step is replayed call by call, on fixed addresses, without the model's Python code.

As in a CUDA graph, only on any device: the same kernels run on the same shapes as in the model's own forward, so the results are the
same to the bit. Nothing is generated, so there is nothing to compile and to cache.
"""

import functools
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.utils._pytree import tree_iter, tree_map_only

from worker_svc.devices.base import Device
from worker_svc.graphs.capture import Attention, Call, Recording, place_of

ATTENTION = "attention"
"""What a profile calls the device's attention, whatever that is made of."""

_aten: Any = torch.ops.aten
_COPIES = frozenset({_aten._to_copy, _aten.clone})  # noqa: SLF001 - an operator's name


class Planned(Protocol):
    """A layer's attention metadata."""

    @property
    def plan(self) -> Any:
        """The device's plan of this step."""
        ...


@torch.inference_mode()
def kernels_of(recording: Recording, device: Device) -> "KernelGraph":
    """A recorded step, ready for replay.

    Args:
        recording: whose inputs' memory becomes the graph's.
        device: whose attention is called.
    """
    calls = _without_constants(recording.calls, recording.inputs)
    places = _Places(calls, recording.born, recording.output)
    kernels: list[_Kernel] = []
    for call in calls:
        if isinstance(call, Attention):
            query, key, value, out = (
                None if tensor is None else places.of(tensor)
                for tensor in (call.query, call.key, call.value, call.output)
            )
            assert query is not None
            assert out is not None
            bound = device.bind_attention(call.shape, query, key, value, call.cache, out, call.sinks)
            kernels.append(_Kernel(ATTENTION, bound, (call.layer,)))
        else:
            kernels.append(_Kernel(call.op.name(), _bound(call, places, device)))
    return KernelGraph(
        tuple(kernels), _fused(kernels, device), recording.inputs, places.of(recording.output), places.bytes
    )


@dataclass(frozen=True)
class _Kernel:
    name: str
    run: Callable[..., Any]
    layers: tuple[str, ...] = ()
    """Whose attention plans it is called with."""


def _fused(kernels: Sequence[_Kernel], device: Device) -> tuple[_Kernel, ...]:
    layers = iter([layer for kernel in kernels for layer in kernel.layers])
    fused = device.fuse([kernel.run for kernel in kernels], [len(kernel.layers) for kernel in kernels])
    return tuple(_Kernel("", run, tuple(itertools.islice(layers, count))) for run, count in fused)


@dataclass(frozen=True)
class KernelGraph:
    """A recorded step.

    Replays share their memory: the result is valid until the next replay of the same graph.
    """

    _kernels: tuple[_Kernel, ...]
    _fused: tuple[_Kernel, ...]
    _inputs: tuple[torch.Tensor, ...]
    _output: torch.Tensor
    num_bytes: int
    """Memory that the graph has for itself."""

    @property
    def operators(self) -> tuple[str, ...]:
        """What the kernels besides attention are, in order, for example "aten::silu"."""
        return tuple(kernel.name for kernel in self._kernels if not kernel.layers)

    @property
    def num_kernels(self) -> int:
        """Besides attention."""
        return len(self.operators)

    @torch.inference_mode()
    def replay(self, inputs: Sequence[torch.Tensor], plans: Mapping[str, Planned]) -> torch.Tensor:
        """Runs the step.

        Args:
            inputs: of the shapes and types that were recorded.
            plans: by layer name, what holds the device's attention plan.

        Returns:
            The result, in memory of the graph's.
        """
        for static, tensor in zip(self._inputs, inputs, strict=True):
            static.copy_(tensor)
        for kernel in self._fused:
            kernel.run(*[plans[layer].plan for layer in kernel.layers])
        return self._output

    @torch.inference_mode()
    def profile(
        self,
        inputs: Sequence[torch.Tensor],
        plans: Mapping[str, Planned],
        synchronize: Callable[[], None] = lambda: None,
    ) -> tuple[torch.Tensor, list[tuple[str, float]]]:
        """:meth:`replay` with a clock around each kernel.

        Args:
            inputs: see :meth:`replay`.
            plans: see :meth:`replay`.
            synchronize: waits until the device has done all that was asked of it; a host that computes by itself has nothing to wait for.

        Returns:
            The result, and for each kernel in order its operator (:data:`ATTENTION` where the device attends) and its seconds. Copying the
            inputs is no kernel.
        """
        timed: list[tuple[str, float]] = []

        for static, tensor in zip(self._inputs, inputs, strict=True):
            static.copy_(tensor)
        synchronize()
        for kernel in self._kernels:
            given = [plans[layer].plan for layer in kernel.layers]
            started = time.perf_counter()
            kernel.run(*given)
            synchronize()
            timed.append((kernel.name, time.perf_counter() - started))
        return self._output, timed


def _without_constants(
    calls: Sequence[Call | Attention], inputs: Sequence[torch.Tensor]
) -> list[Call | Attention]:
    """Leaves out what has the same result in every replay, as it depends on weights alone and nobody writes to it later."""
    writers: dict[int, int] = {}
    for call in calls:
        for place in {place_of(tensor) for tensor in call.written()}:
            writers[place] = writers.get(place, 0) + 1
    varying = {place_of(tensor) for tensor in inputs}
    kept: list[Call | Attention] = []
    for call in calls:
        written = {place_of(tensor) for tensor in call.written()}
        constant = (
            isinstance(call, Call)
            and call.result is not None
            and all(writers[place] == 1 for place in written)
            and not any(place_of(tensor) in varying for tensor in call.tensors())
        )
        if not constant:
            varying |= written
            kept.append(call)
    return kept


class _Places:
    """Gives what a step computes a place in memory, the same one to tensors that are not needed at the same time.

    Attributes:
        bytes: in total.
    """

    def __init__(
        self,
        calls: Sequence[Call | Attention],
        born: AbstractSet[int],
        output: torch.Tensor,
    ) -> None:
        """Plans the memory of recorded calls.

        Args:
            calls: in order.
            born: storages that were made while recording; all others stay where they are.
            output: nobody takes its place.
        """
        self.bytes = 0
        self._new: dict[int, torch.UntypedStorage] = {}
        last: dict[int, int] = {}
        first: dict[int, torch.Tensor] = {}
        ours = {place_of(tensor) for call in calls for tensor in call.written()} & born
        for index, call in enumerate(calls):
            for tensor in call.tensors():
                if (place := place_of(tensor)) in ours:
                    last[place] = index
                    first.setdefault(place, tensor)
        last[place_of(output)] = len(calls)
        free: dict[int, list[torch.UntypedStorage]] = {}
        for index, call in enumerate(calls):
            here = list(dict.fromkeys(place_of(t) for t in call.tensors() if place_of(t) in ours))
            for place in here:
                if place not in self._new:
                    size = first[place].untyped_storage().nbytes()
                    self._new[place] = (
                        free[size].pop() if free.get(size) else self._allocate(first[place], size)
                    )
            for place in here:
                if last[place] == index:
                    storage = self._new[place]
                    free.setdefault(storage.nbytes(), []).append(storage)

    def _allocate(self, like: torch.Tensor, size: int) -> torch.UntypedStorage:
        self.bytes += size
        return torch.zeros(size, dtype=torch.uint8, device=like.device).untyped_storage()

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor in its new place, or itself if it stays where it is."""
        storage = self._new.get(place_of(tensor))
        if storage is None:
            return tensor
        empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return empty.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())


def _bound(call: Call, places: _Places, device: Device) -> Callable[[], Any]:
    """A recorded call as a function without arguments, which writes where it is to write."""
    args, kwargs, result = tree_map_only(
        torch.Tensor, places.of, (tuple(call.args), dict(call.kwargs), call.result)
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
    """An operator's quickest way in."""
    return op._op  # noqa: SLF001 - what calling the operator calls


@functools.cache
def _out_variant(op: Any) -> Any:
    """The overload that writes to ``out`` what this one returns, or ``None``."""
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
    """Whether an argument only says where and how a result is to lie, which ``out`` says already."""
    return argument.name in ("dtype", "layout", "device", "pin_memory", "memory_format")
