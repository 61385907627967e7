"""Replicas of generating and of pooling models: their static shapes and schedulers."""

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial

from protos.errors import ConfigurationRefused
from protos.service.logs import get_logger
from protos.service.settings import Group
from protos.step_messages import shape_to_proto
from protos.steps import PoolShape
from protos.triptych.v1 import worker_pb2
from protos.validation import TOKEN_TASKS
from scheduler_svc.adapters.registry import name_and_path
from scheduler_svc.adapters.seats import AdapterSeats
from scheduler_svc.engine.engine import Engine
from scheduler_svc.engine.placement import AttachedReplica
from scheduler_svc.kv.cache import CacheOptions, KvCache
from scheduler_svc.kv.prefix_index import KeepEnds, KeepJunctions
from scheduler_svc.policy.order import ArrivalOrder, PriorityFairOrder
from scheduler_svc.policy.rules import Turns
from scheduler_svc.replica.pooling import PoolScheduler
from scheduler_svc.replica.scheduler import ReplicaScheduler
from scheduler_svc.requests.admission import ModelLimits
from scheduler_svc.requests.pooled_model import MOST_VALUES, PooledModel
from scheduler_svc.settings import Settings
from scheduler_svc.shapes.batch_histogram import BatchHistogram
from scheduler_svc.shapes.buckets import stage_batch
from scheduler_svc.shapes.shape_config import ShapeConfig, shapes_of
from scheduler_svc.workers.descriptions import WorkerDescription
from scheduler_svc.workers.step_loop import StepScheduler

# Features of a replica that need copies of blocks.
_NEED_COPIES = ("sub-block reuse", "kept windows", "forks that copy a block")
_KEEP_POLICIES = {"junctions": KeepJunctions, "ends": KeepEnds}


Connect = Callable[[ReplicaScheduler | PoolScheduler], AttachedReplica]
"""Connects a scheduler with the calls of its worker's driver."""


@dataclass(frozen=True, slots=True)
class ReplicaSetup:
    """The configuration of a worker, and its attachment to the engine once configured."""

    request: worker_pb2.ConfigureRequest
    max_model_len: int
    """Longest sequence of the replica, tokens."""
    facts: Mapping[str, object]
    """The configuration for the log."""
    make_memory: Callable[[WorkerDescription, tuple[int, ...]], KvCache | None]
    """Makes the KV memory, given blocks per KV group; None without KV memory. Safe on any thread: a million
    blocks take a second."""
    attach: Callable[[WorkerDescription, KvCache | None, str, Connect], StepScheduler]
    """Attaches the replica, given the name of the model; :class:`protos.errors.ConfigurationRefused` if it
    contradicts the other replicas."""


@dataclass(frozen=True, slots=True)
class Configured:
    """A replica with configured ranks."""

    description: WorkerDescription
    setup: ReplicaSetup
    ready: worker_pb2.ConfigureReady
    """Rank 0's answer."""
    first_step_timeout_s: float
    """Time limit on the slowest rank for a step that makes its graph, seconds."""
    files: Mapping[str, bytes]


def warn_of_ignored(settings: Settings, names: Iterable[str], reason: str) -> None:
    """Logs the settings among `names` with a value but no effect on the kind of model."""
    fields = type(settings).model_fields
    if ignored := [name for name in names if getattr(settings, name) != fields[name].default]:
        get_logger().warning("settings_ignored", names=ignored, reason=reason)


def make_engine(settings: Settings, clock: Callable[[], float] = time.monotonic) -> Engine:
    """Returns an engine with the limits and policies of the settings."""
    fair = PriorityFairOrder(settings.ageing_s, settings.tenant_weights)
    return Engine(
        max_waiting=settings.max_waiting_requests,
        max_waiting_tokens=settings.max_waiting_tokens,
        clock=clock,
        order=ArrivalOrder() if settings.order == "arrival" else fair,
        max_worker_losses=settings.max_worker_losses,
        max_step_failures=settings.max_step_failures,
        expected_adapters=[name_and_path(module)[0] for module in settings.lora_modules],
    )


def shapes_for(settings: Settings, description: WorkerDescription) -> ShapeConfig:
    """Returns the static shapes for a worker: the settings, or its own defaults.

    Raises:
        ConfigurationRefused: the settings contradict each other on this device.
    """
    stages = description.pipeline_stages
    manual = max(settings.decode_buckets) * stages if settings.decode_bucket_strategy == "manual" else None
    # A device for a single sequence runs one on each stage.
    max_num_seqs = settings.max_num_seqs or manual or max(description.default_max_num_seqs, stages)
    chunk = settings.chunk(description.default_chunk)
    block_size = settings.block_size or description.default_block_size
    try:
        buckets = settings.buckets(stage_batch(max_num_seqs, stages))
        chunk_sizes = settings.chunk_sizes(chunk, block_size) if description.prefill_buckets else ()
    except ValueError as error:
        raise ConfigurationRefused(str(error)) from error
    return ShapeConfig(
        max_model_len=settings.max_model_len or description.model.max_model_len,
        max_num_seqs=max_num_seqs,
        chunk=chunk,
        block_size=block_size,
        buckets=buckets,
        stages=stages,
        prefill_buckets=chunk_sizes,
    )


class GeneratingReplicas:
    """Sets up replicas of generating models."""

    def __init__(
        self, settings: Settings, engine: Engine, histogram: BatchHistogram, clock: Callable[[], float]
    ) -> None:
        """Adds replicas to `engine`; `histogram` counts the steps of all replicas."""
        self._settings = settings
        self._engine = engine
        self._histogram = histogram
        self._clock = clock
        self._log = get_logger()

    def set_up(self, replica_id: str, description: WorkerDescription) -> ReplicaSetup:
        """Chooses the shapes of a worker.

        Raises:
            ConfigurationRefused: the settings contradict each other, the model or the device.
        """
        warn_of_ignored(self._settings, Settings.groups[Group.POOLING], "generating models run in buckets")
        shapes = shapes_for(self._settings, description)
        shapes.check(description.limits, description.groups)
        if not description.prefill_buckets:
            names = [name for name in Settings.groups[Group.BATCHING] if name.startswith("prefill_bucket")]
            warn_of_ignored(self._settings, names, "the worker runs prefill chunks of one size")
        if shapes.max_num_seqs % shapes.stages:
            self._log.warning(
                "slots_left_over", replica=replica_id, max_num_seqs=shapes.max_num_seqs, pipeline_stages=shapes.stages,
                used=shapes.stage_batch * shapes.stages,
            )  # fmt: skip
        return ReplicaSetup(
            request=self._configure_request(shapes, copies_blocks=description.copies_blocks),
            max_model_len=shapes.max_model_len,
            facts={
                "prefill_buckets": shapes.chunk_sizes,
                "block_size": shapes.block_size,
                "buckets": shapes.buckets,
                "pipeline_stages": shapes.stages,
                "max_model_len": shapes.max_model_len,
            },
            make_memory=partial(self._make_cache, shapes),
            attach=partial(self._attach, replica_id, shapes),
        )

    def _configure_request(self, shapes: ShapeConfig, *, copies_blocks: bool) -> worker_pb2.ConfigureRequest:
        settings = self._settings
        keeps_windows = settings.enable_prefix_caching and copies_blocks
        return worker_pb2.ConfigureRequest(
            max_model_len=shapes.max_model_len,
            max_num_seqs=shapes.max_num_seqs,
            chunk=shapes.chunk,
            prefill_buckets=shapes.chunk_sizes,
            block_size=shapes.block_size,
            decode_buckets=shapes.buckets,
            # None asks for as many as the worker's memory allows.
            num_blocks=(settings.num_blocks,) if settings.num_blocks else (),
            windows_kept_per_slot=settings.windows_kept_per_slot if keeps_windows else 0,
        )

    def _attach(
        self,
        replica_id: str,
        shapes: ShapeConfig,
        description: WorkerDescription,
        memory: KvCache | None,
        served_name: str,
        connect: Connect,
    ) -> ReplicaScheduler:
        assert memory is not None
        self._check_same_grid(shapes, replica_id)
        if not description.copies_blocks:
            self._log.warning("no_block_copies", replica=replica_id, off=_NEED_COPIES)
        self._histogram.describe(served_name, shapes)
        self._engine.model = ModelLimits(
            max_model_len=shapes.max_model_len,
            vocab_size=description.model.vocab_size,
            sampling_fields=description.sampling_fields,
            max_logprobs=description.max_logprobs,
            eos_token_ids=frozenset(description.model.eos_token_ids),
        )
        settings, lora = self._settings, description.lora
        interval_ms = settings.event_interval_ms
        scheduler = ReplicaScheduler(
            shapes,
            memory,
            self._engine,
            Turns(
                settings.decode_steps_per_chunk,
                ttft_target_s=settings.ttft_target_ms * 1e-3,
                itl_target_s=settings.itl_target_ms * 1e-3,
            ),
            clock=self._clock,
            lease_steps=min(settings.lease_steps, description.max_lease_steps),
            event_interval_s=None if interval_ms is None else interval_ms * 1e-3,
            adapters=AdapterSeats(lora.max_loras, lora.max_cpu_loras, self._clock) if lora else None,
        )
        scheduler.stats.observe_batch = self._histogram.observe
        scheduler.stats.observe_chunk = self._histogram.observe_chunk
        registry = self._engine.adapters.registry
        registry.served_name, registry.aliases = served_name, self._settings.served_model_name[1:]

        self._engine.attach(replica_id, connect(scheduler))
        return scheduler

    def _make_cache(
        self, shapes: ShapeConfig, description: WorkerDescription, num_blocks: tuple[int, ...]
    ) -> KvCache:
        settings = self._settings
        return KvCache(
            shapes,
            description.groups,
            num_blocks,
            model=description.model.source,
            options=CacheOptions(
                prefix_caching=settings.enable_prefix_caching,
                sub_block=settings.sub_block_cache,
                cache_generated=settings.cache_generated_tokens,
                copies_blocks=description.copies_blocks,
                chunk_starts=description.chunk_starts,
            ),
            keep=_KEEP_POLICIES[settings.keep_windows](),
            # Higher than every sequence number of an earlier life of this replica.
            first_event=time.time_ns() // 1000,
        )

    def _check_same_grid(self, shapes: ShapeConfig, replica_id: str) -> None:
        """Refuses chunks or blocks unlike other replicas': requests share prefix keys over all replicas."""
        for replica in self._engine.replicas.values():
            assert isinstance(replica.scheduler, ReplicaScheduler)  # all replicas run one model
            ours = replica.scheduler.shapes
            if (ours.chunk, ours.block_size) != (shapes.chunk, shapes.block_size):
                raise ConfigurationRefused(
                    f"replica {replica_id} would run chunks of {shapes.chunk} and blocks of {shapes.block_size} tokens beside "
                    f"replicas with {ours.chunk} and {ours.block_size}; set --max-num-batched-tokens and --block-size"
                )


_IGNORED_SETTINGS = ("max_model_len", *Settings.groups[Group.BATCHING], *Settings.groups[Group.KV_MEMORY])


class PoolingReplicas:
    """Sets up replicas of pooling models."""

    def __init__(self, settings: Settings, engine: Engine, clock: Callable[[], float]) -> None:
        """Adds replicas to `engine`."""
        self._settings = settings
        self._engine = engine
        self._clock = clock

    def set_up(self, replica_id: str, description: WorkerDescription) -> ReplicaSetup:
        """Chooses the static shapes of a worker, those of earlier replicas if there are any.

        Raises:
            ConfigurationRefused: the model or the device cannot run the shapes.
        """
        settings = self._settings
        warn_of_ignored(settings, _IGNORED_SETTINGS, "pooling models run in pool shapes")
        limits, model = description.limits, description.model
        room = MOST_VALUES // model.pooled_size if TOKEN_TASKS.intersection(model.pool_tasks) else None
        chosen = shapes_of(
            settings.pool_batch_sizes, settings.pool_prompt_lens, fixed=self._shapes, max_context=limits.max_context, max_batch=limits.max_batch,
            max_tokens=room, packs_texts=description.packs_texts,
        )  # fmt: skip
        del model.pooling.shapes[:]
        model.pooling.shapes.extend(map(shape_to_proto, chosen))
        longest = max(shape.prompt_len for shape in chosen)
        return ReplicaSetup(
            request=worker_pb2.ConfigureRequest(max_model_len=longest, pool_shapes=model.pooling.shapes),
            max_model_len=chosen[-1].prompt_len,
            facts={"shapes": [str(shape) for shape in chosen]},
            make_memory=lambda *_: None,
            attach=partial(self._attach, replica_id, chosen),
        )

    @property
    def _shapes(self) -> tuple[PoolShape, ...]:
        """The shapes of the deployment; empty before the first replica attaches."""
        model = self._engine.model
        return model.shapes if isinstance(model, PooledModel) else ()

    def _attach(
        self,
        replica_id: str,
        shapes: tuple[PoolShape, ...],
        description: WorkerDescription,
        memory: KvCache | None,
        served_name: str,
        connect: Connect,
    ) -> PoolScheduler:
        del memory, served_name  # no KV memory, no histogram
        model = description.model
        self._engine.model = PooledModel(
            model.vocab_size,
            frozenset(model.pool_tasks),
            model.pooled_size,
            model.pooling,
            self._shapes or shapes,
        )
        # Texts are packed where a step's time grows with its tokens, on CPUs.
        scheduler = PoolScheduler(
            shapes, model.pooled_size, self._engine, clock=self._clock, padding_costs=description.packs_texts
        )
        self._engine.attach(replica_id, connect(scheduler))
        return scheduler
