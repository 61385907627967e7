"""Graph capture: runs a step of a model once and records its calls of PyTorch's dispatcher.

`replay` runs the recorded kernels again, `inductor` builds graphs for a compiler.
"""

from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map_only

from worker_svc.devices.attention import AttentionCall

_aten: Any = torch.ops.aten
ALLOCATIONS = frozenset(
    {_aten.empty, _aten.empty_like, _aten.empty_strided, _aten.new_empty, _aten.new_empty_strided}
)
"""Operators of pure allocation."""
# Each takes its input, a probability, and whether the model is being trained; otherwise it is an identity.
_DROPOUTS = frozenset(
    {
        _aten.dropout, _aten.dropout_, _aten.feature_dropout, _aten.feature_dropout_, _aten.alpha_dropout,
        _aten.alpha_dropout_, _aten.feature_alpha_dropout, _aten.feature_alpha_dropout_,
    }
)  # fmt: skip
# Their results depend on the types of tensors alone.
_TYPES = frozenset({_aten.promote_types, _aten.result_type, _aten.can_cast})
# The results of such operators depend on data or chance, which a fixed list of kernels cannot reproduce.
_UNRECORDABLE = (
    torch.Tag.data_dependent_output,
    torch.Tag.dynamic_output_shape,
    torch.Tag.nondeterministic_seeded,
    torch.Tag.inplace_view,  # changes the shape of a tensor that earlier calls took
)


# Recording needs the shapes of a step's matrix products, which take nearly all of its time, not their values.
_PRODUCTS = frozenset({_aten.linear, _aten.mm, _aten.addmm, _aten.bmm, _aten.baddbmm})


class NotStatic(Exception):  # noqa: N818 - a property of the step, not an error
    """The step cannot be recorded because its work depends on its data. The text names the operator."""


@dataclass(frozen=True)
class TracedCall:
    """A recorded operator call, possibly a view or an allocation."""

    op: Any
    """The operator's overload."""
    args: Sequence[Any]
    """Its positional arguments."""
    kwargs: Mapping[str, Any]
    """Its keyword arguments."""
    result: Any
    """Its result."""


@dataclass(frozen=True)
class KernelCall(TracedCall):
    """A kernel of a replay. The result is `None` if the operator writes its arguments."""

    def tensors(self) -> Iterator[torch.Tensor]:
        """Yields all read or written tensors."""
        for leaf in tree_iter((self.args, self.kwargs, self.result)):
            if isinstance(leaf, torch.Tensor):
                yield leaf

    def written(self) -> Iterator[torch.Tensor]:
        """Yields the written tensors."""
        if self.result is not None:
            yield from (leaf for leaf in tree_iter(self.result) if isinstance(leaf, torch.Tensor))
            return
        for argument, value in by_argument(self.op, self.args, self.kwargs):
            if argument.alias_info is not None and argument.alias_info.is_write:
                yield from (leaf for leaf in tree_iter(value) if isinstance(leaf, torch.Tensor))


@dataclass(frozen=True)
class LayerAttention:
    """A place in a step where a replay calls the device with the step's plan."""

    layer: str
    """The layer's name, the key of its plan."""
    call: AttentionCall
    """The recorded tensors."""

    def tensors(self) -> Iterator[torch.Tensor]:
        """Yields all read or written tensors, except cache and sinks, which never move."""
        for tensor in (self.call.query, self.call.key, self.call.value, self.call.output):
            if tensor is not None:
                yield tensor

    def written(self) -> Iterator[torch.Tensor]:
        """Yields the written tensors, and query, key and value, which must not be taken for constants."""
        return self.tensors()


class Recorder(TorchDispatchMode):
    """Records the calls made under it.

    A matrix product of varying inputs is recorded without being computed. Its
    result is zeros: a replay computes it before anything reads it. Products of weights alone are computed,
    because a graph may keep them as constants.
    """

    def __init__(self, inputs: Sequence[torch.Tensor]) -> None:
        """Starts with an empty recording.

        Args:
            inputs: the step's varying inputs.
        """
        super().__init__()
        self._inputs = tuple(inputs)
        # Storages whose contents differ from step to step.
        self._varying = {storage_id(tensor) for tensor in inputs}
        self._calls: list[KernelCall | LayerAttention] = []
        # The trace also keeps every tensor alive: a freed storage's id could be given to another storage.
        self._trace: list[TracedCall | LayerAttention] = []
        self._allocated: set[int] = set()

    def attend(self, layer: str, call: AttentionCall) -> None:
        """Records a call of `Device.attend` without running it, so its output stays undefined."""
        recorded = LayerAttention(layer, call)
        self._varying |= {storage_id(tensor) for tensor in recorded.written()}
        self._calls.append(recorded)
        self._trace.append(recorded)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Runs an operator and records it.

        Raises:
            NotStatic: if the shape or the value of its result depends on data or chance.
        """
        del types
        kwargs = kwargs or {}
        if func.overloadpacket in _DROPOUTS and not args[2]:
            return args[0]
        if any(tag in func.tags for tag in _UNRECORDABLE) and not _is_gather(func, args):
            raise NotStatic(f"{func} depends on data")
        given = {storage_id(leaf) for leaf in tree_iter((args, kwargs)) if isinstance(leaf, torch.Tensor)}
        varies = not self._varying.isdisjoint(given)
        if varies and func.overloadpacket in _PRODUCTS:
            result = _zeros_of_result(func, args, kwargs)
        else:
            result = func(*args, **kwargs)
        if func.overloadpacket in _TYPES:
            return result
        self._trace.append(TracedCall(func, args, kwargs, result))
        if func.overloadpacket in ALLOCATIONS:
            self._allocated.add(storage_id(result))
            return result
        arguments = func._schema.arguments  # noqa: SLF001 - the only way to an operator's schema
        if any(each.alias_info is not None and each.alias_info.is_write for each in arguments):
            call = KernelCall(func, args, kwargs, None)
            self._calls.append(call)
            if varies:
                self._varying |= {storage_id(tensor) for tensor in call.written()}
            return result
        made = [leaf for leaf in tree_iter(result) if isinstance(leaf, torch.Tensor)]
        if not made:
            raise NotStatic(f"{func} returns no tensor")
        if varies:
            self._varying |= {storage_id(tensor) for tensor in made}
        if not all(storage_id(tensor) in given for tensor in made):  # otherwise they are views
            self._allocated |= {storage_id(tensor) for tensor in made} - given
            self._calls.append(KernelCall(func, args, kwargs, result))
        return result

    def finish(self, output: torch.Tensor) -> "Recording":
        """Returns the recording of a step whose result is in `output`."""
        return Recording(
            tuple(self._calls), tuple(self._trace), frozenset(self._allocated), self._inputs, output
        )


@dataclass(frozen=True)
class Recording:
    """A recorded step, the source of graphs."""

    calls: Sequence[KernelCall | LayerAttention]
    """Kernels and attention, in order."""
    trace: Sequence[TracedCall | LayerAttention]
    """The same with views and allocations."""
    allocated: AbstractSet[int]
    """Ids of the storages allocated while recording."""
    inputs: tuple[torch.Tensor, ...]
    """The tensors with different contents in each step."""
    output: torch.Tensor
    """The step's result."""

    @property
    def dtypes(self) -> frozenset[torch.dtype]:
        """The types in which the step's kernels write."""
        return frozenset(tensor.dtype for call in self.calls for tensor in call.written())


def _is_gather(func: Any, args: Sequence[Any]) -> bool:
    """Whether an operator selects by integers, so that its result's shape follows from theirs.

    PyTorch marks all indexing as data-dependent, because of masks.
    """
    if func.overloadpacket is not _aten.index:
        return False
    return all(index is None or index.dtype not in (torch.bool, torch.uint8) for index in args[1])


def _zeros_of_result(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.Tensor:
    shapes = tree_map_only(torch.Tensor, lambda tensor: tensor.to("meta"), (tuple(args), dict(kwargs)))
    shape: torch.Tensor = func(*shapes[0], **shapes[1])
    device = next(leaf.device for leaf in tree_iter(args) if isinstance(leaf, torch.Tensor))
    return torch.empty_strided(shape.size(), shape.stride(), dtype=shape.dtype, device=device).zero_()


def storage_id(tensor: torch.Tensor) -> int:
    """Identifies the tensor's storage."""
    address: int = tensor.untyped_storage()._cdata  # noqa: SLF001 - data_ptr() is 0 for every empty storage
    return address


def by_argument(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[tuple[Any, Any]]:
    """Pairs an operator's declared arguments with the given values."""
    for index, argument in enumerate(op._schema.arguments):  # noqa: SLF001 - see above
        if index < len(args):
            yield argument, args[index]
        elif argument.name in kwargs:
            yield argument, kwargs[argument.name]
