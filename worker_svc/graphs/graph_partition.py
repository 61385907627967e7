"""Partitions a recorded step into graphs for a compiler: a subgraph between two calls of attention.

Decoder layers differ only in their weights. The subgraphs between their calls of attention therefore have
the same structure and differ in their inputs, so the compiler runs once for all layers.
"""

import hashlib
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_iter, tree_map

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
    """Splits the step at its calls of attention.

    Returns subgraphs and attention in the order in which they run.
    """
    runs: list[list[TracedCall] | LayerAttention] = [[]]
    for call in recording.trace:
        if isinstance(call, LayerAttention):
            runs += [call, []]
        else:
            assert isinstance(runs[-1], list)
            runs[-1].append(call)
    # A subgraph's outputs are the tensors that later calls read, found from the end.
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
    """Ids of the storages that attention writes. They are allocated before the step, so no subgraph
    allocates them.
    """
    graph: fx.Graph = field(default_factory=fx.Graph)
    """The graph so far."""
    nodes: dict[int, fx.Node] = field(default_factory=dict)
    """By id of a tensor, the node that computes it."""
    made: dict[int, torch.Tensor] = field(default_factory=dict)
    """Tensors that the subgraph computes, by id."""
    inputs: list[torch.Tensor] = field(default_factory=list)
    """Tensors that the subgraph reads."""
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
        """Finishes the subgraph; `None` if it would compute nothing.

        Args:
            later: ids of the tensors that later calls read; they become outputs.
        """
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
            return  # an input that the call writes in place
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
