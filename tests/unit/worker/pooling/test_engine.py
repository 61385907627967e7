"""The pooling engine: checks, phases and life cycle, without a real model."""

import pytest
import torch

from protos.errors import ConfigurationRefused, Internal
from protos.steps import PoolShape, StepPlan
from tests.support.worker.layerless import Echo
from worker_svc.devices import open_device
from worker_svc.phases import Phases
from worker_svc.pooling.engine import PoolingEngine
from worker_svc.shapes.geometry import Geometry, PoolGeometry
from worker_svc.shapes.model_description import ModelDescription, PoolingDescription

GEOMETRY = PoolGeometry((PoolShape(prompt_len=4, batch=1), PoolShape(prompt_len=8, batch=2)))
DESCRIPTION = ModelDescription(
    architecture="EchoModel",
    vocab_size=100,
    max_model_len=8,
    eos_token_ids=(),
    dtype=torch.float32,
    quantization=None,
    layers=(),
    pooling=PoolingDescription("MEAN", normalize=False, size=2),
    default_sampling={},
)


def make_engine(model: Echo, *, warm_up: bool = True, refuse: bool = False) -> PoolingEngine:
    def check_memory(_: PoolGeometry) -> None:
        if refuse:
            raise ConfigurationRefused("too large")

    return PoolingEngine(model, open_device("cpu"), DESCRIPTION, check_memory=check_memory, warm_up=warm_up)


def test_sizes_of_a_generating_model_are_refused() -> None:
    """The refusal names the architecture and what it needs instead."""
    with pytest.raises(
        ConfigurationRefused, match="EchoModel is a pooling model; configure it with pool_shapes"
    ):
        make_engine(Echo()).check(Geometry(8, 1, 8, 8, (1,)))


def test_shapes_beyond_the_context_are_refused() -> None:
    """The engine checks shapes against the model's context."""
    with pytest.raises(ConfigurationRefused, match="1 to 8 tokens"):
        make_engine(Echo()).check(PoolGeometry((PoolShape(prompt_len=9, batch=1),)))


@pytest.mark.parametrize("warm_up", [True, False])
def test_starting_loads_and_runs_every_shape(warm_up: bool) -> None:
    """Weights are loaded first; every phase that ran is timed; warm-up is optional."""
    model = Echo()
    events: list[str] = []
    phases = Phases(lambda *event: events.append(event[0]))
    engine = make_engine(model, warm_up=warm_up)
    assert engine.start(engine.check(GEOMETRY), lambda: events.append("loaded"), phases) == GEOMETRY
    assert events[0] == "loaded"
    assert set(events[1:]) == ({"warm_up"} if warm_up else set())
    assert list(phases.seconds) == ["load", "allocate", *(["warm_up"] if warm_up else [])]
    assert len(model.forwards) == (2 if warm_up else 0)
    assert not engine.launch(StepPlan(1)).outputs


def test_only_a_started_engine_executes() -> None:
    """A refused start and a release both leave the engine without a runner."""
    engine = make_engine(Echo(), refuse=True)
    with pytest.raises(ConfigurationRefused, match="too large"):
        engine.start(GEOMETRY, lambda: None, Phases(lambda *_: None))
    with pytest.raises(Internal, match="not configured"):
        engine.launch(StepPlan(1))
    engine = make_engine(Echo(), warm_up=False)
    engine.start(GEOMETRY, lambda: None, Phases(lambda *_: None))
    engine.release()
    engine.reset()
    with pytest.raises(Internal, match="not configured"):
        engine.launch(StepPlan(2))
