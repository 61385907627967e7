"""Engines: a generating or a pooling model is configured with static shapes, and then runs plans."""

import abc
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Generic, TypeVar

from protos.errors import ConfigurationRefused, Internal, Unavailable
from protos.steps import StepPlan, StepResult
from worker_svc.devices.base import ChunkStarts, Device
from worker_svc.execution.memory_budget import MemoryBudget
from worker_svc.execution.runner import Runner
from worker_svc.execution.stage import Model
from worker_svc.grammars.constraints import StepConstraints
from worker_svc.graphs.compilation import Compilation
from worker_svc.graphs.compile_cache import VerificationCache
from worker_svc.graphs.graph_runner import GraphOptions
from worker_svc.lora.store import AdapterStore
from worker_svc.pending_step import PendingStep
from worker_svc.phases import Phases
from worker_svc.pooling import PoolingModel, PoolRunner
from worker_svc.ranks.group import RankGroup
from worker_svc.ranks.layout import RankLayout
from worker_svc.sampling.state import SamplingVocabulary
from worker_svc.shapes import KvGroup, ModelDescription, PoolShapeConfig, ShapeConfig

S = TypeVar("S", ShapeConfig, PoolShapeConfig)
R = TypeVar("R", Runner, PoolRunner)


class Engine(abc.ABC, Generic[S, R]):
    """A model that can be configured with shapes of type `S` and then runs plans, all on one thread."""

    def __init__(
        self,
        device: Device,
        description: ModelDescription,
        *,
        budget: MemoryBudget,
        compilation: Compilation,
        options: GraphOptions,
    ) -> None:
        """Allocates nothing."""
        self._device = device
        self._description = description
        self._budget = budget
        self._compilation = compilation
        self._options = options
        self._runner: R | None = None

    @property
    def bytes_per_block(self) -> tuple[int, ...]:
        """Bytes of one block of each KV group, over all of its layers; empty without a KV cache."""
        return ()

    @property
    def chunk_starts(self) -> ChunkStarts:
        """Where chunks of prompts may begin; without meaning for a pooling model."""
        return "whole"

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

    @abc.abstractmethod
    def check(self, shapes: ShapeConfig | PoolShapeConfig) -> S:
        """Returns the shapes with defaults filled in, but without counted blocks. Changes nothing.

        Raises:
            ConfigurationRefused: if the model or the device cannot run them.
        """

    @abc.abstractmethod
    def check_start(self, shapes: S) -> None:
        """Refuses what `start` would refuse for lack of memory or of code, before weights are loaded.

        Raises:
            ConfigurationRefused: if something does not fit, or required code is missing.
        """

    @abc.abstractmethod
    def start(self, shapes: S, load: Callable[[], None], phases: Phases) -> S:
        """Allocates memory, makes graphs and warms up. The engine holds nothing from an earlier start.

        Args:
            shapes: a result of `check`.
            load: loads the weights, unless they are loaded already.
            phases: receives the progress and the time of each phase.

        Returns:
            The shapes with their blocks counted.

        Raises:
            ConfigurationRefused: if something does not fit or cannot be compiled.
            Unavailable: if another rank starts with other shapes.
        """

    def _make_graphs(self, runner: R, known: VerificationCache, phases: Phases) -> None:
        """Takes over a runner, and makes and runs its graphs."""
        self._runner = runner
        phases.finish("allocate")
        self._compilation.make_graphs(runner, phases)
        if runner.graphs.checked:
            known.write(runner.graphs.checked)

    def launch(self, plan: StepPlan) -> PendingStep:
        """Applies a plan and hands its step to the device.

        Raises:
            PlanRefused: if the plan contradicts earlier plans.
            Internal: if the engine is not started.
        """
        if self._runner is None:
            raise Internal("the worker is not configured")
        return self._runner.launch(plan)

    def reset(self) -> None:
        """Frees every slot."""
        if self._runner is not None:
            self._runner.reset()

    def release(self) -> None:
        """Drops everything that `start` made, except the weights."""
        if self._runner is not None:
            self._runner.close()
            self._runner = None
        self._compilation.release()


class GenerationEngine(Engine[ShapeConfig, Runner]):
    """Runs a generating model with a KV cache and static graphs."""

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
        """Allocates nothing. The model's weights may be missing until `start`.

        `constraints` makes the matchers of the slots, or `None` if grammars are not supported.
        """
        super().__init__(device, description, budget=budget, compilation=compilation, options=options)
        self._model = model
        self._groups = groups
        self._constraints = constraints
        self.layout = layout
        """This rank's part of the model."""
        self._adapters = adapters
        self.group: RankGroup | None = None
        """The replica's ranks, once they are joined; `None` for a replica of one."""

    @property
    def bytes_per_block(self) -> tuple[int, ...]:
        """Bytes of one block of each KV group, over all of its layers."""
        return () if self._runner is None else self._runner.cache.bytes_per_block

    @property
    def chunk_starts(self) -> ChunkStarts:
        """Where chunks may begin: exact if all graphs are."""
        if self._runner is not None and self._runner.is_exact:
            return "exact"
        return "anywhere" if self._device.chunks_start_anywhere else "whole"

    def check(self, shapes: ShapeConfig | PoolShapeConfig) -> ShapeConfig:
        """Returns the shapes with one number of blocks for each KV group, or none."""
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
        """Finds compiled code, loads the weights, allocates the cache and makes graphs."""
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
        known = self._compilation.verification_cache(shapes)
        runner = Runner(
            self._model,
            self._device,
            self._groups,
            shapes,
            vocabulary=SamplingVocabulary(self._description.vocab_size, self._description.eos_token_ids),
            options=replace(self._options, checked=self._known_to_all(known.read())),
            constraints=self._constraints(shapes),
            group=self.group,
            adapters=self._adapters,
        )
        self._make_graphs(runner, known, phases)
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

    def apply(self, result: StepResult) -> None:
        """Records tokens that the last stage reported; see `Runner.apply`."""
        if self._runner is None:
            raise Internal("the worker is not configured")
        self._runner.apply(result)


class PoolingEngine(Engine[PoolShapeConfig, PoolRunner]):
    """Runs a pooling model in static shapes and graphs."""

    def __init__(
        self,
        model: PoolingModel,
        device: Device,
        description: ModelDescription,
        *,
        budget: MemoryBudget,
        compilation: Compilation,
        options: GraphOptions,
    ) -> None:
        """Allocates nothing. The model's weights may be missing until `start`."""
        super().__init__(device, description, budget=budget, compilation=compilation, options=options)
        assert description.pooling is not None
        self._model = model
        self._pooling = description.pooling

    def check(self, shapes: ShapeConfig | PoolShapeConfig) -> PoolShapeConfig:
        """Returns the shapes if the model can run them."""
        if not isinstance(shapes, PoolShapeConfig):
            raise ConfigurationRefused(
                f"{self._description.architecture} is a pooling model; configure it with pool_shapes"
            )
        shapes.check(longest_context=self._description.max_model_len)
        return shapes

    def check_start(self, shapes: PoolShapeConfig) -> None:
        """Refuses shapes without enough memory or required compiled code."""
        self._budget.check_pooling(shapes)
        self._compilation.find(shapes)
        self._compilation.release()

    def start(self, shapes: PoolShapeConfig, load: Callable[[], None], phases: Phases) -> PoolShapeConfig:
        """Finds compiled code, loads the weights, and makes and runs the graph of every shape."""
        self._compilation.find(shapes)
        load()
        phases.finish("load")
        self._budget.check_pooling(shapes)
        known = self._compilation.verification_cache(shapes)
        options = replace(self._options, checked=known.read())
        runner = PoolRunner(self._model, self._device, self._pooling, shapes, options)
        self._make_graphs(runner, known, phases)
        return shapes
