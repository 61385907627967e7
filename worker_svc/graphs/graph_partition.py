"""A recorded step as graphs for a compiler: cut at attention, one graph for all cuts of the same structure.

Decoder layers differ in their weights alone. What lies between one layer's attention and the next therefore becomes the same graph
with other inputs, and is compiled once, not once a layer.
"""

import hashlib
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_iter, tree_map

from worker_svc.graphs.capture import ALLOCATIONS, Attention, Ran, Recording, place_of


@dataclass(frozen=True)
class Piece:
    """What runs between two calls of attention."""

    module: fx.GraphModule
    """Takes the inputs in order, returns a tuple of the outputs."""
    inputs: tuple[torch.Tensor, ...]
    """As recorded: weights and other constants, the step's inputs, attention's results and what earlier pieces made."""
    outputs: tuple[torch.Tensor, ...]
    """As recorded."""
    structure: str
    """SHA-256 of everything about the graph but what its inputs hold."""


def cut(recording: Recording) -> list[Piece | Attention]:
    """The step as pieces and attention, in the order in which they run."""
    runs: list[list[Ran] | Attention] = [[]]
    for call in recording.trace:
        if isinstance(call, Attention):
            runs += [call, []]
        else:
            assert isinstance(runs[-1], list)
            runs[-1].append(call)
    # Who needs what, from the end: an output is what something later reads.
    wanted = {id(recording.output)}
    needed: list[set[int]] = []
    for run in reversed(runs):
        needed.append(set(wanted))
        calls = [run] if isinstance(run, Attention) else run
        for call in calls:
            wanted |= {id(tensor) for tensor in _read(call)}
    needed.reverse()
    written_by_attention = {place_of(run.output) for run in runs if isinstance(run, Attention)}
    steps: list[Piece | Attention] = []
    for run, later in zip(runs, needed, strict=True):
        if isinstance(run, Attention):
            steps.append(run)
        elif run:
            builder = _Builder(written_by_attention)
            for call in run:
                builder.add(call)
            piece = builder.piece(later)
            if piece is not None:
                steps.append(piece)
    return steps


def _read(call: Ran | Attention) -> list[torch.Tensor]:
    if isinstance(call, Attention):
        return list(call.tensors())
    return [leaf for leaf in tree_iter((call.args, call.kwargs)) if isinstance(leaf, torch.Tensor)]


@dataclass
class _Builder:
    """Makes one graph of the calls that it is given."""

    elsewhere: set[int]
    """Storages that attention writes. They are made before the step and given to it, not made by a graph."""
    graph: fx.Graph = field(default_factory=fx.Graph)
    nodes: dict[int, fx.Node] = field(default_factory=dict)
    made: dict[int, torch.Tensor] = field(default_factory=dict)
    inputs: list[torch.Tensor] = field(default_factory=list)
    placeholders: list[fx.Node] = field(default_factory=list)

    def add(self, call: Ran) -> None:
        """Appends a call."""
        if call.op.overloadpacket in ALLOCATIONS and place_of(call.result) in self.elsewhere:
            return
        args, kwargs = tree_map(self._given, (tuple(call.args), dict(call.kwargs)))
        node = self.graph.call_function(call.op, args, kwargs)
        if isinstance(call.result, torch.Tensor):
            self._name(call.result, node)
        elif isinstance(call.result, (tuple, list)):
            for index, leaf in enumerate(call.result):
                if isinstance(leaf, torch.Tensor):
                    self._name(leaf, self.graph.call_function(operator.getitem, (node, index)))

    def piece(self, later: set[int]) -> Piece | None:
        """The graph, with those tensors as outputs that are read later; ``None`` if there is nothing to do."""
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
        return Piece(module, tuple(inputs), tuple(outputs.values()), _structure(self.graph, inputs))

    def _name(self, tensor: torch.Tensor, node: fx.Node) -> None:
        if id(tensor) in self.nodes and id(tensor) not in self.made:
            return  # an input, written in place
        self.nodes[id(tensor)] = node
        if place_of(tensor) not in self.elsewhere:
            self.made[id(tensor)] = tensor

    def _given(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if id(value) not in self.nodes:
            # Placeholders come first, whenever they are found to be needed.
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
    """Whether a call does something besides returning a result."""
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
