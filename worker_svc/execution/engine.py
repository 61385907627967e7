"""The engine: a model is configured with static shapes, and then runs plans."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from protos.errors import ConfigurationRefused, Internal, Unavailable
from protos.steps import StepPlan, StepResult
from worker_svc.devices.base import ChunkStarts, Device
from worker_svc.execution.memory_budget import MemoryBudget
from worker_svc.execution.runner import Runner
from worker_svc.grammars.constraints import StepConstraints
from worker_svc.graphs.compilation import Compilation
from worker_svc.graphs.graph_runner import GraphOptions
from worker_svc.lora.store import AdapterStore
from worker_svc.pending_step import PendingStep
from worker_svc.phases import Phases
from worker_svc.pooling import PoolRunner
from worker_svc.ranks.group import RankGroup
from worker_svc.ranks.layout import RankLayout
from worker_svc.sampling.state import SamplingVocabulary
from worker_svc.shapes import KvGroup, ModelDescription, PoolShapeConfig, ShapeConfig, Shapes


@dataclass(eq=False)
class Engine:
    """A generating or pooling model with its graphs. All calls come from the same thread."""

    model: Any
    """A `stage.Model` or a `pooling.PoolingModel`, possibly without weights until `start`."""
    device: Device
    """Runs the graphs."""
    description: ModelDescription
    """The model's."""
    groups: Sequence[KvGroup]
    """The model's KV groups; empty for a pooling model."""
    budget: MemoryBudget
    """Divides the device's memory."""
    compilation: Compilation
    """Finds and keeps compiled code."""
    options: GraphOptions
    """How steps become graphs."""
    constraints: Callable[[ShapeConfig], StepConstraints | None] = lambda _: None
    """Makes the matchers of the slots; `None` without support for grammars."""
    layout: RankLayout = field(default_factory=RankLayout)
    """This rank's part of the model."""
    adapters: AdapterStore | None = None
    """The LoRA adapters, if the model takes any."""
    group: RankGroup | None = None
    """The replica's ranks, once joined; `None` for a replica of one."""
    _runner: Runner | PoolRunner | None = field(default=None, init=False)

    @property
    def bytes_per_block(self) -> tuple[int, ...]:
        """Bytes of one block of each KV group, over all of its layers; empty without a KV cache."""
        return self._runner.cache.bytes_per_block if isinstance(self._runner, Runner) else ()

    @property
    def chunk_starts(self) -> ChunkStarts:
        """Where chunks of prompts may begin: exact if all graphs are; without meaning for a pooling model."""
        if isinstance(self._runner, Runner) and self._runner.is_exact:
            return "exact"
        starts_anywhere = self.description.pooling is None and self.device.chunks_start_anywhere
        return "anywhere" if starts_anywhere else "whole"

    @property
    def num_compiled(self) -> int:
        """Compiler runs since `start`; see `Compilation.num_compiled`."""
        return 0 if self._runner is None else self.compilation.num_compiled(self._runner.graphs)

    @property
    def num_late(self) -> int:
        """Graphs made while serving; each delayed its step."""
        return 0 if self._runner is None else self._runner.graphs.num_late

    @property
    def code_folder(self) -> Path | None:
        """The folder of the compiled code in use, if there is any."""
        return self.compilation.folder

    def check(self, shapes: Shapes) -> Shapes:
        """Returns the shapes with defaults filled in, but without counted blocks. Changes nothing.

        Raises:
            ConfigurationRefused: if the model or the device cannot run them.
        """
        architecture, longest = self.description.architecture, self.description.max_model_len
        if self.description.pooling is not None:
            if not isinstance(shapes, PoolShapeConfig):
                raise ConfigurationRefused(
                    f"{architecture} is a pooling model; configure it with pool_shapes"
                )
            shapes.check(longest_context=longest)
            return shapes
        if not isinstance(shapes, ShapeConfig):
            raise ConfigurationRefused(
                f"{architecture} generates tokens; configure it with a chunk and decode buckets"
            )
        if len(shapes.num_blocks) == 1:
            shapes = replace(shapes, num_blocks=shapes.num_blocks * len(self.groups))
        shapes.check(
            self.groups,
            block_size_multiple=self.device.block_size_multiple,
            longest_context=longest,
            stages=self.layout.pipeline,
        )
        self.device.check_sizes(shapes.chunk, shapes.block_size)
        return shapes

    def check_start(self, shapes: Shapes) -> None:
        """Refuses shapes without enough memory or required compiled code, before weights are loaded.

        Raises:
            ConfigurationRefused: if something does not fit, or required code is missing.
        """
        fitted = self._fit(shapes, replace(self.budget, before_load=True))
        self.compilation.find(fitted if self.device.caches_are_inputs else shapes)
        self.compilation.release()

    def start(self, shapes: Shapes, load: Callable[[], None], phases: Phases) -> Shapes:
        """Finds compiled code, loads the weights, allocates memory, makes graphs and warms up.

        Args:
            shapes: a result of `check`. The engine holds nothing from an earlier start.
            load: loads the weights, unless they are loaded already.
            phases: receives the progress and the time of each phase.

        Returns:
            The shapes with their blocks counted.

        Raises:
            ConfigurationRefused: if something does not fit or cannot be compiled.
            Unavailable: if another rank starts with other shapes.
        """
        self._check_equal(shapes)
        if self.device.caches_are_inputs and isinstance(shapes, ShapeConfig) and not shapes.num_blocks:
            # Compiled code depends on the number of blocks.
            shapes = self._fit_all(shapes)
        self.compilation.find(shapes)
        load()
        phases.finish("load")
        shapes = self._fit_all(shapes)
        known = self.compilation.verification_cache(shapes)
        # Comparing a graph with the model runs collectives, so it is left out only if all ranks know it.
        checked = frozenset.intersection(*map(frozenset, self._exchange(sorted(known.read()))))
        options = replace(self.options, checked=checked)
        self._runner = runner = self._make_runner(shapes, options, phases)
        phases.finish("allocate")
        self.compilation.make_graphs(runner, phases)
        if runner.graphs.checked:
            known.write(runner.graphs.checked)
        return shapes

    def _make_runner(self, shapes: Shapes, options: GraphOptions, phases: Phases) -> Runner | PoolRunner:
        if isinstance(shapes, PoolShapeConfig):
            assert self.description.pooling is not None
            return PoolRunner(self.model, self.device, self.description.pooling, shapes, options)
        blocks = " + ".join(map(str, shapes.num_blocks))
        phases.progress("allocate")(0, 0, f"KV cache of {blocks} blocks")
        return Runner(
            self.model,
            self.device,
            self.groups,
            shapes,
            vocabulary=SamplingVocabulary(self.description.vocab_size, self.description.eos_token_ids),
            options=options,
            constraints=self.constraints(shapes),
            group=self.group,
            adapters=self.adapters,
        )

    def _check_equal(self, shapes: Shapes) -> None:
        """Refuses to start with other shapes than other ranks: their collectives would not meet."""
        if len(set(self._exchange(repr(shapes)))) > 1:
            raise Unavailable(
                "the ranks were configured differently at the same time; configure them again",
                retry_after_ms=100,
            )

    def _fit(self, shapes: Shapes, budget: MemoryBudget) -> Shapes:
        if isinstance(shapes, PoolShapeConfig):
            budget.check_pooling(shapes)
            return shapes
        return budget.fit(shapes, self.groups)

    def _fit_all(self, shapes: Shapes) -> Shapes:
        """Returns the shapes with as many blocks as fit on every rank."""
        fitted = self._fit(shapes, self.budget)
        if isinstance(fitted, PoolShapeConfig):
            return fitted
        counts = self._exchange(fitted.num_blocks)
        return replace(fitted, num_blocks=tuple(map(min, zip(*counts, strict=True))))

    def _exchange(self, value: Any) -> list[Any]:
        """Returns the value of each rank, as JSON leaves it."""
        if self.group is None:
            return [value]
        return [json.loads(each) for each in self.group.exchange(json.dumps(value).encode())]

    def launch(self, plan: StepPlan) -> PendingStep:
        """Applies a plan and hands its step to the device.

        Raises:
            PlanRefused: if the plan contradicts earlier plans.
            Internal: if the engine is not started.
        """
        return self._current().launch(plan)

    def apply(self, result: StepResult) -> None:
        """Records tokens reported by the last stage; see `Runner.apply`."""
        runner = self._current()
        assert isinstance(runner, Runner), "only generating models have stages"
        runner.apply(result)

    def _current(self) -> Runner | PoolRunner:
        if self._runner is None:
            raise Internal("the worker is not configured")
        return self._runner

    def reset(self) -> None:
        """Frees every slot."""
        if self._runner is not None:
            self._runner.reset()

    def release(self) -> None:
        """Drops everything made by `start`, except the weights."""
        if self._runner is not None:
            self._runner.close()
            self._runner = None
        self.compilation.release()
