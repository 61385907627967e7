"""Configures a generating model: KV cache, batch, graphs and their compiled code."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from protos.errors import ConfigurationRefused, Internal, Unavailable
from protos.steps import StepPlan, StepResult
from worker_svc.devices.base import Device
from worker_svc.execution.engine import Model
from worker_svc.execution.memory_budget import MemoryBudget
from worker_svc.execution.runner import Runner
from worker_svc.grammars.constraints import StepConstraints
from worker_svc.graphs.compilation import Compilation
from worker_svc.graphs.graph_runner import GraphOptions
from worker_svc.lora.store import AdapterStore
from worker_svc.pending_step import PendingStep
from worker_svc.phases import Phases
from worker_svc.ranks.group import RankGroup
from worker_svc.ranks.layout import RankLayout
from worker_svc.sampling.state import SamplingVocabulary
from worker_svc.shapes import KvGroup, ModelDescription, PoolShapeConfig, ShapeConfig


class GenerationEngine:
    """Runs a generating model with a KV cache and static graphs. Implements `execution.engine.Engine`."""

    def __init__(
        self,
        model: Model,
        device: Device,
        description: ModelDescription,
        groups: Sequence[KvGroup],
        *,
        budget: MemoryBudget,
        compilation: Compilation,
        options: GraphOptions,
        constraints: Callable[[ShapeConfig], StepConstraints | None],
        layout: RankLayout,
        adapters: AdapterStore | None = None,
    ) -> None:
        """Allocates nothing.

        Args:
            model: its weights may be missing until `start`.
            device: where the model runs.
            description: the model's.
            groups: the model's KV groups.
            budget: the device's memory.
            compilation: finds and keeps compiled code.
            options: how graphs are made.
            constraints: makes the matchers of a shapes's slots, or `None` if grammars are not supported.
            layout: this rank's part of the model.
            adapters: the LoRA adapters that plans may place; `None` if the model takes none.
        """
        self._model = model
        self._device = device
        self._description = description
        self._groups = groups
        self._budget = budget
        self._compilation = compilation
        self._options = options
        self._constraints = constraints
        self.layout = layout
        """This rank's part of the model."""
        self._adapters = adapters
        self._runner: Runner | None = None
        self.group: RankGroup | None = None
        """The replica's ranks, once they are joined; `None` for a replica of one."""

    @property
    def bytes_per_block(self) -> tuple[int, ...]:
        """Bytes of one block of each KV group, over all of its layers."""
        return () if self._runner is None else self._runner.cache.bytes_per_block

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

    def check(self, shapes: ShapeConfig | PoolShapeConfig) -> ShapeConfig:
        """Returns the shapes with one number of blocks for each KV group, or none.

        Raises:
            ConfigurationRefused: if the model or the device cannot run it.
        """
        if not isinstance(shapes, ShapeConfig):
            raise ConfigurationRefused(
                f"{self._description.architecture} generates tokens;"
                " configure it with a chunk and decode buckets"
            )
        if len(shapes.num_blocks) == 1:
            shapes = replace(shapes, num_blocks=shapes.num_blocks * len(self._groups))
        shapes.check(
            self._groups,
            block_size_multiple=self._device.block_size_multiple,
            longest_context=self._description.max_model_len,
            stages=self.layout.pipeline,
        )
        return shapes

    def check_start(self, shapes: ShapeConfig) -> None:
        """Refuses what `start` would refuse for lack of memory or of compiled code."""
        fitted = replace(self._budget, before_load=True).fit(shapes, self._groups)
        self._compilation.find(fitted if self._device.caches_are_inputs else shapes)
        self._compilation.release()

    def start(self, shapes: ShapeConfig, load: Callable[[], None], phases: Phases) -> ShapeConfig:
        """Finds compiled code, loads the weights, allocates the cache and makes graphs.

        Raises:
            ConfigurationRefused: if the weights or the cache do not fit, or a graph cannot be made.
            Unavailable: if another rank starts with other shapes.
        """
        self._check_equal(shapes)
        if self._device.caches_are_inputs and not shapes.num_blocks:
            # Compiled code depends on the number of blocks.
            shapes = self._fit(shapes)
        self._compilation.find(shapes)
        load()
        phases.finish("load")
        shapes = self._fit(shapes)
        blocks = " + ".join(map(str, shapes.num_blocks))
        phases.progress("allocate")(0, 0, f"KV cache of {blocks} blocks")
        checked = self._compilation.verification_cache(shapes)
        self._runner = Runner(
            self._model,
            self._device,
            self._groups,
            shapes,
            vocabulary=SamplingVocabulary(self._description.vocab_size, self._description.eos_token_ids),
            options=replace(self._options, checked=self._known_to_all(checked.read())),
            constraints=self._constraints(shapes),
            group=self.group,
            adapters=self._adapters,
        )
        phases.finish("allocate")
        self._compilation.make_graphs(self._runner, phases)
        if self._runner.graphs.checked:
            checked.write(self._runner.graphs.checked)
        return shapes

    def _check_equal(self, shapes: ShapeConfig) -> None:
        """Refuses to start with other shapes than other ranks: their collectives would not meet."""
        if self.group is not None and len(set(self.group.exchange(repr(shapes).encode()))) > 1:
            raise Unavailable(
                "the ranks were configured differently at the same time; configure them again",
                retry_after_ms=100,
            )

    def _fit(self, shapes: ShapeConfig) -> ShapeConfig:
        """Returns the shapes with their blocks counted: as many as fit on every rank."""
        fitted = self._budget.fit(shapes, self._groups)
        if self.group is None:
            return fitted
        counts = [json.loads(each) for each in self.group.exchange(json.dumps(fitted.num_blocks).encode())]
        return replace(fitted, num_blocks=tuple(map(min, zip(*counts, strict=True))))

    def _known_to_all(self, signatures: frozenset[str]) -> frozenset[str]:
        """Returns the signatures that every rank knows: comparing a graph with the model runs collectives."""
        if self.group is None:
            return signatures
        known = self.group.exchange(json.dumps(sorted(signatures)).encode())
        return frozenset.intersection(*(frozenset(json.loads(each)) for each in known))

    def launch(self, plan: StepPlan, *, leased: bool = False) -> PendingStep:
        """Hands one step to the device; see `Runner.launch`."""
        if self._runner is None:
            raise Internal("the worker is not configured")
        return self._runner.launch(plan, leased=leased)

    def apply(self, result: StepResult) -> None:
        """Records tokens that the last stage reported; see `Runner.apply`."""
        if self._runner is None:
            raise Internal("the worker is not configured")
        self._runner.apply(result)

    def reset(self) -> None:
        """Frees every slot."""
        if self._runner is not None:
            self._runner.reset()

    def release(self) -> None:
        """Drops the runner with its cache and graphs, and the compiled code."""
        if self._runner is not None:
            self._runner.close()
            self._runner = None
        self._compilation.release()
