"""Partitioned steps: split at attention, equal in structure if only weights differ, correct if compiled."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from worker_svc.devices.attention import AttentionCall, AttentionParams
from worker_svc.devices.cpu.device import CpuDevice
from worker_svc.graphs.capture import LayerAttention, Recorder, Recording
from worker_svc.graphs.inductor import InductorGraph, Subgraph, SubgraphCompiler, partition
from worker_svc.graphs.replay import build_kernel_graph

PARAMS = AttentionParams(1, 1, 4, 1.0, 0, 0.0, writes=True)


class AddingDevice(CpuDevice):
    """A device: its attention adds its plan to a simple product and to the cache."""

    def attend(self, call: AttentionCall, plan: Any) -> None:
        assert call.key is not None
        assert call.value is not None
        call.cache.add_(plan)
        call.output.copy_(call.query + call.key * call.value + plan)

    def bind_attention(self, call: AttentionCall) -> Callable[[Any], None]:
        return lambda plan: self.attend(call, plan)


@dataclass(frozen=True)
class Metadata:
    """A layer's attention metadata."""

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
            self.recorder.attend(
                f"layer{index}", AttentionCall(PARAMS, query, key, value, self.caches[index], output)
            )
            x = functional.silu(output.view(-1, 4)).mul_(2)
        return x + residual

    def record(self, rows: int) -> Recording:
        inputs = torch.ones(rows, 4)
        self.recorder = Recorder((inputs,))
        with torch.inference_mode(), self.recorder:
            output = self(inputs)
        return self.recorder.finish(output)


def subgraphs(recording: Recording) -> list[Subgraph]:
    return [step for step in partition(recording) if isinstance(step, Subgraph)]


def test_a_step_is_split_at_attention() -> None:
    """Subgraphs and attention alternate, and each subgraph's inputs are known before it runs."""
    recording = Layers(4).record(2)
    steps = partition(recording)
    assert [isinstance(step, LayerAttention) for step in steps] == [False, True] * 4 + [False]
    known = {id(tensor) for tensor in recording.inputs}
    made = {id(call.result) for call in recording.trace if not isinstance(call, LayerAttention)}
    for step in steps:
        if isinstance(step, LayerAttention):
            known.add(id(step.call.output))
            continue
        assert all(id(tensor) in known or id(tensor) not in made for tensor in step.inputs)
        known |= {id(tensor) for tensor in step.outputs}
    assert id(recording.output) in known


def test_layers_that_differ_in_weights_alone_are_one_structure() -> None:
    """Any number of layers has three structures: the first subgraph, those between layers, the last."""
    structures = [subgraph.structure for subgraph in subgraphs(Layers(6).record(2))]
    assert len(structures) == 7
    assert len(set(structures)) == 3
    assert len(set(structures[1:-1])) == 1


@pytest.mark.parametrize("rows", [1, 3])
def test_other_shapes_are_other_structures(rows: int) -> None:
    mine = {subgraph.structure for subgraph in subgraphs(Layers(3).record(2))}
    assert mine.isdisjoint(subgraph.structure for subgraph in subgraphs(Layers(3).record(rows)))


def test_literals_are_part_of_the_structure() -> None:
    def times(factor: float) -> str:
        x = torch.ones(2)
        recorder = Recorder((x,))
        with torch.inference_mode(), recorder:
            y = x * factor
        (subgraph,) = subgraphs(recorder.finish(y))
        return subgraph.structure

    assert times(2.0) == times(2.0)
    assert times(2.0) != times(3.0)


def test_unread_results_are_dropped() -> None:
    x, unused = torch.ones(2), torch.ones(2)
    recorder = Recorder((x,))
    with torch.inference_mode(), recorder:
        _ = unused * 3
        y = x + 1
    (subgraph,) = subgraphs(recorder.finish(y))
    assert [id(tensor) for tensor in subgraph.inputs] == [id(x)]
    assert [node.target for node in subgraph.module.graph.nodes if node.op == "call_function"] == [
        torch.ops.aten.add.Tensor
    ]


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.filterwarnings("ignore")  # the compiler's imports
def test_compiled_subgraphs_compute_what_the_kernels_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    layers = Layers(4)
    recording = layers.record(2)
    compiler = SubgraphCompiler(2)
    compiled, replayed = (
        InductorGraph(recording, AddingDevice(), compiler),
        build_kernel_graph(recording, AddingDevice()),
    )
    assert (compiler.num_structures, compiler.num_misses) == (3, 3)
    for seed in range(3):
        x = torch.randn(2, 4, generator=torch.Generator().manual_seed(seed))
        plans = {f"layer{index}": Metadata(float(index + seed)) for index in range(4)}
        before = [cache.clone() for cache in layers.caches]
        torch.testing.assert_close(compiled.replay((x,), plans), replayed.replay((x,), plans).clone())
        for index, cache in enumerate(layers.caches):
            assert torch.equal(cache, before[index] + 2 * (index + seed))
    InductorGraph(layers.record(2), AddingDevice(), compiler)
    assert compiler.num_misses == 3
    again = SubgraphCompiler(2)
    InductorGraph(layers.record(2), AddingDevice(), again)
    assert (again.num_structures, again.num_misses) == (3, 0)
