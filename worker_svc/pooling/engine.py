"""Configures a pooling model."""

from collections.abc import Callable
from pathlib import Path

from protos.errors import ConfigurationRefused, Internal
from protos.steps import StepPlan
from worker_svc.devices.base import Device
from worker_svc.launched_step import LaunchedStep
from worker_svc.phases import Phases
from worker_svc.pooling.pool_runner import PoolingModel, PoolRunner
from worker_svc.shapes.geometry import Geometry, PoolGeometry
from worker_svc.shapes.model_description import ModelDescription


class PoolingEngine:
    """Runs a pooling model in static shapes. Implements `execution.engine.Engine`."""

    bytes_per_block: tuple[int, ...] = ()
    """Empty: there is no KV cache."""
    num_compiled: int = 0
    """A pooling model compiles nothing."""
    code_folder: Path | None = None
    """`None`: there is no compiled code."""

    def __init__(
        self,
        model: PoolingModel,
        device: Device,
        description: ModelDescription,
        *,
        check_memory: Callable[[PoolGeometry], None],
        warm_up: bool,
    ) -> None:
        """Allocates nothing.

        Args:
            model: its weights may be missing until `start`.
            device: where the model runs.
            description: the model's, with `pooling` set.
            check_memory: raises ConfigurationRefused for shapes that do not fit into memory.
            warm_up: whether to run every shape once before serving.
        """
        assert description.pooling is not None
        self._model = model
        self._device = device
        self._description = description
        self._pooling = description.pooling
        self._check_memory = check_memory
        self._warm_up = warm_up
        self._runner: PoolRunner | None = None

    def check(self, geometry: Geometry | PoolGeometry) -> PoolGeometry:
        """Returns the geometry if the model can run it.

        Raises:
            ConfigurationRefused: if it cannot.
        """
        if not isinstance(geometry, PoolGeometry):
            raise ConfigurationRefused(
                f"{self._description.architecture} is a pooling model; configure it with pool_shapes"
            )
        geometry.check(longest_context=self._description.max_model_len)
        return geometry

    def start(self, geometry: PoolGeometry, load: Callable[[], None], phases: Phases) -> PoolGeometry:
        """Loads the weights and runs every shape once.

        Raises:
            ConfigurationRefused: if the largest shape does not fit into memory.
        """
        load()
        phases.finish("load")
        self._check_memory(geometry)
        self._runner = PoolRunner(self._model, self._device, self._pooling, geometry)
        phases.finish("allocate")
        if self._warm_up:
            self._runner.warm_up(phases.progress("warm_up"))
            phases.finish("warm_up")
        return geometry

    def launch(self, plan: StepPlan, *, leased: bool = False) -> LaunchedStep:
        """Runs one step; see `PoolRunner.execute`. Pooling has no leases."""
        del leased
        if self._runner is None:
            raise Internal("the worker is not configured")
        return LaunchedStep(self._runner.execute(plan))

    def reset(self) -> None:
        """Frees every slot."""
        if self._runner is not None:
            self._runner.reset()

    def release(self) -> None:
        """Drops everything that `start` made, except the weights."""
        self._runner = None
