"""Compiles a recorded step with TorchInductor: a subgraph between two calls of attention.

Decoder layers differ only in their weights. The subgraphs between their calls of attention are therefore of
the same structure with different inputs, so the compiler runs once for all layers.
"""

import hashlib
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_iter, tree_map

from worker_svc.devices.attention import AttentionCall
from worker_svc.devices.base import Device
from worker_svc.graphs.capture import ALLOCATIONS, LayerAttention, Recording, TracedCall, storage_id


@dataclass(frozen=True)
class Subgraph:
    """The operator calls between two calls of attention."""

    module: fx.GraphModule
    """Takes the inputs in order and returns a tuple of the outputs."""
    inputs: tuple[torch.Tensor, ...]
    """The recorded tensors: constants such as weights, the step's inputs, results of attention and of
    earlier subgraphs.
    """
    outputs: tuple[torch.Tensor, ...]
    """The recorded tensors."""
    structure: str
    """SHA-256 of the whole graph except its inputs' contents."""


def partition(recording: Recording) -> list[Subgraph | LayerAttention]:
    """Splits the step at its calls of attention, in the order in which they run."""
    runs: list[list[TracedCall] | LayerAttention] = [[]]
    for call in recording.trace:
        if isinstance(call, LayerAttention):
            runs += [call, []]
        else:
            assert isinstance(runs[-1], list)
            runs[-1].append(call)
    # A subgraph's outputs are the tensors read by later calls, found from the end.
    read_later = {id(recording.output)}
    needed: list[set[int]] = []
    for run in reversed(runs):
        needed.append(set(read_later))
        calls = [run] if isinstance(run, LayerAttention) else run
        for call in calls:
            read_later |= {id(tensor) for tensor in _read(call)}
    needed.reverse()
    written_by_attention = {storage_id(run.call.output) for run in runs if isinstance(run, LayerAttention)}
    steps: list[Subgraph | LayerAttention] = []
    for run, later in zip(runs, needed, strict=True):
        if isinstance(run, LayerAttention):
            steps.append(run)
        elif run:
            builder = _Builder(written_by_attention)
            for call in run:
                builder.add(call)
            subgraph = builder.build(later)
            if subgraph is not None:
                steps.append(subgraph)
    return steps


def _read(call: TracedCall | LayerAttention) -> list[torch.Tensor]:
    if isinstance(call, LayerAttention):
        return list(call.tensors())
    return [leaf for leaf in tree_iter((call.args, call.kwargs)) if isinstance(leaf, torch.Tensor)]


@dataclass
class _Builder:
    external: set[int]
    """Ids of the storages written by attention and allocated before the step, not by a subgraph."""
    graph: fx.Graph = field(default_factory=fx.Graph)
    """The graph so far."""
    nodes: dict[int, fx.Node] = field(default_factory=dict)
    """The node of each tensor's result, by the tensor's id."""
    made: dict[int, torch.Tensor] = field(default_factory=dict)
    """Tensors computed by the subgraph, by id."""
    inputs: list[torch.Tensor] = field(default_factory=list)
    """Tensors read by the subgraph."""
    placeholders: list[fx.Node] = field(default_factory=list)
    """The nodes of the inputs."""

    def add(self, call: TracedCall) -> None:
        """Appends a call."""
        if call.op.overloadpacket in ALLOCATIONS and storage_id(call.result) in self.external:
            return
        args, kwargs = tree_map(self._as_node, (tuple(call.args), dict(call.kwargs)))
        node = self.graph.call_function(call.op, args, kwargs)
        if isinstance(call.result, torch.Tensor):
            self._name(call.result, node)
        elif isinstance(call.result, (tuple, list)):
            for index, leaf in enumerate(call.result):
                if isinstance(leaf, torch.Tensor):
                    self._name(leaf, self.graph.call_function(operator.getitem, (node, index)))

    def build(self, later: set[int]) -> Subgraph | None:
        """Finishes the subgraph with the outputs for later calls; `None` if it computes nothing."""
        outputs = {key: tensor for key, tensor in self.made.items() if key in later}
        self.graph.output(tuple(self.nodes[key] for key in outputs))
        self.graph.eliminate_dead_code(_has_effect)
        if all(node.op in ("placeholder", "output") for node in self.graph.nodes):
            return None
        inputs = []
        for node, tensor in zip(self.placeholders, self.inputs, strict=True):
            if node.users:
                inputs.append(tensor)
            else:
                self.graph.erase_node(node)
        module = fx.GraphModule(torch.nn.Module(), self.graph)
        return Subgraph(module, tuple(inputs), tuple(outputs.values()), _structure(self.graph, inputs))

    def _name(self, tensor: torch.Tensor, node: fx.Node) -> None:
        if id(tensor) in self.nodes and id(tensor) not in self.made:
            return  # an input, written in place
        self.nodes[id(tensor)] = node
        if storage_id(tensor) not in self.external:
            self.made[id(tensor)] = tensor

    def _as_node(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if id(value) not in self.nodes:
            # Placeholders precede all other nodes, even if they are found later.
            first = next(iter(self.graph.nodes), None)
            at = (
                self.graph.inserting_after(self.placeholders[-1])
                if self.placeholders
                else self.graph.inserting_before(first)
            )
            with at:
                node = self.graph.placeholder(f"input_{len(self.inputs)}")
            self.nodes[id(value)] = node
            self.placeholders.append(node)
            self.inputs.append(value)
        return self.nodes[id(value)]


def _has_effect(node: fx.Node) -> bool:
    if node.op != "call_function":
        return True
    schema = getattr(node.target, "_schema", None)
    return schema is not None and bool(schema.is_mutable)


def _structure(graph: fx.Graph, inputs: Sequence[torch.Tensor]) -> str:
    numbers = {node: index for index, node in enumerate(graph.nodes)}
    lines = [
        f"{tensor.dtype} {list(tensor.shape)} {list(tensor.stride())} {tensor.device}" for tensor in inputs
    ]
    for node in graph.nodes:
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda used: f"%{numbers[used]}")
        lines.append(f"{node.op} {node.target if node.op == 'call_function' else ''} {args!r} {kwargs!r}")
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


CompiledSubgraph = Callable[..., Sequence[torch.Tensor]]
# Above this optimization level, the compiler tries variants of each matrix product.
_UNTUNED = 2


class SubgraphCompiler:
    """Compiles subgraphs, each structure once."""

    num_misses: int
    """Structures missing in the compiler's cache."""

    def __init__(self, level: int) -> None:
        """Compiles nothing yet. Level 3 tries variants of each matrix product and keeps the fastest."""
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
        """Compiles a subgraph to a function from its inputs to its outputs."""
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
    """Holds cache, sinks and parameters, which are the same in every step."""
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
        """Compiles the subgraphs of new structures; all graphs of a model share the compiler."""
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
    def replay(self, inputs: Sequence[torch.Tensor], plans: Mapping[str, Any]) -> torch.Tensor:
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
