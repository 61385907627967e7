"""A recorded step as compiled code: TorchInductor compiles the subgraphs between the calls of attention."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from worker_svc.devices.attention import AttentionCall
from worker_svc.devices.base import Device
from worker_svc.graphs.capture import LayerAttention, Recording
from worker_svc.graphs.graph_partition import Subgraph, partition
from worker_svc.graphs.replay import HasPlan

CompiledSubgraph = Callable[..., Sequence[torch.Tensor]]
# Above this optimization level, the compiler tries variants of each matrix product.
_UNTUNED = 2


class SubgraphCompiler:
    """Compiles subgraphs, each structure once."""

    num_misses: int
    """Structures that were not in the compiler's cache."""

    def __init__(self, level: int) -> None:
        """Compiles nothing yet.

        Args:
            level: 2 to compile, 3 to also try variants of each matrix product and keep the fastest.
        """
        # Merges small independent kernels, such as the rotary positions of queries and keys.
        self._patches = {"combo_kernels": True}
        if level > _UNTUNED:
            self._patches |= {"max_autotune": True, "coordinate_descent_tuning": True}
        self._by_structure: dict[str, CompiledSubgraph] = {}
        self.num_misses = 0

    @property
    def num_structures(self) -> int:
        """The number of different structures so far."""
        return len(self._by_structure)

    def compile(self, subgraph: Subgraph) -> CompiledSubgraph:
        """Compiles a subgraph to a function that takes its inputs and returns its outputs."""
        known = self._by_structure.get(subgraph.structure)
        if known is None:
            before = _misses()
            known = _compile(subgraph.module, subgraph.inputs, self._patches)
            self.num_misses += _misses() > before
            self._by_structure[subgraph.structure] = known
        return known


def _misses() -> int:
    from torch._dynamo.utils import counters

    return counters["inductor"]["fxgraph_cache_miss"] + counters["inductor"]["fxgraph_cache_bypass"]


def _compile(
    module: fx.GraphModule, inputs: Sequence[torch.Tensor], patches: Mapping[str, Any]
) -> CompiledSubgraph:
    from torch._inductor import standalone_compile

    with torch.inference_mode(mode=False), torch.no_grad():
        examples: list[Any] = [
            torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device) for t in inputs
        ]
        compiled: CompiledSubgraph = standalone_compile(
            module, examples, dynamic_shapes="from_example_inputs", options={"config_patches": dict(patches)}
        )
    return compiled


@dataclass(frozen=True)
class _Run:
    function: CompiledSubgraph
    """The compiled code."""
    reads: tuple[int, ...]
    """Indices of its inputs among the step's values."""
    writes: tuple[int, ...]
    """Indices of its outputs."""


@dataclass(frozen=True)
class _Attend:
    layer: str
    """The layer's name, the key of its plan."""
    recorded: AttentionCall
    """Has the cache, the sinks and the parameters, which are the same in every step."""
    query: int
    """Index of the query among the step's values; likewise the next three."""
    key: int | None
    value: int | None
    output: int

    def call(self, values: Sequence[torch.Tensor | None]) -> AttentionCall:
        """Returns the call with this step's tensors."""
        query, output = values[self.query], values[self.output]
        assert query is not None
        assert output is not None
        key = None if self.key is None else values[self.key]
        value = None if self.value is None else values[self.value]
        recorded = self.recorded
        return AttentionCall(recorded.params, query, key, value, recorded.cache, output, recorded.sinks)


class InductorGraph:
    """A step made of compiled subgraphs. Attention stays a call of the device."""

    def __init__(self, recording: Recording, device: Device, compiler: SubgraphCompiler) -> None:
        """Compiles the subgraphs of new structures.

        Args:
            recording: the step.
            device: runs the attention.
            compiler: shared by all graphs of a model.
        """
        indices: dict[int, int] = {}
        self._device = device
        self._initial: list[torch.Tensor | None] = []

        def index_of(tensor: torch.Tensor, *, constant: bool = True) -> int:
            """Returns the tensor's index among the step's values; a constant is the same in every step."""
            if id(tensor) not in indices:
                indices[id(tensor)] = len(self._initial)
                self._initial.append(tensor if constant else None)
            return indices[id(tensor)]

        self._inputs = tuple(index_of(tensor, constant=False) for tensor in recording.inputs)
        self._steps: list[_Run | _Attend] = []
        for step in partition(recording):
            if isinstance(step, LayerAttention):
                call = step.call
                query, output = index_of(call.query), index_of(call.output)
                key = None if call.key is None else index_of(call.key)
                value = None if call.value is None else index_of(call.value)
                self._steps.append(_Attend(step.layer, call, query, key, value, output))
                continue
            reads = tuple(index_of(tensor) for tensor in step.inputs)
            writes = tuple(index_of(tensor, constant=False) for tensor in step.outputs)
            self._steps.append(_Run(compiler.compile(step), reads, writes))
        self._output = index_of(recording.output)
        self.num_kernels = sum(isinstance(step, _Run) for step in self._steps)
        self.num_bytes = 0

    @torch.inference_mode()
    def replay(self, inputs: Sequence[torch.Tensor], plans: Mapping[str, HasPlan]) -> torch.Tensor:
        """Runs the step; see `replay.KernelGraph.replay`."""
        values = list(self._initial)
        for index, tensor in zip(self._inputs, inputs, strict=True):
            values[index] = tensor
        for step in self._steps:
            if isinstance(step, _Attend):
                self._device.attend_step(step.call(values), plans[step.layer].plan)
                continue
            results = step.function(*[values[index] for index in step.reads])
            for index, result in zip(step.writes, results, strict=True):
                values[index] = result
        output = values[self._output]
        assert output is not None
        return output
