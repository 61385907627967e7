"""What a worker needs from an engine, and an engine that generates needs from a model."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch

from protos.errors import Internal
from protos.steps import StepPlan
from worker_svc.graphs.capture import Recording
from worker_svc.pending_step import PendingStep
from worker_svc.phases import Phases
from worker_svc.shapes import PoolShapeConfig, ShapeConfig

G = TypeVar("G")


class PlanRefused(Internal):
    """A plan contradicts earlier plans. All ranks find it alike, before the device gets work."""


class Engine(Protocol[G]):
    """A model that can be configured with shapes of type `G` and then runs plans.

    `execution.generation.GenerationEngine` and `pooling.PoolingEngine` implement it.
    All calls come from one thread.
    """

    @property
    def bytes_per_block(self) -> tuple[int, ...]:
        """Bytes of one block of each KV group, over all of its layers; empty without a KV cache."""
        ...

    @property
    def num_compiled(self) -> int:
        """How often a compiler ran since `start`."""
        ...

    @property
    def num_late(self) -> int:
        """Graphs that were made while serving; each made its step wait."""
        ...

    @property
    def code_folder(self) -> Path | None:
        """The folder of the compiled code in use, if there is any."""
        ...

    def check(self, shapes: ShapeConfig | PoolShapeConfig) -> G:
        """Returns the shapes with defaults filled in, but without counted blocks. Changes nothing.

        Raises:
            ConfigurationRefused: if the model or the device cannot run it.
        """
        ...

    def check_start(self, shapes: G) -> None:
        """Refuses what `start` would refuse for lack of memory or of code, before weights are loaded.

        Raises:
            ConfigurationRefused: if something does not fit, or required code is missing.
        """
        ...

    def start(self, shapes: G, load: Callable[[], None], phases: Phases) -> G:
        """Allocates memory, makes graphs and warms up. The engine holds nothing from an earlier start.

        Args:
            shapes: a result of `check`.
            load: loads the weights, unless they are loaded already.
            phases: receives the progress and the time of each phase.

        Returns:
            The shapes with their blocks counted.

        Raises:
            ConfigurationRefused: if something does not fit or cannot be compiled.
        """
        ...

    def launch(self, plan: StepPlan, *, leased: bool = False) -> PendingStep:
        """Applies a plan and hands its step to the device.

        Args:
            plan: the plan; for a further step of a lease, its next position and nothing else.
            leased: whether this is a further step of a lease, which was checked with its first step.

        Raises:
            PlanRefused: if the plan contradicts earlier plans.
            Internal: if the engine is not started.
        """
        ...

    def reset(self) -> None:
        """Frees every slot."""
        ...

    def release(self) -> None:
        """Drops everything that `start` made, except the weights."""
        ...


class Model(Protocol):
    """What a runner needs from a model; `vllm_adapter.model.VllmModel` implements it."""

    def bind_caches(self, caches: dict[str, torch.Tensor]) -> None:
        """Gives each attention layer its KV cache."""

    def attention_plans(self, groups: Sequence[tuple[Sequence[str], Any]]) -> dict[str, Any]:
        """Returns the metadata that `forward` takes, from each group's layer names and device plan."""
        ...

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        plans: Mapping[str, Any],
        /,
        *adapters: torch.Tensor,
    ) -> torch.Tensor:
        """Returns hidden states [tokens, hidden] for token ids [tokens] and their LoRA adapters, if any."""
        ...

    def record(
        self, token_ids: torch.Tensor, positions: torch.Tensor, /, *adapters: torch.Tensor
    ) -> Recording:
        """Records `forward` on tensors of these shapes; raises `NotStatic`."""
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Returns logits, float32 [rows, vocab], for hidden states [rows, hidden], on the device."""
        ...

    def empty_states(self, tokens: int) -> torch.Tensor:
        """Returns zeros of the shape that a stage of a pipeline receives for a step of that many tokens."""
        ...
