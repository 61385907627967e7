"""The interface between a replica's scheduler and the driver of its worker, for every kind of model."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from protos.steps import StepPlan, StepResult
from protos.triptych.v1 import worker_pb2
from scheduler_svc.adapters.registry import Adapter, LoadAnswer
from scheduler_svc.kv.cache import KvCache
from scheduler_svc.requests.sampling import Grammar
from scheduler_svc.workers.descriptions import WorkerDescription
from scheduler_svc.workers.grammar_compiler import Answered


class StepScheduler(Protocol):
    """The scheduler of one replica, as the step loop drives it."""

    @property
    def num_running(self) -> int:
        """Requests that have a slot."""

    @property
    def is_busy(self) -> bool:
        """Whether requests run here, or wait for one that does."""

    def next_plan(self) -> StepPlan | None:
        """Decides what the worker does next; None if it has enough plans, or there is nothing to do."""

    def drain(self) -> None:
        """Sends nothing until all plans are answered; the next one then follows from results alone."""

    def update(self, result: StepResult) -> None:
        """Delivers the result of a plan."""


@dataclass(frozen=True, slots=True)
class WorkerLink:
    """Calls of an engine to the driver of a worker. None of them blocks."""

    wake: Callable[[], None]
    """Tells the step loop that there is work."""
    compile_grammar: Callable[[Grammar, Answered], None]
    """Compiles a grammar, then calls the function with the outcome."""
    withdraw_grammar: Callable[[Grammar], None]
    """Cancels compiling a grammar; its function is then not called."""
    load_adapter: Callable[[Adapter, int, Callable[[], Sequence[int]], LoadAnswer], None]
    """Loads a LoRA adapter on every rank, given a new id and what returns the loads that must stay."""
    unload_adapter: Callable[[int], None]
    """Ends a load on every rank by its id, or frees what it has brought."""
    failing: Callable[[], bool]
    """Whether the worker's last step failed."""


@dataclass(frozen=True, slots=True)
class ReplicaSetup:
    """The configuration of one worker, and how to attach it once it runs with it."""

    request: worker_pb2.ConfigureRequest
    """The configuration for the worker."""
    max_model_len: int
    """Longest sequence that the replica serves, tokens."""
    facts: Mapping[str, object]
    """The configuration for the log."""
    make_memory: Callable[[WorkerDescription, tuple[int, ...]], KvCache | None]
    """Makes the KV memory of the configured worker, given its blocks per KV group; None if it has none. Safe
    on any thread: a million blocks take a second."""
    attach: Callable[[WorkerDescription, KvCache | None, str, WorkerLink], StepScheduler]
    """Attaches the replica to the engine, given the configured worker's description, its memory and the name
    of the model.

    Raises :class:`protos.errors.ConfigurationRefused` if it cannot serve beside the other replicas.
    """
