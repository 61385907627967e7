"""A recorded step as generated code: a compiler makes kernels of what lies between the calls of attention."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from worker_svc.devices.base import Device
from worker_svc.graphs.capture import Attention, Recording
from worker_svc.graphs.graph_partition import Piece, cut
from worker_svc.graphs.replay import Planned

Compiled = Callable[..., Sequence[torch.Tensor]]
_PLAIN = 2


class Compiler:
    """Compiles pieces, each structure once.

    Attributes:
        num_misses: structures that the compiler's cache did not have.
    """

    def __init__(self, level: int) -> None:
        """Compiles nothing yet.

        Args:
            level: 2, or 3 to also try variants of each matrix product and keep the fastest.
        """
        # Small kernels that do not depend on one another, such as the rotations of queries and keys, run as one.
        self._patches = {"combo_kernels": True}
        if level > _PLAIN:
            self._patches |= {"max_autotune": True, "coordinate_descent_tuning": True}
        self._by_structure: dict[str, Compiled] = {}
        self.num_misses = 0

    @property
    def num_structures(self) -> int:
        """Different pieces so far."""
        return len(self._by_structure)

    def compile(self, piece: Piece) -> Compiled:
        """The piece as a function of its inputs, that returns its outputs."""
        known = self._by_structure.get(piece.structure)
        if known is None:
            before = _misses()
            known = _compile(piece.module, piece.inputs, self._patches)
            self.num_misses += _misses() > before
            self._by_structure[piece.structure] = known
        return known


def _misses() -> int:
    from torch._dynamo.utils import counters

    return counters["inductor"]["fxgraph_cache_miss"] + counters["inductor"]["fxgraph_cache_bypass"]


def _compile(module: fx.GraphModule, inputs: Sequence[torch.Tensor], patches: Mapping[str, Any]) -> Compiled:
    from torch._inductor import standalone_compile

    with torch.inference_mode(mode=False), torch.no_grad():
        examples: list[Any] = [
            torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device) for t in inputs
        ]
        compiled: Compiled = standalone_compile(
            module, examples, dynamic_shapes="from_example_inputs", options={"config_patches": dict(patches)}
        )
    return compiled


@dataclass(frozen=True)
class _Run:
    function: Compiled
    reads: tuple[int, ...]
    writes: tuple[int, ...]


@dataclass(frozen=True)
class _Attend:
    layer: str
    call: Callable[[Sequence[torch.Tensor | None], Any], None]


class GeneratedGraph:
    """A step of compiled pieces."""

    def __init__(self, recording: Recording, device: Device, compiler: Compiler) -> None:
        """Compiles what is new in it."""
        places: dict[int, int] = {}
        self._initial: list[torch.Tensor | None] = []

        def place(tensor: torch.Tensor, *, constant: bool) -> int:
            if id(tensor) not in places:
                places[id(tensor)] = len(self._initial)
                self._initial.append(tensor if constant else None)
            return places[id(tensor)]

        self._inputs = tuple(place(tensor, constant=False) for tensor in recording.inputs)
        self._steps: list[_Run | _Attend] = []
        for step in cut(recording):
            if isinstance(step, Attention):
                self._steps.append(_attend(step, device, lambda tensor: place(tensor, constant=True)))
                continue
            reads = tuple(place(tensor, constant=True) for tensor in step.inputs)
            writes = tuple(place(tensor, constant=False) for tensor in step.outputs)
            self._steps.append(_Run(compiler.compile(step), reads, writes))
        self._output = place(recording.output, constant=True)
        self.num_kernels = sum(isinstance(step, _Run) for step in self._steps)
        self.num_bytes = 0

    @torch.inference_mode()
    def replay(self, inputs: Sequence[torch.Tensor], plans: Mapping[str, Planned]) -> torch.Tensor:
        """Runs the step; see ``replay.KernelGraph.replay``."""
        values = list(self._initial)
        for index, tensor in zip(self._inputs, inputs, strict=True):
            values[index] = tensor
        for step in self._steps:
            if isinstance(step, _Attend):
                step.call(values, plans[step.layer].plan)
                continue
            results = step.function(*[values[index] for index in step.reads])
            for index, result in zip(step.writes, results, strict=True):
                values[index] = result
        output = values[self._output]
        assert output is not None
        return output


def _attend(call: Attention, device: Device, place: Callable[[torch.Tensor], int]) -> _Attend:
    query, output = place(call.query), place(call.output)
    key = None if call.key is None else place(call.key)
    value = None if call.value is None else place(call.value)

    def attend(values: Sequence[torch.Tensor | None], plan: Any) -> None:
        q, out = values[query], values[output]
        assert q is not None
        assert out is not None
        k = None if key is None else values[key]
        v = None if value is None else values[value]
        device.attend(call.shape, q, k, v, call.cache, plan, out, call.sinks)

    return _Attend(call.layer, attend)
