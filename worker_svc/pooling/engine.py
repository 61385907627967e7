"""Configures a pooling model: its static shapes, graphs and their compiled code."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from protos.errors import ConfigurationRefused, Internal
from protos.steps import StepPlan
from worker_svc.devices.base import Device
from worker_svc.graphs.compilation import Compilation
from worker_svc.graphs.graph_runner import GraphOptions
from worker_svc.pending_step import PendingStep
from worker_svc.phases import Phases
from worker_svc.pooling.pool_runner import PoolingModel, PoolRunner
from worker_svc.shapes.model_description import ModelDescription
from worker_svc.shapes.shape_config import PoolShapeConfig, ShapeConfig


class PoolingEngine:
    """Runs a pooling model in static shapes and graphs. Implements `execution.engine.Engine`."""

    bytes_per_block: tuple[int, ...] = ()
    """Empty: there is no KV cache."""

    def __init__(
        self,
        model: PoolingModel,
        device: Device,
        description: ModelDescription,
        *,
        check_memory: Callable[[PoolShapeConfig], None],
        compilation: Compilation,
        options: GraphOptions,
    ) -> None:
        """Allocates nothing.

        Args:
            model: its weights may be missing until `start`.
            device: where the model runs.
            description: the model's, with `pooling` set.
            check_memory: raises ConfigurationRefused for shapes that do not fit into memory.
            compilation: finds and keeps compiled code.
            options: how graphs are made.
        """
        assert description.pooling is not None
        self._model = model
        self._device = device
        self._description = description
        self._pooling = description.pooling
        self._check_memory = check_memory
        self._compilation = compilation
        self._options = options
        self._runner: PoolRunner | None = None

    @property
    def num_compiled(self) -> int:
        """How often a compiler ran since `start`; see `Compilation.num_compiled`."""
        return 0 if self._runner is None else self._compilation.num_compiled(self._runner.graphs)

    @property
    def num_late(self) -> int:
        """Graphs that were made while serving; each made its step wait."""
        return 0 if self._runner is None else self._runner.graphs.num_late

    @property
    def code_folder(self) -> Path | None:
        """The folder of the compiled code in use, if there is any."""
        return self._compilation.folder

    def check(self, shapes: ShapeConfig | PoolShapeConfig) -> PoolShapeConfig:
        """Returns the shapes if the model can run them.

        Raises:
            ConfigurationRefused: if it cannot.
        """
        if not isinstance(shapes, PoolShapeConfig):
            raise ConfigurationRefused(
                f"{self._description.architecture} is a pooling model; configure it with pool_shapes"
            )
        shapes.check(longest_context=self._description.max_model_len)
        return shapes

    def check_start(self, shapes: PoolShapeConfig) -> None:
        """Refuses shapes without enough memory or required compiled code."""
        self._check_memory(shapes)
        self._compilation.find(shapes)
        self._compilation.release()

    def start(self, shapes: PoolShapeConfig, load: Callable[[], None], phases: Phases) -> PoolShapeConfig:
        """Finds compiled code, loads the weights, and makes and runs the graph of every shape.

        Raises:
            ConfigurationRefused: if the shapes do not fit into memory, or a graph cannot be made.
        """
        self._compilation.find(shapes)
        load()
        phases.finish("load")
        self._check_memory(shapes)
        checked = self._compilation.verification_cache(shapes)
        options = replace(self._options, checked=checked.read())
        self._runner = PoolRunner(self._model, self._device, self._pooling, shapes, options)
        phases.finish("allocate")
        self._compilation.make_graphs(self._runner, phases)
        if self._runner.graphs.checked:
            checked.write(self._runner.graphs.checked)
        return shapes

    def launch(self, plan: StepPlan, *, leased: bool = False) -> PendingStep:
        """Runs a step; see `PoolRunner.execute`. Pooling knows no leases."""
        del leased
        if self._runner is None:
            raise Internal("the worker is not configured")
        return PendingStep(self._runner.execute(plan))

    def reset(self) -> None:
        """Frees every slot."""
        if self._runner is not None:
            self._runner.reset()

    def release(self) -> None:
        """Drops the runner with its graphs, and the compiled code."""
        if self._runner is not None:
            self._runner.close()
            self._runner = None
        self._compilation.release()
