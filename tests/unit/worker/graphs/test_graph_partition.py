"""Recorded steps as pieces for a compiler: cut at attention, equal where only weights differ, and right when they are compiled."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from worker_svc.devices.base import AttentionShape
from worker_svc.devices.cpu import CpuDevice
from worker_svc.graphs.capture import Attention, Recorder, Recording
from worker_svc.graphs.graph_partition import Piece, cut
from worker_svc.graphs.inductor import Compiler, GeneratedGraph
from worker_svc.graphs.replay import kernels_of

SHAPE = AttentionShape(1, 1, 4, 1.0, 0, 0.0, writes=True)


class Adder(CpuDevice):
    """A device whose attention adds what its plan says, and writes it down in the cache."""

    def attend(
        self,
        shape: AttentionShape,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        cache: torch.Tensor,
        plan: Any,
        output: torch.Tensor,
        sinks: torch.Tensor | None = None,
    ) -> None:
        """See the base class."""
        del shape, sinks
        assert key is not None
        assert value is not None
        cache += plan
        output.copy_(query + key * value + plan)

    def bind_attention(self, *arguments: Any) -> Callable[[Any], None]:
        """See the base class."""
        shape, query, key, value, cache, output, sinks = arguments
        return lambda plan: self.attend(shape, query, key, value, cache, plan, output, sinks)


@dataclass(frozen=True)
class Metadata:
    """A layer's metadata."""

    plan: float


class Layers:
    """Layers of the same shapes, like a decoder's: norm, projection, attention, gate, residual."""

    def __init__(self, count: int) -> None:
        generator = torch.Generator().manual_seed(count)
        self.weights = [torch.randn(4, 12, generator=generator) for _ in range(count)]
        self.norms = [torch.rand(4, generator=generator) for _ in range(count)]
        self.caches = [torch.zeros(1) for _ in range(count)]
        self.recorder: Recorder

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        residual = torch.zeros_like(x)
        for index, (weight, norm) in enumerate(zip(self.weights, self.norms, strict=True)):
            residual = residual + x
            normed = functional.rms_norm(residual, (4,), norm)
            query, key, value = torch.split(normed @ weight, 4, dim=-1)
            output = torch.empty_like(query)
            self.recorder.attend(f"layer{index}", SHAPE, query, key, value, self.caches[index], output)
            x = functional.silu(output.view(-1, 4)).mul_(2)
        return x + residual

    def record(self, rows: int) -> Recording:
        inputs, self.recorder = torch.ones(rows, 4), Recorder()
        with torch.inference_mode(), self.recorder:
            output = self(inputs)
        return self.recorder.finish((inputs,), output)


def pieces(recording: Recording) -> list[Piece]:
    return [step for step in cut(recording) if isinstance(step, Piece)]


def test_a_step_is_cut_at_attention() -> None:
    """Pieces and attention take turns, and what a piece needs, an earlier one gave it, or nobody has to."""
    recording = Layers(4).record(2)
    steps = cut(recording)
    assert [isinstance(step, Attention) for step in steps] == [False, True] * 4 + [False]
    known = {id(tensor) for tensor in recording.inputs}
    made = {id(call.result) for call in recording.trace if not isinstance(call, Attention)}
    for step in steps:
        if isinstance(step, Attention):
            known.add(id(step.output))
            continue
        assert all(id(tensor) in known or id(tensor) not in made for tensor in step.inputs)
        known |= {id(tensor) for tensor in step.outputs}
    assert id(recording.output) in known


def test_layers_that_differ_in_weights_alone_are_one_structure() -> None:
    """The first piece, those between layers, the last: three, however many layers there are."""
    structures = [piece.structure for piece in pieces(Layers(6).record(2))]
    assert len(structures) == 7
    assert len(set(structures)) == 3
    assert len(set(structures[1:-1])) == 1


@pytest.mark.parametrize("rows", [1, 3])
def test_other_shapes_are_other_structures(rows: int) -> None:
    """No code is taken for shapes that it was not made for."""
    mine = {piece.structure for piece in pieces(Layers(3).record(2))}
    assert mine.isdisjoint(piece.structure for piece in pieces(Layers(3).record(rows)))


def test_constants_of_the_graph_are_part_of_its_structure() -> None:
    """A factor in the code is not an input."""

    def times(factor: float) -> str:
        recorder, x = Recorder(), torch.ones(2)
        with torch.inference_mode(), recorder:
            y = x * factor
        (piece,) = pieces(recorder.finish((x,), y))
        return piece.structure

    assert times(2.0) == times(2.0)
    assert times(2.0) != times(3.0)


def test_what_nobody_reads_is_left_out() -> None:
    """Nor are its inputs asked for."""
    recorder, x, unused = Recorder(), torch.ones(2), torch.ones(2)
    with torch.inference_mode(), recorder:
        _ = unused * 3
        y = x + 1
    (piece,) = pieces(recorder.finish((x,), y))
    assert [id(tensor) for tensor in piece.inputs] == [id(x)]
    assert [node.target for node in piece.module.graph.nodes if node.op == "call_function"] == [
        torch.ops.aten.add.Tensor
    ]


@pytest.mark.timeout(180)
@pytest.mark.filterwarnings("ignore")  # the compiler's imports
def test_compiled_pieces_compute_what_the_kernels_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On other inputs and other plans than those recorded; each structure is compiled once; caches are written in each step."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    layers = Layers(4)
    recording = layers.record(2)
    compiler = Compiler(2)
    generated, replayed = GeneratedGraph(recording, Adder(), compiler), kernels_of(recording, Adder())
    assert (compiler.num_structures, compiler.num_misses) == (3, 3)
    for seed in range(3):
        x = torch.randn(2, 4, generator=torch.Generator().manual_seed(seed))
        plans = {f"layer{index}": Metadata(float(index + seed)) for index in range(4)}
        before = [cache.clone() for cache in layers.caches]
        torch.testing.assert_close(generated.replay((x,), plans), replayed.replay((x,), plans).clone())
        for index, cache in enumerate(layers.caches):
            assert torch.equal(cache, before[index] + 2 * (index + seed))
    GeneratedGraph(layers.record(2), Adder(), compiler)
    assert compiler.num_misses == 3
    again = Compiler(2)
    GeneratedGraph(layers.record(2), Adder(), again)
    assert (again.num_structures, again.num_misses) == (3, 0)
