"""The deployment: all workers of one model, and its readiness for requests."""

import asyncio
import gc
import time
from collections.abc import Callable, Mapping
from dataclasses import replace

from protos.errors import ConfigurationRefused, TriptychError, Unavailable
from protos.service.logs import get_logger
from scheduler_svc.engine.engine import Engine
from scheduler_svc.engine.load import Load, ReplicaLoad, Totals
from scheduler_svc.engine.request_timeouts import RequestTimeouts
from scheduler_svc.kv.cache import KvCache
from scheduler_svc.replica.quarantine import Loss
from scheduler_svc.replica.scheduler import ReplicaScheduler
from scheduler_svc.requests.sampling import Grammar
from scheduler_svc.settings import Settings
from scheduler_svc.shapes.batch_histogram import BatchHistogram, histogram_path
from scheduler_svc.workers.descriptions import WorkerDescription, differing_fact
from scheduler_svc.workers.losses import Losses
from scheduler_svc.workers.model_files import ServedModel, describe_served
from scheduler_svc.workers.progress import Stall
from scheduler_svc.workers.replicas import (
    Configured,
    Connect,
    GeneratingReplicas,
    PoolingReplicas,
    ReplicaSetup,
    make_engine,
)
from scheduler_svc.workers.step_loop import StepScheduler

# Delay after the loss of a replica, for its driver to drop the last references to the block pools.
_DISMANTLE_DELAY_S = 5.0

# All facts about the served model in which replicas must agree.
_SHARED_FACTS = (
    "source", "architecture", "vocab_size", "dtype", "pool_tasks", "pooled_size", "max_model_len", "tokenizer_sha256",
)  # fmt: skip


class Deployment:
    """Joins settings, engine and replicas."""

    def __init__(self, settings: Settings, engine: Engine | None = None) -> None:
        """Starts without replicas; the settings describe the default engine."""
        clock = time.monotonic
        self.settings = settings
        self._log = get_logger()
        self._give_up: asyncio.TimerHandle | None = None
        # Runs after the last loss. Until then, requests wait for a worker of sufficient size.
        self._oversized: asyncio.TimerHandle | None = None
        path = histogram_path(settings.state_dir) if settings.state_dir else None
        self.histogram = BatchHistogram(path, settings.batchsize_log_interval_s, clock, self._log)
        """Decode batch sizes of all replicas."""
        self.engine = engine or make_engine(settings, clock)
        """All requests and all replicas."""
        self._generating = GeneratingReplicas(settings, self.engine, self.histogram, clock)
        self._pooling = PoolingReplicas(settings, self.engine, clock)
        self.served: ServedModel | None = None
        """The model and its files, from the first replica."""
        self.starting: dict[str, str] = {}
        """The last progress message of each replica before it is ready."""
        self.phase_seconds: dict[str, Mapping[str, float]] = {}
        """Seconds of each phase of configuration, by replica."""
        self.timeouts = RequestTimeouts(
            self.engine,
            queue_s=settings.queue_timeout_s,
            token_s=settings.token_timeout_s,
            clock=clock,
        )
        """Ends requests after too long a wait."""
        # Replicas with a stall.
        self._stalled: set[str] = set()
        self.losses = Losses(settings.detach_after_failed_steps)
        """Counts lost workers and their effect on requests."""
        self._serving_listeners: list[Callable[[bool], None]] = []
        self._detach_listeners: list[Callable[[str, Totals], None]] = []

    def on_serving(self, listener: Callable[[bool], None]) -> None:
        """Calls `listener` on every change, with whether any ready replica makes progress."""
        self._serving_listeners.append(listener)

    def on_detach(self, listener: Callable[[str, Totals], None]) -> None:
        """Calls `listener` with the id and the final counters of every departing replica."""
        self._detach_listeners.append(listener)

    # ---- replicas ----

    def set_up(self, replica_id: str, description: WorkerDescription) -> ReplicaSetup:
        """Chooses the configuration of a worker.

        Raises:
            ConfigurationRefused: the settings contradict each other, the model or the device.
        """
        # Refuse a worker of another model before it loads anything.
        expected = self.served.info.source if self.served else self.settings.expect_model
        if expected and (source := description.model.source) != expected:
            raise ConfigurationRefused(
                f"replica {replica_id} serves {source!r} and this deployment {expected!r}; all workers must run one model"
            )
        kind = self._pooling if description.model.pool_tasks else self._generating
        return kind.set_up(replica_id, description)

    def attach(
        self,
        replica_id: str,
        replica: Configured,
        memory: KvCache | None,
        connect: Connect,
    ) -> StepScheduler:
        """Adds a configured worker as a replica and returns its scheduler; the first fixes the served model.

        Raises:
            ConfigurationRefused: the worker serves another model or other shapes than earlier replicas.
        """
        served = describe_served(
            replica.description.model,
            replica.files,
            served_names=self.settings.served_model_name,
            max_model_len=replica.setup.max_model_len,
            weights_digest=replica.description.weights_digest,
        )
        self._check_same_model(served, replica_id)
        scheduler = replica.setup.attach(replica.description, memory, served.name, connect)
        if self.served is None:
            self.served = served
        elif not self.served.weights_digest:
            self.served = replace(self.served, weights_digest=served.weights_digest)
        if self._give_up is not None:
            self._give_up.cancel()
            self._give_up = None
        self.starting.pop(replica_id, None)
        self.phase_seconds[replica_id] = dict(replica.ready.phase_seconds)
        # Later collections leave the new blocks alone: scanning a million would stop all replicas for 0.3 s.
        gc.freeze()
        self._announce_serving()
        return scheduler

    def detach(self, replica_id: str, loss: Loss) -> None:
        """Removes a replica. Its requests wait a limited time for another."""
        self.starting.pop(replica_id, None)
        self.phase_seconds.pop(replica_id, None)
        self._stalled.discard(replica_id)
        totals = self.engine.totals().get(replica_id)
        if totals is not None:
            for listener in self._detach_listeners:
                listener(replica_id, totals)
        replica = self.engine.replicas.get(replica_id)
        memory = None if replica is None else replica.scheduler.kv
        detached = self.engine.detach(replica_id, loss)
        if totals is not None:
            self.losses.note(replica_id, loss, detached)
            if memory is not None:
                loop = asyncio.get_running_loop()
                loop.call_later(_DISMANTLE_DELAY_S, loop.run_in_executor, None, _dismantle, memory)
            self._announce_serving()
        wait_s, call_later = self.settings.replica_wait_s, asyncio.get_running_loop().call_later
        if not self.engine.replicas and self._give_up is None:
            self._give_up = call_later(wait_s, self._suspend)
        if self._oversized is not None:
            self._oversized.cancel()
        self._oversized = call_later(wait_s, self._fail_oversized)

    def grammar_answered(self, replica_id: str, grammar: Grammar, outcome: float | TriptychError) -> None:
        """Notes the seconds of a grammar's compilation, or the reason of its failure."""
        if isinstance(outcome, TriptychError):
            self.engine.grammar_refused(replica_id, grammar, outcome)
            return
        replica = self.engine.replicas.get(replica_id)
        if replica is not None and isinstance(replica.scheduler, ReplicaScheduler):
            replica.scheduler.stats.grammar_compile_s.observe(outcome)
        self.engine.grammar_compiled(replica_id, grammar)

    def stalled(self, replica_id: str, stall: Stall | None) -> None:
        """Notes a stall of a replica, or None after its recovery."""
        if stall is None:
            self._stalled.discard(replica_id)
        else:
            self._stalled.add(replica_id)
            self.losses.stalls[stall] += 1
        self._announce_serving()

    def _check_same_model(self, new: ServedModel, replica_id: str) -> None:
        if self.served is None:
            return
        weights, other = self.served.weights_digest, new.weights_digest
        if weights and other and weights != other:
            raise ConfigurationRefused(
                f"replica {replica_id} has other weights of {new.info.source} (digest {other[:12]}) than this"
                f" deployment serves ({weights[:12]}); give all workers the same files"
            )
        if difference := differing_fact(self.served.info, new.info, _SHARED_FACTS):
            fact, ours, theirs = difference
            raise ConfigurationRefused(
                f"replica {replica_id} has {fact} {theirs!r} and this deployment serves {ours!r}; all workers must run one model"
            )

    # ---- service ----

    def dispatch(self) -> None:
        """Places waiting requests on replicas with room. Every driver calls this between two steps."""
        self.engine.dispatch()
        self.histogram.tick()

    def load(self) -> Load:
        """Returns the current load, including starting replicas."""
        load = self.engine.load()
        starting = (ReplicaLoad(name, starting=detail) for name, detail in self.starting.items())
        return replace(load, replicas=(*load.replicas, *starting))

    def _announce_serving(self) -> None:
        serving = any(replica_id not in self._stalled for replica_id in self.engine.replicas)
        for listener in self._serving_listeners:
            listener(serving)

    def _fail_oversized(self) -> None:
        self._oversized = None
        if failed := self.engine.fail_oversized():
            self._log.error(
                "waiting_requests_failed", count=failed, reason="too large for the remaining workers"
            )

    def _suspend(self) -> None:
        """Stops waiting for a worker: requests fail at once until a worker is back."""
        self._give_up = None
        wait_s = self.settings.replica_wait_s
        error = Unavailable(f"no worker was ready for {wait_s:g} s; retry later", retry_after_ms=5000)
        if failed := self.engine.suspend(error):
            self._log.error("waiting_requests_failed", count=failed, reason="no worker")


def make_memory(replica: Configured) -> KvCache | None:
    """Makes a replica's KV memory on a thread, without collections caused by its many objects."""
    gc.disable()
    try:
        return replica.setup.make_memory(replica.description, tuple(replica.ready.num_blocks))
    finally:
        gc.enable()


def _dismantle(memory: KvCache) -> None:
    """Frees the KV memory of a lost replica on a thread."""
    for group in memory.groups:
        group.pool.dismantle()
