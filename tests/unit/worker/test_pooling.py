"""Pooling models without real layers: plans, checks, phases, graphs and life cycle."""

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from protos.errors import ConfigurationRefused, Internal
from protos.steps import Admission, Pool, PoolShape, Prefill, SlotOutput, StepPlan
from tests.support.attention import naive_attention
from tests.support.sampling_params import pooling_params, sampling_params
from tests.support.worker.layerless import POISON, Echo, PlainDevice
from worker_svc.devices import open_device
from worker_svc.devices.attention import AttentionCall, AttentionParams
from worker_svc.devices.base import Device
from worker_svc.execution.engine import Engine
from worker_svc.execution.memory_budget import MemoryBudget
from worker_svc.graphs.compilation import Compilation, graph_options
from worker_svc.graphs.graph_runner import GraphOptions
from worker_svc.phases import Phases
from worker_svc.pooling import PoolRunner, pool_rows
from worker_svc.settings import Settings
from worker_svc.shapes import (
    ModelDescription,
    PoolingDescription,
    PoolingMethod,
    PoolShapeConfig,
    ShapeConfig,
)

SHAPES = (PoolShape(4, 1), PoolShape(4, 3), PoolShape(8, 2))


def make_runner(
    model: Echo | None = None,
    *,
    normalize: bool = False,
    method: PoolingMethod = "MEAN",
    device: Device | None = None,
    level: int = 1,
    strict: bool = False,
) -> PoolRunner:
    description = PoolingDescription(method, 2, activates=normalize)
    options = GraphOptions(level=level, required=True, strict=strict)
    return PoolRunner(
        model or Echo(), device or open_device("cpu"), description, PoolShapeConfig(SHAPES), options
    )


def admission(slot: int, tokens: list[int], *, normalize: bool | None = None) -> Admission:
    return Admission(slot, tokens, 0, sampling_params(), {}, pooling=pooling_params(normalize))


def run(runner: PoolRunner, *prompts: list[int], shape: PoolShape = SHAPES[1]) -> list[SlotOutput]:
    admit = [admission(slot, prompt) for slot, prompt in enumerate(prompts)]
    return runner.execute(StepPlan(1, admit=admit, work=Pool(range(len(prompts)), shape)))


@pytest.mark.parametrize(
    ("method", "rows"),
    [
        ("MEAN", [[6, 1], [4, 0.5]]),
        ("CLS", [[5, 0], [3, 0]]),
        ("LAST", [[7, 2], [5, 1]]),
        ("ALL", [[5, 0, 6, 1, 7, 2], [3, 0, 5, 1]]),
    ],
)
def test_only_real_tokens_are_pooled(method: PoolingMethod, rows: list[list[float]]) -> None:
    outputs = run(make_runner(Echo(method), method=method), [5, 6, 7], [3, 5])
    assert [list(output.pooled) for output in outputs] == rows


def test_a_request_overrides_the_models_normalization() -> None:
    runner = make_runner(normalize=True)
    choices = (None, False, True)
    admit = [admission(slot, [3, 3, 3], normalize=choice) for slot, choice in enumerate(choices)]
    outputs = runner.execute(StepPlan(1, admit=admit, work=Pool((0, 1, 2), SHAPES[1])))
    lengths = [math.hypot(*output.pooled) for output in outputs]
    assert lengths == pytest.approx([1, math.hypot(3, 1), 1])


def test_a_row_that_is_not_finite_fails_alone() -> None:
    first, bad, last = run(make_runner(), [5], [POISON], [7])
    assert (list(first.pooled), list(last.pooled)) == ([5, 0], [7, 0])
    assert isinstance(bad.error, Internal)
    assert not bad.pooled


def test_a_refused_admission_fails_alone() -> None:
    refused, good = run(make_runner(), [1] * 9, [7])
    assert "1 to 8 fit" in str(refused.error)
    assert (good.slot, list(good.pooled)) == (1, [7, 0])


def test_slots_are_released_and_taken_again() -> None:
    runner = make_runner()
    run(runner, [1], [2])
    plan = StepPlan(2, release=(0, 1), admit=[admission(0, [8])], work=Pool((0,), SHAPES[0]))
    assert [list(output.pooled) for output in runner.execute(plan)] == [[8, 0]]


@pytest.mark.parametrize(
    ("work", "text"),
    [
        (Pool((0,), PoolShape(7, 7)), "pools 1 slots in 7x7 tokens"),
        (Pool((0, 1), SHAPES[0]), "pools 2 slots in 1x4 tokens"),
        (Pool((0, 0), SHAPES[1]), "names a slot twice"),
        (Pool((2,), SHAPES[1]), "slot 2, which is free"),
        (Pool((1,), SHAPES[1]), "slot 1 has 5 tokens; a row holds 4"),
        (Prefill(0, 0, 1, sample=True), "this is a pooling model"),
    ],
)
def test_a_plan_that_does_not_fit_fails_whole(work: Pool | Prefill, text: str) -> None:
    runner = make_runner()
    admit = [admission(0, [1]), admission(1, [1] * 5)]
    with pytest.raises(Internal, match=text):
        runner.execute(StepPlan(1, admit=admit, work=work))


def test_every_shape_is_a_graph_before_serving() -> None:
    """Once graphs are made and warmed up, no step runs the model's own code, and none is late."""
    model = Echo()
    runner = make_runner(model, strict=True)
    named: list[str] = []
    runner.make_graphs(lambda _done, _total, what: named.append(what))
    assert named[:-1] == [
        "pooling of 1 row of 4 tokens", "pooling of 3 rows of 4 tokens", "pooling of 2 rows of 8 tokens"
    ]  # fmt: skip
    runner.warm_up(lambda *_: None)
    runner.graphs.finish_warm_up(made_all=True)
    assert all(runner.graphs.has(signature) for signature in runner.signatures())
    assert runner.graphs.checked == set(named[:-1])
    before = len(model.forwards)
    assert [list(output.pooled) for output in run(runner, [5, 6, 7], [3, 5])] == [[6, 1], [4, 0.5]]
    assert [list(output.pooled) for output in run(runner, shape=SHAPES[1])] == []
    assert (len(model.forwards), runner.graphs.num_late) == (before, 0)


def test_eager_runs_the_models_code_in_every_step() -> None:
    """At level 0 there are no graphs, and warm-up runs each shape once, on padding only."""
    model = Echo()
    runner = make_runner(model, level=0)
    runner.make_graphs(lambda *_: None)
    assert model.forwards == []
    runner.warm_up(lambda *_: None)
    assert model.forwards == [(shape.batch, shape.prompt_len) for shape in SHAPES]
    assert not any(runner.graphs.has(signature) for signature in runner.signatures())


def test_without_warm_up_the_first_step_makes_its_graph_late() -> None:
    model = Echo()
    runner = make_runner(model)
    runner.graphs.finish_warm_up(made_all=False)
    for _ in range(2):
        assert [list(output.pooled) for output in run(runner, [5, 6, 7])] == [[6, 1]]
        runner.reset()
    assert runner.graphs.num_late == 1


class Lengthy(Echo):
    """A model whose result depends on the longest text, which a recording does not show."""

    def __init__(self) -> None:
        super().__init__()
        self.planned: list[tuple[list[int], int | None]] = []

    def row_plans(self, lengths: torch.Tensor, row_len: int | None) -> dict[str, Any]:
        self.planned.append((lengths.tolist(), row_len))
        return {}

    def forward(self, token_ids: torch.Tensor, places: torch.Tensor, *_: Any) -> torch.Tensor:
        return token_ids[:, None].float() * int(places[0].numpy().max())


@pytest.mark.parametrize(
    ("shape", "short", "full"),
    [
        (PoolShape(11, 3, packed=True), [1, 1, 1], [5, 3, 3]),
        (PoolShape(2, 4, packed=True), [1, 1, 0, 0], [1, 1, 0, 0]),
        (PoolShape(8, 1, packed=True), [1], [8]),
        (PoolShape(8, 2), [1, 1], [8, 8]),
    ],
)
def test_graphs_are_compared_on_longer_texts(shape: PoolShape, short: list[int], full: list[int]) -> None:
    model, options = Lengthy(), GraphOptions(required=True)
    description = PoolingDescription("MEAN", 1, activates=False)
    runner = PoolRunner(model, open_device("cpu"), description, PoolShapeConfig((shape,)), options)
    row_len = None if shape.packed else shape.prompt_len
    if short == full:
        runner.make_graphs(lambda *_: None)
    else:
        with pytest.raises(ConfigurationRefused, match="a replay differs from the model's own forward"):
            runner.make_graphs(lambda *_: None)
    assert model.planned == [(short, row_len), (full, row_len)]


class CountingDevice(PlainDevice):
    """A device that captures, on the CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def capture(
        self, function: Callable[..., tuple[torch.Tensor, ...]], examples: Sequence[torch.Tensor]
    ) -> Callable[..., tuple[torch.Tensor, ...]]:
        assert [tuple(each.shape) for each in examples][1:] in [[(2, 1)], [(2, 3)], [(2, 2)]]

        def captured(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
            self.calls += 1
            return function(*tensors)

        return captured


def test_steps_are_captured_where_the_device_captures() -> None:
    """Each shape is captured once, from token ids and lengths to embeddings."""
    device = CountingDevice()
    runner = make_runner(device=device)
    runner.make_graphs(lambda *_: None)
    assert [list(output.pooled) for output in run(runner, [5, 6, 7], [3, 5])] == [[6, 1], [4, 0.5]]
    assert device.calls == 1


@pytest.mark.parametrize(
    ("shapes", "text"),
    [
        (PoolShapeConfig(()), "at least one shape"),
        (PoolShapeConfig((PoolShape(4, 0),)), "0 rows of 4"),
        (PoolShapeConfig((PoolShape(65, 1),)), "1 to 64"),
    ],
)
def test_shapes_that_cannot_run_are_refused(shapes: PoolShapeConfig, text: str) -> None:
    with pytest.raises(ConfigurationRefused, match=text):
        shapes.check(longest_context=64)


@pytest.mark.parametrize(("causal", "window"), [(False, 0), (False, 2), (True, 0), (True, 2)])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_rows_attend_as_each_would_alone(causal: bool, kv_heads: int, window: int) -> None:
    """Batched attention equals naive attention over each row's real tokens."""
    torch.manual_seed(0)
    lengths, row_len, heads, size = [5, 1, 3], 5, 4, 8
    shape = AttentionParams(heads, kv_heads, size, 0.3, window, 0.0, writes=True, causal=causal)
    query, key, value = (torch.randn(len(lengths) * row_len, n, size) for n in (heads, kv_heads, kv_heads))
    output = torch.full_like(query, math.nan)
    device = open_device("cpu")
    plan = device.plan_rows(torch.tensor(lengths), row_len, shape)
    call = AttentionCall(shape, query, key, value, torch.empty(0), output)
    device.attend_step(call, plan)
    assert not output.isnan().any()
    for row, length in enumerate(lengths):
        check_text(call, slice(row * row_len, row * row_len + length))


@pytest.mark.parametrize(("causal", "window"), [(False, 0), (True, 2)])
@pytest.mark.parametrize("kv_heads", [1, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_packed_texts_attend_as_each_would_alone(
    causal: bool, kv_heads: int, window: int, dtype: torch.dtype
) -> None:
    """Texts of several padded lengths, one without tokens, and padding. Outputs may have their own type."""
    torch.manual_seed(0)
    lengths, tokens, heads, size = [5, 40, 1, 33, 0], 90, 4, 8
    shape = AttentionParams(heads, kv_heads, size, 0.3, window, 0.0, writes=True, causal=causal)
    query, key, value = (torch.randn(tokens, n, size) for n in (heads, kv_heads, kv_heads))
    output = torch.full_like(query, math.nan, dtype=dtype)
    device = open_device("cpu")
    call = AttentionCall(shape, query, key, value, torch.empty(0), output)
    device.attend_step(call, device.plan_packed(torch.tensor(lengths), shape))
    start = 0
    for length in lengths:
        check_text(call, slice(start, start + length))
        start += length
    assert torch.equal(output[start:], torch.zeros_like(output[start:]))


def check_text(call: AttentionCall, real: slice) -> None:
    """Compares the outputs of a text's tokens with naive attention over them alone."""
    assert call.key is not None
    assert call.value is not None
    expected = naive_attention(call.params, call.query[real], call.key[real], call.value[real])
    assert torch.allclose(call.output[real].float(), expected, atol=1e-6)


def test_mean_of_half_precision_is_taken_in_full() -> None:
    """The mean is computed in float32, as a sum of many halves would round."""
    hidden = torch.full((1, 4096, 1), 1.0009765625, dtype=torch.float16)
    assert pool_rows(hidden, torch.tensor([4096]), "MEAN").item() == 1.0009765625


SMALL_SHAPES = PoolShapeConfig((PoolShape(prompt_len=4, batch=1), PoolShape(prompt_len=8, batch=2)))
DESCRIPTION = ModelDescription(
    architecture="EchoModel",
    vocab_size=100,
    max_model_len=8,
    eos_token_ids=(),
    dtype=torch.float32,
    quantization=None,
    layers=(),
    pooling=PoolingDescription("MEAN", 2, activates=False),
    default_sampling={},
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The files of a model without weights."""
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["EchoModel"]}))
    return tmp_path


def make_engine(
    model: Echo, folder: Path, *, level: int = 1, warm_up: bool = True, refuse: bool = False
) -> Engine:
    def check_memory(_: PoolShapeConfig) -> None:
        if refuse:
            raise ConfigurationRefused("too large")

    device = open_device("cpu")
    settings = Settings(
        model="echo", optimization_level=level, enable_warm_up=warm_up, compile_cache_dir=folder / "cache"
    )
    options = graph_options(settings, device)
    compilation = Compilation(settings, device, options, folder=folder, description=DESCRIPTION, groups=())
    budget = cast("MemoryBudget", SimpleNamespace(check_pooling=check_memory))
    return Engine(model, device, DESCRIPTION, (), budget=budget, compilation=compilation, options=options)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (ShapeConfig(8, 1, 8, 8, (1,)), "EchoModel is a pooling model; configure it with pool_shapes"),
        (PoolShapeConfig((PoolShape(prompt_len=9, batch=1),)), "1 to 8 tokens"),
    ],
    ids=["of a generating model", "beyond the context"],
)
def test_other_sizes_are_refused(sizes: ShapeConfig | PoolShapeConfig, message: str, folder: Path) -> None:
    with pytest.raises(ConfigurationRefused, match=message):
        make_engine(Echo(), folder).check(sizes)


@pytest.mark.parametrize("warm_up", [True, False])
def test_starting_loads_and_makes_every_graph(warm_up: bool, folder: Path) -> None:
    """Weights are loaded first; every phase that ran is timed; warm-up is optional."""
    model = Echo()
    events: list[str] = []
    phases = Phases(lambda *event: events.append(event[0]))
    engine = make_engine(model, folder, warm_up=warm_up)
    assert engine.start(engine.check(SMALL_SHAPES), lambda: events.append("loaded"), phases) == SMALL_SHAPES
    assert events[0] == "loaded"
    made = ["compile", "warm_up"] if warm_up else []
    assert set(events[1:]) == set(made)
    assert list(phases.seconds) == ["load", "allocate", *made]
    # Each graph is recorded, and compared with the model.
    assert len(model.forwards) == (4 if warm_up else 0)
    assert not engine.launch(StepPlan(1)).outputs


def test_graphs_that_an_earlier_start_compared_are_only_recorded(folder: Path) -> None:
    """The second start with the same shapes runs the model's code once for each; other shapes are new."""

    def runs_at_start(shapes: PoolShapeConfig) -> int:
        model = Echo()
        make_engine(model, folder).start(shapes, lambda: None, Phases(lambda *_: None))
        return len(model.forwards)

    assert [runs_at_start(SMALL_SHAPES), runs_at_start(SMALL_SHAPES)] == [4, 2]
    assert runs_at_start(PoolShapeConfig(SMALL_SHAPES.pool_shapes[:1])) == 2


def test_only_a_started_engine_executes(folder: Path) -> None:
    engine = make_engine(Echo(), folder, refuse=True)
    with pytest.raises(ConfigurationRefused, match="too large"):
        engine.start(SMALL_SHAPES, lambda: None, Phases(lambda *_: None))
    with pytest.raises(Internal, match="not configured"):
        engine.launch(StepPlan(1))
    engine = make_engine(Echo(), folder, warm_up=False)
    engine.start(SMALL_SHAPES, lambda: None, Phases(lambda *_: None))
    engine.release()
    engine.reset()
    with pytest.raises(Internal, match="not configured"):
        engine.launch(StepPlan(2))
