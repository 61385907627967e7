"""Graphs are built before serving, compared with the model, and counted when they are late."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from protos.errors import ConfigurationRefused, Internal
from worker_svc.devices.cpu.device import CpuDevice
from worker_svc.devices.rbln.device import RblnDevice
from worker_svc.devices.registry import DeviceOptions
from worker_svc.graphs.capture import NotStatic, Recorder, Recording
from worker_svc.graphs.graph_runner import GraphOptions, GraphRunner, GraphSignature
from worker_svc.graphs.replay import KernelGraph, build_kernel_graph

DECODE = GraphSignature("decode", 4, 1)
TOKENS, POSITIONS = torch.arange(4), torch.arange(4)


class TriplingModel:
    """A model without layers that counts how often its own code runs."""

    def __init__(self) -> None:
        self.calls = 0

    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, plans: Mapping[str, Any], *_: torch.Tensor
    ) -> torch.Tensor:
        del plans
        self.calls += 1
        return (token_ids * 3 + positions)[:, None]

    def record(self, token_ids: torch.Tensor, positions: torch.Tensor, *_: torch.Tensor) -> Recording:
        inputs = (token_ids.clone(), positions.clone())
        recorder = Recorder(inputs)
        with torch.inference_mode(), recorder:
            output = self.forward(*inputs, {})
        return recorder.finish(output)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden


class Dynamic(TriplingModel):
    """A model with a step that depends on data."""

    def record(self, token_ids: torch.Tensor, positions: torch.Tensor, *_: torch.Tensor) -> Recording:
        raise NotStatic("aten.nonzero depends on data")


class HiddenDynamic(TriplingModel):
    """A model with a step that depends on data in a way that a recording does not show."""

    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, plans: Mapping[str, Any], *_: torch.Tensor
    ) -> torch.Tensor:
        return super().forward(token_ids, positions, plans) * int(token_ids.numpy()[0])


def built(
    model: TriplingModel, level: int = 1, *, required: bool = False, strict: bool = False, warm: bool = True
) -> GraphRunner:
    graphs = GraphRunner(model, CpuDevice(), GraphOptions(level=level, required=required, strict=strict))
    graphs.build(DECODE, TOKENS, POSITIONS, {})
    graphs.finish_warm_up(made_all=warm)
    return graphs


def test_a_graph_that_an_earlier_process_compared_is_only_recorded() -> None:
    """Building it runs the model's code once instead of twice, and it counts as compared again."""
    new, known = TriplingModel(), TriplingModel()
    for model, checked in ((new, frozenset[str]()), (known, frozenset({str(DECODE)}))):
        graphs = GraphRunner(model, CpuDevice(), GraphOptions(required=True, checked=checked))
        graphs.build(DECODE, TOKENS, POSITIONS, {})
        assert graphs.checked == {str(DECODE)}
        assert torch.equal(graphs.run(DECODE, TOKENS, POSITIONS, {}), (TOKENS * 3 + POSITIONS)[:, None])
    assert (new.calls, known.calls) == (2, 1)


def test_a_graph_runs_without_the_models_code() -> None:
    model = TriplingModel()
    graphs = built(model, required=True, strict=True)
    before = model.calls
    assert graphs.run(DECODE, TOKENS + 1, POSITIONS, {}).flatten().tolist() == [3, 7, 11, 15]
    assert (model.calls, graphs.num_late) == (before, 0)


def test_eager_builds_no_graphs() -> None:
    model = TriplingModel()
    graphs = built(model, 0, strict=True)
    assert model.calls == 0
    assert graphs.run(DECODE, TOKENS, POSITIONS, {}).flatten().tolist() == [0, 4, 8, 12]
    assert (model.calls, graphs.num_late) == (1, 0)


def test_a_late_graph_is_counted_and_named(capsys: pytest.CaptureFixture[str]) -> None:
    graphs = built(TriplingModel())
    late = GraphSignature("prefill", 1, 4)
    for _ in range(2):
        graphs.count_late(late)
        graphs.build(late, TOKENS, POSITIONS, {})
    graphs.count_late(DECODE)
    assert graphs.num_late == 1
    printed = capsys.readouterr().out
    assert printed.count("graph_built_late") == 1
    assert "prefill of 4 tokens" in printed


def test_a_late_graph_is_an_error_in_strict_mode() -> None:
    graphs = built(TriplingModel(), strict=True)
    with pytest.raises(Internal, match="decode of 2 rows"):
        graphs.count_late(GraphSignature("decode", 2, 1))
    assert graphs.num_late == 1


def test_without_warm_up_a_late_graph_is_no_error_in_strict_mode() -> None:
    graphs = built(TriplingModel(), strict=True, warm=False)
    late = GraphSignature("decode", 2, 1)
    graphs.count_late(late)
    graphs.build(late, TOKENS[:2], POSITIONS[:2], {})
    assert (graphs.has(late), graphs.num_late) == (True, 1)


def test_a_device_with_its_own_compiler_is_counted_and_named() -> None:
    """The device's graph is the model's forward, which runs once. Refusals by its compiler name the graph."""
    steps: list[object] = []
    device = RblnDevice(DeviceOptions(rbln_backend="rbln-check"))

    class Compiled(TriplingModel):
        def forward(
            self, token_ids: torch.Tensor, positions: torch.Tensor, plans: Mapping[str, Any], *_: torch.Tensor
        ) -> torch.Tensor:
            compute = super().forward
            steps.append(token_ids)
            return device.compile(lambda tokens, places: compute(tokens, places, plans))(token_ids, positions)

    graphs = GraphRunner(Compiled(), device, GraphOptions(level=1), logits=lambda _: steps.append("logits"))
    assert graphs.takes_plans(DECODE)
    graphs.build(DECODE, TOKENS, POSITIONS, {})
    assert [type(each) for each in steps] == [torch.Tensor, str]
    assert not graphs.takes_plans(DECODE)
    assert (graphs.has(DECODE), graphs.num_compiled, list(graphs.build_times)) == (True, 1, [DECODE])
    assert graphs.run(DECODE, TOKENS, POSITIONS, {}).flatten().tolist() == [0, 4, 8, 12]

    class Refused(TriplingModel):
        def forward(self, *_: Any) -> torch.Tensor:
            raise ConfigurationRefused("rbln-check: operator aten::sort is not lowered")

    refused = GraphRunner(
        Refused(), RblnDevice(DeviceOptions(rbln_backend="rbln-check")), GraphOptions(level=1)
    )
    with pytest.raises(ConfigurationRefused, match=r"decode of 4 rows does not compile \(rbln-check: .*sort"):
        refused.build(DECODE, TOKENS, POSITIONS, {})


@pytest.mark.parametrize("model", [Dynamic(), HiddenDynamic()], ids=["dynamic", "hidden"])
def test_a_dynamic_step_runs_the_models_code(model: TriplingModel) -> None:
    """Without a graph a step gives the model's own result, unless the options require graphs."""
    graphs = built(model)
    expected = model.forward(TOKENS + 2, POSITIONS, {})
    assert torch.equal(graphs.run(DECODE, TOKENS + 2, POSITIONS, {}), expected)


@pytest.mark.parametrize(("required", "strict"), [(True, False), (False, True)])
@pytest.mark.parametrize("model", [Dynamic(), HiddenDynamic()], ids=["dynamic", "hidden"])
def test_a_dynamic_step_is_refused_if_graphs_are_required(
    model: TriplingModel, required: bool, strict: bool
) -> None:
    with pytest.raises(
        ConfigurationRefused, match=r"decode of 4 rows: .*depends on.* data; use --backend eager"
    ):
        built(model, required=required, strict=strict)


def test_code_is_compiled_for_the_configured_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decode buckets that are not in `sizes` replay kernels; chunks are always compiled."""
    lowered: list[str] = []

    def compile_(recording: Recording, *_: Any) -> KernelGraph:
        lowered.append(str(len(recording.inputs[0])))
        return build_kernel_graph(recording, CpuDevice())

    monkeypatch.setattr("worker_svc.graphs.graph_runner.InductorGraph", compile_)
    graphs = GraphRunner(TriplingModel(), CpuDevice(), GraphOptions(level=2, sizes=(2, 8)))
    for bucket in (1, 2, 4, 8):
        tokens = torch.arange(bucket)
        graphs.build(GraphSignature("decode", bucket, 1), tokens, tokens, {})
    graphs.build(GraphSignature("prefill", 1, 16), torch.arange(16), torch.arange(16), {})
    assert lowered == ["2", "8", "16"]
    assert all(graphs.has(GraphSignature("decode", bucket, 1)) for bucket in (1, 2, 4, 8))


class Widened(TriplingModel):
    """A model that computes in a narrow type and returns float32, as embeddings are."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype = dtype

    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, plans: Mapping[str, Any], *_: torch.Tensor
    ) -> torch.Tensor:
        return super().forward(token_ids, positions, plans).to(self._dtype).float()


@pytest.mark.parametrize(("dtype", "agrees"), [(torch.bfloat16, True), (torch.float32, False)])
def test_compiled_kernels_may_round_as_the_steps_narrowest_numbers(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, agrees: bool
) -> None:
    """A result that is off by one per cent is rounding in bfloat16, and another result in float32."""
    model = Widened(dtype)

    class Rounding:
        num_kernels = num_bytes = 0

        def __init__(self, *_: Any) -> None:
            """Compiles nothing."""

        def replay(self, inputs: tuple[torch.Tensor, torch.Tensor], plans: Mapping[str, Any]) -> torch.Tensor:
            return model.forward(*inputs, plans) * 1.01

    monkeypatch.setattr("worker_svc.graphs.graph_runner.InductorGraph", Rounding)
    assert built(model, 2).has(DECODE) == agrees


def test_a_compiler_error_names_the_signature(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> KernelGraph:
        raise RuntimeError("no registers left\nand a long dump")

    monkeypatch.setattr("worker_svc.graphs.graph_runner.InductorGraph", fail)
    graphs = GraphRunner(TriplingModel(), CpuDevice(), GraphOptions(level=2))
    with pytest.raises(ConfigurationRefused) as caught:
        graphs.build(DECODE, TOKENS, POSITIONS, {})
    assert caught.value.message == (
        "the graph for decode of 4 rows does not compile (RuntimeError: no registers left); use -O 1,"
        " which needs no compiler"
    )
