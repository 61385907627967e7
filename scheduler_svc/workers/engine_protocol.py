"""The interface that generating and pooling deployments share: an engine, and a setup that adds workers.

A deployment serves one model. Everything above this module uses these protocols and does not ask which kind
of model it is. An operation that the model does not support raises :class:`protos.errors.Unsupported`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from protos.errors import TriptychError
from protos.steps import StepPlan, StepResult
from protos.triptych.v1 import worker_pb2
from scheduler_svc.adapters.registry import Adapter, LoadedAdapter
from scheduler_svc.dispatch.adapter_control import Outcome
from scheduler_svc.dispatch.load import Load, ReplicaMemory, Totals
from scheduler_svc.dispatch.prefix_control import KvChange
from scheduler_svc.pooling.engine import PoolSubmission
from scheduler_svc.replica.suspects import Detached, Loss
from scheduler_svc.requests.admission import Submission
from scheduler_svc.requests.request import Request, Sink
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


class Prefixes(Protocol):
    """Operations on cached prefixes; see :class:`scheduler_svc.dispatch.prefix_control.PrefixControl`."""

    def reset(self) -> int:
        """Forgets every cached prefix; returns the number of replicas that were reset."""

    def follow(
        self, listener: Callable[[KvChange], None], *, replica_id: str = "", after: int = 0
    ) -> Callable[[], None]:
        """Calls `listener` with every change of a prefix cache.

        Returns a function that ends the subscription.
        """


class Adapters(Protocol):
    """LoRA adapters; see :class:`scheduler_svc.dispatch.adapter_control.AdapterControl`."""

    @property
    def max_loras(self) -> int:
        """Adapter slots of the replica that has most; 0 if no replica runs adapters."""

    def resolve(self, name: str, digest: str = "") -> Adapter | None:
        """Returns the adapter that a request names; None for the base model, whose name is empty.

        `digest` is that of the weights with which its answer began, if it has begun.
        """

    @property
    def smallest_host(self) -> int:
        """Adapters that every replica with adapters holds beside each other; 0 if there is none."""

    def load(self, name: str, source: str, *, in_place: bool, done: Outcome, expected: bool = False) -> None:
        """Starts loading a new adapter; `expected` if it is one of the settings."""

    def refuse(self, name: str, error: TriptychError, *, for_good: bool) -> None:
        """Remembers why an adapter of the settings cannot be served."""

    def unload(self, name: str) -> None:
        """Frees a name."""

    def listed(self) -> list[tuple[Adapter, list[str]]]:
        """Returns the adapters that requests can name, each with the replicas that have it."""


class EngineProtocol(Protocol):
    """All requests and all replicas of a deployment."""

    @property
    def prefixes(self) -> Prefixes:
        """Operations on cached prefixes."""

    @property
    def adapters(self) -> Adapters:
        """The LoRA adapters."""

    @property
    def rejections(self) -> Mapping[str, int]:
        """Requests that the queue refused, by the limit that they would have exceeded."""

    def submit(self, submission: Submission, sink: Sink) -> None:
        """Enqueues a generating request; its events go to `sink`."""

    def submit_pooling(self, submissions: Sequence[PoolSubmission], sink: Sink) -> None:
        """Enqueues all pooling requests of a call, or none; the one event of each goes to `sink`."""

    def find(self, request_id: str) -> Request | None:
        """Returns the live request with that id, or the first of its sequences."""

    def abort(self, request_id: str, sequence: int | None = None) -> bool:
        """Aborts a request, or one of its sequences alone; returns whether a live sequence was found."""

    def live(self) -> list[Request]:
        """Returns every sequence that has not ended."""

    def fail(self, request: Request, error: TriptychError) -> None:
        """Fails a live request in any state, with the other sequences of its group."""

    def dispatch(self) -> None:
        """Gives waiting requests to replicas that have room."""

    def detach(self, replica_id: str, loss: Loss) -> Detached:
        """Removes a replica, if it is attached, and lets its requests wait again."""

    def suspend(self, error: TriptychError) -> int:
        """Ends every waiting request with `error` and refuses new ones until a replica attaches.

        Returns how many ended.
        """

    def fail_oversized(self) -> int:
        """Fails waiting requests that are too large for every replica; returns how many."""

    def load(self) -> Load:
        """Returns the current load of the ready replicas and the queue."""

    def totals(self) -> dict[str, Totals]:
        """Returns the counters of the ready replicas by id."""

    def memory(self) -> dict[str, ReplicaMemory]:
        """Returns the KV memory of the ready replicas by id, without replicas that have none."""


@dataclass(frozen=True, slots=True)
class WorkerLink:
    """Calls of an engine to the driver of a worker. None of them blocks."""

    wake: Callable[[], None]
    """Tells the step loop that there is work."""
    compile_grammar: Callable[[Grammar, Answered], None]
    """Compiles a grammar, then calls the function with the outcome."""
    withdraw_grammar: Callable[[Grammar], None]
    """Cancels compiling a grammar; its function is then not called."""
    load_adapter: Callable[[Adapter, Callable[[LoadedAdapter | TriptychError], None]], None]
    """Loads a LoRA adapter on every rank, then calls the function with what the ranks say about it."""
    unload_adapter: Callable[[int], None]
    """Frees a LoRA adapter, given its id, on every rank, before any later load."""
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
    attach: Callable[[WorkerDescription, tuple[int, ...], str, WorkerLink], StepScheduler]
    """Attaches the replica to the engine, given the configured worker's description, its blocks per KV group
    and the name of the model.

    Raises :class:`protos.errors.ConfigurationRefused` if it cannot serve beside the other replicas.
    """


class ReplicaFactory(Protocol):
    """Turns workers into replicas of an engine."""

    @property
    def engine(self) -> EngineProtocol:
        """The engine that the replicas belong to."""

    def set_up(self, replica_id: str, description: WorkerDescription) -> ReplicaSetup:
        """Chooses the configuration of a worker.

        Raises:
            ConfigurationRefused: the settings contradict each other, the model or the device.
        """
