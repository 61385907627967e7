"""Graphs: made before serving, checked against the model, counted when they come late."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from protos.errors import ConfigurationRefused, Internal
from protos.settings import load
from worker_svc.devices import DeviceOptions
from worker_svc.devices.cpu import CpuDevice
from worker_svc.devices.rbln import RblnDevice
from worker_svc.graphs.capture import NotStatic, Recorder, Recording
from worker_svc.graphs.graphs import GraphOptions, Graphs, Signature
from worker_svc.graphs.replay import KernelGraph, kernels_of
from worker_svc.settings import Settings

DECODE = Signature("decode", 4, 1)
TOKENS, POSITIONS = torch.arange(4), torch.arange(4)


class Tripler:
    """A model without layers. Counts how often its own code runs."""

    def __init__(self) -> None:
        self.calls = 0

    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, plans: Mapping[str, Any]
    ) -> torch.Tensor:
        del plans
        self.calls += 1
        return (token_ids * 3 + positions)[:, None]

    def record(self, token_ids: torch.Tensor, positions: torch.Tensor) -> Recording:
        inputs, recorder = (token_ids.clone(), positions.clone()), Recorder()
        with torch.inference_mode(), recorder:
            output = self.forward(*inputs, {})
        return recorder.finish(inputs, output)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden


class Dynamic(Tripler):
    """Its step depends on data."""

    def record(self, token_ids: torch.Tensor, positions: torch.Tensor) -> Recording:
        raise NotStatic("aten.nonzero depends on data")


class Sneaky(Tripler):
    """Its step depends on data, and nothing shows it while it is recorded."""

    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, plans: Mapping[str, Any]
    ) -> torch.Tensor:
        return super().forward(token_ids, positions, plans) * int(token_ids.numpy()[0])


def made(model: Tripler, level: int = 1, *, required: bool = False, strict: bool = False) -> Graphs:
    graphs = Graphs(model, CpuDevice(), GraphOptions(level=level, required=required, strict=strict))
    graphs.make(DECODE, TOKENS, POSITIONS, {})
    graphs.finish()
    return graphs


def test_a_graph_runs_without_the_models_code() -> None:
    """Once it is made, the model is not asked any more."""
    model = Tripler()
    graphs = made(model, required=True, strict=True)
    before = model.calls
    assert graphs.run(DECODE, TOKENS + 1, POSITIONS, {}).flatten().tolist() == [3, 7, 11, 15]
    assert (model.calls, graphs.num_late) == (before, 0)


def test_eager_makes_no_graphs() -> None:
    """Each step is the model's code, and nothing is ever late."""
    model = Tripler()
    graphs = made(model, 0, strict=True)
    assert model.calls == 0
    assert graphs.run(DECODE, TOKENS, POSITIONS, {}).flatten().tolist() == [0, 4, 8, 12]
    assert (model.calls, graphs.num_late) == (1, 0)


def test_a_late_graph_is_counted_and_named(capsys: pytest.CaptureFixture[str]) -> None:
    """Once; what is made already is not late, and what was made in time never is."""
    graphs = made(Tripler())
    late = Signature("prefill", 1, 4)
    for _ in range(2):
        graphs.note_late(late)
        graphs.make(late, TOKENS, POSITIONS, {})
    graphs.note_late(DECODE)
    assert graphs.num_late == 1
    printed = capsys.readouterr().out
    assert printed.count("graph_made_late") == 1
    assert "prefill of 4 tokens" in printed


def test_a_late_graph_is_an_error_in_strict_mode() -> None:
    """It names the signature."""
    graphs = made(Tripler(), strict=True)
    with pytest.raises(Internal, match="decode of 2 rows"):
        graphs.note_late(Signature("decode", 2, 1))
    assert graphs.num_late == 1


def test_a_device_with_a_compiler_of_its_own_is_counted_and_named_all_the_same() -> None:
    """Its graphs are the model's forward; one that it does not compile names its signature."""
    graphs = Graphs(Tripler(), RblnDevice(DeviceOptions(rbln_backend="rbln-check")), GraphOptions(level=1))
    graphs.make(DECODE, TOKENS, POSITIONS, {})
    assert (graphs.has(DECODE), graphs.num_compiled, list(graphs.took)) == (True, 1, [DECODE])
    assert graphs.run(DECODE, TOKENS, POSITIONS, {}).flatten().tolist() == [0, 4, 8, 12]

    class Refused(Tripler):
        def forward(self, *_: Any) -> torch.Tensor:
            raise ConfigurationRefused("rbln-check: operator aten::sort is not lowered")

    refused = Graphs(Refused(), RblnDevice(DeviceOptions(rbln_backend="rbln-check")), GraphOptions(level=1))
    with pytest.raises(ConfigurationRefused, match=r"decode of 4 rows does not compile \(rbln-check: .*sort"):
        refused.make(DECODE, TOKENS, POSITIONS, {})


@pytest.mark.parametrize("model", [Dynamic(), Sneaky()], ids=["dynamic", "sneaky"])
def test_what_is_not_static_runs_as_the_models_code(model: Tripler) -> None:
    """Where that is left to us; with the right result."""
    graphs = made(model)
    expected = model.forward(TOKENS + 2, POSITIONS, {})
    assert torch.equal(graphs.run(DECODE, TOKENS + 2, POSITIONS, {}), expected)


@pytest.mark.parametrize(("required", "strict"), [(True, False), (False, True)])
@pytest.mark.parametrize("model", [Dynamic(), Sneaky()], ids=["dynamic", "sneaky"])
def test_what_is_not_static_is_refused_where_graphs_are_asked_for(
    model: Tripler, required: bool, strict: bool
) -> None:
    """With the signature, the reason and the way out."""
    with pytest.raises(
        ConfigurationRefused, match=r"decode of 4 rows: .*depends on.* data; use --backend eager"
    ):
        made(model, required=required, strict=strict)


def test_code_is_generated_for_the_sizes_that_were_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other buckets replay kernels; a chunk has no size to be named by."""
    lowered: list[str] = []

    def generate(recording: Recording, *_: Any) -> KernelGraph:
        lowered.append(str(len(recording.inputs[0])))
        return kernels_of(recording, CpuDevice())

    monkeypatch.setattr("worker_svc.graphs.graphs.GeneratedGraph", generate)
    graphs = Graphs(Tripler(), CpuDevice(), GraphOptions(level=2, sizes=(2, 8)))
    for bucket in (1, 2, 4, 8):
        tokens = torch.arange(bucket)
        graphs.make(Signature("decode", bucket, 1), tokens, tokens, {})
    graphs.make(Signature("prefill", 1, 16), torch.arange(16), torch.arange(16), {})
    assert lowered == ["2", "8", "16"]
    assert all(graphs.has(Signature("decode", bucket, 1)) for bucket in (1, 2, 4, 8))


def test_a_compiler_that_fails_is_told_with_the_signature(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first line of what it said, and the way out."""

    def fail(*_: Any) -> KernelGraph:
        raise RuntimeError("no registers left\nand a long dump")

    monkeypatch.setattr("worker_svc.graphs.graphs.GeneratedGraph", fail)
    graphs = Graphs(Tripler(), CpuDevice(), GraphOptions(level=2))
    with pytest.raises(ConfigurationRefused) as caught:
        graphs.make(DECODE, TOKENS, POSITIONS, {})
    assert caught.value.message == (
        "the graph for decode of 4 rows does not compile (RuntimeError: no registers left); -O 1 does without a compiler"
    )


@pytest.mark.parametrize(
    ("value", "backend"), [("eager", "eager"), ("inductor", "compiled"), ("sendnn", "compiled"), ("", "auto")]
)
def test_the_names_of_other_stacks_are_understood(
    monkeypatch: pytest.MonkeyPatch, value: str, backend: str
) -> None:
    """vLLM-Spyre's backends, and vLLM-RBLN's strict mode."""
    monkeypatch.setenv("VLLM_SPYRE_DYNAMO_BACKEND", value)
    monkeypatch.setenv("VLLM_RBLN_COMPILE_STRICT_MODE", "1")
    settings = load(Settings, ["--model", "m"])
    assert (settings.backend, settings.compile_strict) == (backend, True)


def test_an_unknown_backend_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """In one line that names the setting."""
    monkeypatch.setenv("VLLM_SPYRE_DYNAMO_BACKEND", "magic")
    with pytest.raises(ConfigurationRefused, match="--backend"):
        load(Settings, ["--model", "m"])
