"""Graph capture: a step of a model is run once, and the calls that reach PyTorch's dispatcher are recorded.

What is done with a recording is another matter: ``replay`` runs the same kernels again, ``pieces`` makes graphs for a compiler.
"""

from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from worker_svc.devices.base import AttentionShape

_aten: Any = torch.ops.aten
ALLOCATIONS = frozenset(
    {_aten.empty, _aten.empty_like, _aten.empty_strided, _aten.new_empty, _aten.new_empty_strided}
)
# What such operators return follows from data, or from chance; a list of kernels that is fixed beforehand cannot follow.
_UNRECORDABLE = (
    torch.Tag.data_dependent_output,
    torch.Tag.dynamic_output_shape,
    torch.Tag.nondeterministic_seeded,
    torch.Tag.inplace_view,  # what an earlier call was given would look different by now
)


class NotStatic(Exception):  # noqa: N818 - says what the step is
    """The step cannot be recorded: what it does depends on its data. The text names the operator."""


@dataclass(frozen=True)
class Ran:
    """One call of an operator as it was made."""

    op: Any
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    result: Any


@dataclass(frozen=True)
class Call:
    """One kernel that a replay runs."""

    op: Any
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    result: Any
    """What a replay writes; ``None`` if the operator writes its arguments."""

    def tensors(self) -> Iterator[torch.Tensor]:
        """All that it reads or writes."""
        for leaf in tree_iter((self.args, self.kwargs, self.result)):
            if isinstance(leaf, torch.Tensor):
                yield leaf

    def written(self) -> Iterator[torch.Tensor]:
        """What it writes."""
        if self.result is not None:
            yield from (leaf for leaf in tree_iter(self.result) if isinstance(leaf, torch.Tensor))
            return
        for argument, value in by_argument(self.op, self.args, self.kwargs):
            if argument.alias_info is not None and argument.alias_info.is_write:
                yield from (leaf for leaf in tree_iter(value) if isinstance(leaf, torch.Tensor))


@dataclass(frozen=True)
class Attention:
    """A place where a replay calls the device with the step's plan."""

    layer: str
    shape: AttentionShape
    query: torch.Tensor
    key: torch.Tensor | None
    value: torch.Tensor | None
    cache: torch.Tensor
    output: torch.Tensor
    sinks: torch.Tensor | None = None
    """A weight: it stays where it is."""

    def tensors(self) -> Iterator[torch.Tensor]:
        """All that it reads or writes, but for cache and sinks."""
        for tensor in (self.query, self.key, self.value, self.output):
            if tensor is not None:
                yield tensor

    def written(self) -> Iterator[torch.Tensor]:
        """What it writes; keys and values too, so that they are never taken for constants."""
        return self.tensors()


class Recorder(TorchDispatchMode):
    """Records what is run under it."""

    def __init__(self) -> None:
        """Starts with nothing."""
        super().__init__()
        self._calls: list[Call | Attention] = []
        # All that ran, views and allocations too. It also keeps every tensor: a storage must not go and its place be given to another
        # while we tell storages by their place.
        self._trace: list[Ran | Attention] = []
        self._born: set[int] = set()

    def attend(
        self,
        layer: str,
        shape: AttentionShape,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        cache: torch.Tensor,
        output: torch.Tensor,
        sinks: torch.Tensor | None = None,
    ) -> None:
        """Records a call of the device's attention; arguments are those of ``Device.attend``. What it would write is left undefined."""
        call = Attention(layer, shape, query, key, value, cache, output, sinks)
        self._calls.append(call)
        self._trace.append(call)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Runs an operator and remembers it.

        Raises:
            NotStatic: for one whose result's shape or value cannot be known beforehand.
        """
        del types
        kwargs = kwargs or {}
        if any(tag in func.tags for tag in _UNRECORDABLE):
            raise NotStatic(f"{func} depends on data")
        result = func(*args, **kwargs)
        self._trace.append(Ran(func, args, kwargs, result))
        if func.overloadpacket in ALLOCATIONS:
            self._born.add(place_of(result))
            return result
        if any(a.alias_info is not None and a.alias_info.is_write for a in func._schema.arguments):  # noqa: SLF001 - the only way to an operator's schema
            self._calls.append(Call(func, args, kwargs, None))
            return result
        given = {place_of(leaf) for leaf in tree_iter((args, kwargs)) if isinstance(leaf, torch.Tensor)}
        made = [leaf for leaf in tree_iter(result) if isinstance(leaf, torch.Tensor)]
        if not made:
            raise NotStatic(f"{func} returns no tensor")
        if not all(place_of(tensor) in given for tensor in made):  # otherwise they are views
            self._born |= {place_of(tensor) for tensor in made} - given
            self._calls.append(Call(func, args, kwargs, result))
        return result

    def finish(self, inputs: Sequence[torch.Tensor], output: torch.Tensor) -> "Recording":
        """What was recorded.

        Args:
            inputs: tensors that the step reads and that another step would have others of.
            output: the tensor that holds the result.
        """
        return Recording(tuple(self._calls), tuple(self._trace), frozenset(self._born), tuple(inputs), output)


@dataclass(frozen=True)
class Recording:
    """A step as it ran once, ready to be made a graph of."""

    calls: Sequence[Call | Attention]
    """Kernels and attention, in order."""
    trace: Sequence[Ran | Attention]
    """The same with views and allocations."""
    born: AbstractSet[int]
    """Storages that were made while recording."""
    inputs: tuple[torch.Tensor, ...]
    output: torch.Tensor


def place_of(tensor: torch.Tensor) -> int:
    """Tells storages apart."""
    place: int = tensor.untyped_storage()._cdata  # noqa: SLF001 - data_ptr() is 0 for all empty ones
    return place


def by_argument(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[tuple[Any, Any]]:
    """An operator's declared arguments and what was given for them."""
    for index, argument in enumerate(op._schema.arguments):  # noqa: SLF001 - see above
        if index < len(args):
            yield argument, args[index]
        elif argument.name in kwargs:
            yield argument, kwargs[argument.name]
