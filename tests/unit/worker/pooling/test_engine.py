"""The pooling engine: checks, phases, graphs and life cycle, without a real model."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from protos.errors import ConfigurationRefused, Internal
from protos.steps import PoolShape, StepPlan
from tests.support.worker.layerless import Echo
from worker_svc.devices import open_device
from worker_svc.execution.engine import PoolingEngine
from worker_svc.execution.memory_budget import MemoryBudget
from worker_svc.graphs.compilation import Compilation, graph_options
from worker_svc.graphs.compile_cache import MANIFEST
from worker_svc.phases import Phases
from worker_svc.settings import Settings
from worker_svc.shapes import ModelDescription, PoolingDescription, PoolShapeConfig, ShapeConfig

SHAPES = PoolShapeConfig((PoolShape(prompt_len=4, batch=1), PoolShape(prompt_len=8, batch=2)))
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
) -> PoolingEngine:
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
    return PoolingEngine(model, device, DESCRIPTION, budget=budget, compilation=compilation, options=options)


def test_sizes_of_a_generating_model_are_refused(folder: Path) -> None:
    """The refusal names the architecture and what it needs instead."""
    with pytest.raises(
        ConfigurationRefused, match="EchoModel is a pooling model; configure it with pool_shapes"
    ):
        make_engine(Echo(), folder).check(ShapeConfig(8, 1, 8, 8, (1,)))


def test_shapes_beyond_the_context_are_refused(folder: Path) -> None:
    """The engine checks shapes against the model's context."""
    with pytest.raises(ConfigurationRefused, match="1 to 8 tokens"):
        make_engine(Echo(), folder).check(PoolShapeConfig((PoolShape(prompt_len=9, batch=1),)))


@pytest.mark.parametrize("warm_up", [True, False])
def test_starting_loads_and_makes_every_graph(warm_up: bool, folder: Path) -> None:
    """Weights are loaded first; every phase that ran is timed; warm-up is optional."""
    model = Echo()
    events: list[str] = []
    phases = Phases(lambda *event: events.append(event[0]))
    engine = make_engine(model, folder, warm_up=warm_up)
    assert engine.start(engine.check(SHAPES), lambda: events.append("loaded"), phases) == SHAPES
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

    assert [runs_at_start(SHAPES), runs_at_start(SHAPES)] == [4, 2]
    assert runs_at_start(PoolShapeConfig(SHAPES.pool_shapes[:1])) == 2


@pytest.mark.slow
def test_compiled_code_is_kept_and_found(folder: Path) -> None:
    """The first start compiles each shape and keeps the code; the second finds it and compiles nothing."""
    first = make_engine(Echo(), folder, level=2)
    assert (first.num_compiled, first.code_folder) == (0, None)
    first.start(SHAPES, lambda: None, Phases(lambda *_: None))
    assert first.num_compiled == len(SHAPES.pool_shapes)
    kept = first.code_folder
    assert kept is not None
    manifest = json.loads((kept / MANIFEST).read_text())
    assert manifest["graphs"] == ["pooling of 1 row of 4 tokens", "pooling of 2 rows of 8 tokens"]
    first.release()
    assert (first.num_compiled, first.code_folder) == (0, None)
    second = make_engine(Echo(), folder, level=2)
    second.start(SHAPES, lambda: None, Phases(lambda *_: None))
    assert (second.num_compiled, second.code_folder) == (0, kept)


def test_only_a_started_engine_executes(folder: Path) -> None:
    """A refused start and a release both leave the engine without a runner."""
    engine = make_engine(Echo(), folder, refuse=True)
    with pytest.raises(ConfigurationRefused, match="too large"):
        engine.start(SHAPES, lambda: None, Phases(lambda *_: None))
    with pytest.raises(Internal, match="not configured"):
        engine.launch(StepPlan(1))
    engine = make_engine(Echo(), folder, warm_up=False)
    engine.start(SHAPES, lambda: None, Phases(lambda *_: None))
    engine.release()
    engine.reset()
    with pytest.raises(Internal, match="not configured"):
        engine.launch(StepPlan(2))
