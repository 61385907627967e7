"""What all replicas have in common: the model, the geometry, the engine, and whether anybody can be served."""

import asyncio
import gc
import time
from collections.abc import Callable

from protos.errors import ConfigurationRefused, TriptychError, Unavailable
from protos.logs import get_logger
from protos.triptych.v1 import inference_pb2, worker_pb2
from scheduler_svc.convert.plans import groups_from_proto, limits_from_proto
from scheduler_svc.convert.requests import pool_tasks_from_proto
from scheduler_svc.dispatch.engine import Engine
from scheduler_svc.dispatch.placement import AttachedReplica
from scheduler_svc.kv.cache import CacheOptions, KvCache
from scheduler_svc.kv.window_policy import KeepEnds, KeepJunctions
from scheduler_svc.policy.interleave import Interleave
from scheduler_svc.policy.order import ArrivalOrder, OrderPolicy, PriorityFairOrder
from scheduler_svc.pooling.batching import PoolShape, shapes_of
from scheduler_svc.pooling.engine import PooledModel, PoolEngine, PoolReplica
from scheduler_svc.pooling.scheduler import PoolScheduler
from scheduler_svc.replica.scheduler import ReplicaScheduler
from scheduler_svc.requests.admission import ServedModel
from scheduler_svc.requests.sampling import Grammar
from scheduler_svc.settings import Settings
from scheduler_svc.shapes.batch_histogram import BatchHistogram, histogram_path
from scheduler_svc.shapes.geometry import Geometry
from scheduler_svc.workers.model_files import ServedFiles, describe_served

# Settings that mean nothing to a pooling model; whoever sets one is told.
_NOT_FOR_POOLING = (
    "max_model_len", "max_num_seqs", "max_num_batched_tokens", "block_size", "num_blocks", "enable_prefix_caching",
)  # fmt: skip
_KEEP_POLICIES = {"junctions": KeepJunctions, "ends": KeepEnds}


def make_order(settings: Settings) -> OrderPolicy:
    """The policy of a queue that the settings describe."""
    if settings.order == "arrival":
        return ArrivalOrder()
    return PriorityFairOrder(settings.ageing_s, settings.tenant_weights)


def make_engine(settings: Settings, clock: Callable[[], float] = time.monotonic) -> Engine:
    """The engine that the settings describe."""
    return Engine(
        max_waiting=settings.max_waiting_requests,
        max_waiting_tokens=settings.max_waiting_tokens,
        clock=clock,
        order=make_order(settings),
        max_pinned_share=settings.max_pinned_share,
    )


# After a replica was lost: by then nobody refers to its pools any more.
_SETTLE_S = 5.0


def _settle_garbage() -> None:
    """Collects once, and never again looks at what is left: a million blocks would stop all replicas for a third of a second."""
    gc.unfreeze()  # the pools of lost replicas are full of cycles
    gc.collect()
    gc.freeze()


class Deployment:
    """Joins settings, engine and replicas.

    Attributes:
        pool: requests and replicas if the model is a pooling model; the engine then has none.
        served: the model and its files, once the first replica is ready.
        hash_block_size: tokens under one prefix key, once the first replica is ready.
        histogram: how large the decode batches of all replicas were.
        starting: replicas that are not ready yet, with the last thing heard about their start.
    """

    def __init__(
        self, settings: Settings, engine: Engine, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Starts without replicas."""
        self._settings = settings
        self._engine = engine
        self._clock = clock
        self._log = get_logger()
        self._give_up: asyncio.TimerHandle | None = None
        path = histogram_path(settings.state_dir) if settings.state_dir else None
        self.histogram = BatchHistogram(path, settings.batchsize_log_interval_s, clock, self._log)
        self.pool = PoolEngine(
            max_waiting=settings.max_waiting_requests,
            max_waiting_tokens=settings.max_waiting_tokens,
            clock=clock,
            make_order=lambda: make_order(settings),
        )
        self.served: ServedFiles | None = None
        self.hash_block_size = 0
        self.starting: dict[str, str] = {}
        self._listeners: list[Callable[[bool], None]] = []
        self._detach_listeners: list[Callable[[str, ReplicaScheduler | PoolScheduler], None]] = []

    @property
    def num_blocks(self) -> tuple[int, ...]:
        """Blocks per group asked of workers; empty: as many as their memory allows."""
        return (self._settings.num_blocks,) if self._settings.num_blocks else ()

    @property
    def windows_kept_per_slot(self) -> int:
        """Room for windows that a worker is asked to make beside those in use."""
        return self._settings.windows_kept_per_slot if self._settings.enable_prefix_caching else 0

    def on_serving(self, listener: Callable[[bool], None]) -> None:
        """Calls ``listener`` with whether any replica is ready, on every change."""
        self._listeners.append(listener)

    def on_detach(self, listener: Callable[[str, ReplicaScheduler | PoolScheduler], None]) -> None:
        """Calls ``listener`` with every replica that was ready and is lost or leaves, and its scheduler, whose counters are final."""
        self._detach_listeners.append(listener)

    def geometry_for(self, description: worker_pb2.DescribeResponse) -> Geometry:
        """The static shapes for a worker: the settings, and its own defaults where they say nothing.

        Raises:
            ConfigurationRefused: if the settings contradict one another on this device.
        """
        settings = self._settings
        manual = max(settings.decode_buckets) if settings.decode_bucket_strategy == "manual" else None
        max_num_seqs = settings.max_num_seqs or manual or description.default_max_num_seqs
        chunk = settings.max_num_batched_tokens or description.default_chunk
        try:
            buckets = settings.buckets(max_num_seqs)
        except ValueError as error:
            raise ConfigurationRefused(str(error)) from error
        return Geometry(
            max_model_len=settings.max_model_len or description.model.max_model_len,
            max_num_seqs=max_num_seqs,
            chunk=chunk,
            block_size=settings.block_size or description.default_block_size,
            buckets=buckets,
        )

    def add(
        self, replica_id: str, geometry: Geometry, description: worker_pb2.DescribeResponse, num_blocks: tuple[int, ...],
        files: dict[str, bytes],
    ) -> ReplicaScheduler:  # fmt: skip
        """Makes the scheduler of a configured worker; the first one also fixes the served model.

        Raises:
            ConfigurationRefused: if the worker serves another model than the replicas before it.
        """
        served = describe_served(
            description.model,
            files,
            served_name=self._settings.served_model_name,
            max_model_len=geometry.max_model_len,
        )
        self._check_same_model(served, replica_id)
        self._check_same_grid(geometry, replica_id)
        settings = self._settings
        options = CacheOptions(
            prefix_caching=settings.enable_prefix_caching,
            sub_block=settings.sub_block_cache,
            cache_generated=settings.cache_generated_tokens,
        )
        kv = KvCache(
            geometry,
            groups_from_proto(description),
            num_blocks,
            model=served.info.source,
            options=options,
            keep=_KEEP_POLICIES[settings.keep_windows](),
            # Above every number that an earlier life of this replica can have given.
            first_event=time.time_ns() // 1000,
        )
        self.hash_block_size = geometry.hash_block_size
        self.histogram.describe(served.info.served_name, geometry.buckets)
        if self.served is None:
            self.served = served
        self._engine.model = ServedModel(
            max_model_len=geometry.max_model_len,
            vocab_size=served.info.vocab_size,
            sampling_fields=frozenset(description.sampling_fields),
            max_logprobs=description.max_logprobs,
            eos_token_ids=frozenset(served.info.eos_token_ids),
        )
        return ReplicaScheduler(
            geometry,
            kv,
            self._engine,
            Interleave(settings.decode_steps_per_chunk),
            clock=self._clock,
            observe_batch=self.histogram.observe,
            max_lease=min(settings.lease_steps, max(1, description.max_lease_steps)),
        )

    def pool_shapes_for(self, description: worker_pb2.DescribeResponse) -> tuple[PoolShape, ...]:
        """The static shapes for a worker of a pooling model.

        Raises:
            ConfigurationRefused: if the model or the device cannot run the shapes of the settings or of the replicas before it.
        """
        settings = self._settings
        if ignored := [name for name in _NOT_FOR_POOLING if _is_set(settings, name)]:
            self._log.warning("settings_ignored", names=ignored, reason="pooling models run in pool shapes")
        shapes = self.pool.shapes
        batches = [shape.batch for shape in shapes] or settings.pool_batch_sizes
        lengths = [shape.prompt_len for shape in shapes] or settings.pool_prompt_lens
        limits = limits_from_proto(description)
        return shapes_of(batches, lengths, max_context=limits.max_context, max_batch=limits.max_batch)

    def add_pooling(
        self, replica_id: str, shapes: tuple[PoolShape, ...], description: worker_pb2.DescribeResponse,
        files: dict[str, bytes],
    ) -> PoolScheduler:  # fmt: skip
        """The same as :meth:`add` for a worker of a pooling model.

        Raises:
            ConfigurationRefused: if the worker serves another model than the replicas before it.
        """
        served = describe_served(
            description.model,
            files,
            served_name=self._settings.served_model_name,
            max_model_len=shapes[-1].prompt_len,
        )
        served.info.pool_tasks[:] = description.pool_tasks
        self._check_same_model(served, replica_id)
        if self.served is None:
            self.served = served
        model = PooledModel(
            served.info.vocab_size, pool_tasks_from_proto(description), served.info.pooled_size
        )
        self.pool.serve(model, shapes)
        return self.pool.make_scheduler(replica_id, model)

    def attach(self, replica_id: str, replica: AttachedReplica | PoolReplica) -> None:
        """A replica receives steps from now on."""
        if self._give_up is not None:
            self._give_up.cancel()
            self._give_up = None
        self.starting.pop(replica_id, None)
        if isinstance(replica, PoolReplica):
            self.pool.attach(replica_id, replica)
        else:
            self._engine.attach(replica_id, replica)
        _settle_garbage()
        self._announce()

    def detach(self, replica_id: str) -> int:
        """A replica is gone. Its requests wait for another one, but not for ever.

        Returns:
            How many requests were put back.
        """
        self.starting.pop(replica_id, None)
        was_attached = self._announce_end(replica_id)
        count = self._engine.detach(replica_id) + self.pool.detach(replica_id)
        if was_attached:
            asyncio.get_running_loop().call_later(_SETTLE_S, _settle_garbage)
            self._announce()
        if not self._has_replicas and self._give_up is None:
            wait_s = self._settings.replica_wait_s
            self._give_up = asyncio.get_running_loop().call_later(wait_s, self._fail_waiting)
        return count

    def grammar_compiled(self, replica_id: str, grammar: Grammar) -> None:
        """See ``Engine.grammar_compiled``."""
        self._engine.grammar_compiled(replica_id, grammar)

    def grammar_refused(self, replica_id: str, grammar: Grammar, error: TriptychError) -> None:
        """See ``Engine.grammar_refused``."""
        self._engine.grammar_refused(replica_id, grammar, error)

    def dispatch(self) -> None:
        """Between two steps of some replica: lets waiting requests have what became free."""
        self._engine.dispatch()
        self.histogram.tick()

    def _fail_waiting(self) -> None:
        self._give_up = None
        wait_s = self._settings.replica_wait_s
        error = Unavailable(f"no worker was ready for {wait_s:g} s; retry later", retry_after_ms=5000)
        failed = self._engine.fail_waiting(error) + self.pool.fail_waiting(error)
        # New requests are refused at once until a worker is back.
        self._engine.model = self.pool.model = None
        if failed:
            self._log.error("waiting_requests_failed", count=failed, reason="no worker")

    def _announce(self) -> None:
        for listener in self._listeners:
            listener(self._has_replicas)

    @property
    def _has_replicas(self) -> bool:
        return bool(self._engine.replicas or self.pool.replicas)

    async def drained(self, timeout_s: float) -> bool:
        """Waits until no request is live; False if some still are after ``timeout_s`` seconds."""
        return await self._engine.drained(timeout_s) and await self.pool.drained(timeout_s)

    def _announce_end(self, replica_id: str) -> bool:
        """Tells of a replica that is about to be detached; False if it never was attached."""
        replica = self._engine.replicas.get(replica_id) or self.pool.replicas.get(replica_id)
        if replica is None:
            return False
        for listener in self._detach_listeners:
            listener(replica_id, replica.scheduler)
        return True

    def _check_same_model(self, new: ServedFiles, replica_id: str) -> None:
        if self.served is None:
            return
        fields = ("source", "architecture", "vocab_size", "max_model_len", "dtype", "tokenizer_sha256",
                  "pool_tasks", "pooled_size")  # fmt: skip
        for field in fields:
            ours, theirs = getattr(self.served.info, field), getattr(new.info, field)
            if ours != theirs:
                raise ConfigurationRefused(
                    f"replica {replica_id} has {field} {theirs!r} and this deployment serves {ours!r}; all workers must run one model"
                )

    def _check_same_grid(self, geometry: Geometry, replica_id: str) -> None:
        """A request's prefix keys are computed once, for whichever replica gets it."""
        for replica in self._engine.replicas.values():
            ours = replica.scheduler.geometry
            if (ours.chunk, ours.block_size) != (geometry.chunk, geometry.block_size):
                raise ConfigurationRefused(
                    f"replica {replica_id} would run chunks of {geometry.chunk} and blocks of {geometry.block_size} tokens beside "
                    f"replicas with {ours.chunk} and {ours.block_size}; set --max-num-batched-tokens and --block-size"
                )

    def load(self) -> inference_pb2.Load:
        """The deployment's load, now."""
        replicas = [
            inference_pb2.ReplicaLoad(
                replica_id=replica_id,
                state=inference_pb2.REPLICA_STATE_READY,
                num_running=replica.scheduler.num_running,
                kv_usage=replica.scheduler.kv.usage,
            )
            for replica_id, replica in self._engine.replicas.items()
        ]
        replicas.extend(
            inference_pb2.ReplicaLoad(
                replica_id=replica_id,
                state=inference_pb2.REPLICA_STATE_READY,
                num_running=pooling.scheduler.num_running,
            )
            for replica_id, pooling in self.pool.replicas.items()
        )
        replicas.extend(
            inference_pb2.ReplicaLoad(
                replica_id=replica_id, state=inference_pb2.REPLICA_STATE_CONFIGURING, detail=detail
            )
            for replica_id, detail in self.starting.items()
        )
        return inference_pb2.Load(
            num_running=self._engine.num_running + self.pool.num_running,
            num_waiting=self._engine.num_waiting + self.pool.num_waiting,
            num_waiting_tokens=self._engine.waiting.num_tokens + self.pool.num_waiting_tokens,
            kv_usage=sum(replica.kv_usage for replica in replicas) / max(1, len(self._engine.replicas)),
            replicas=replicas,
        )


def _is_set(settings: Settings, name: str) -> bool:
    return bool(getattr(settings, name) != type(settings).model_fields[name].default)
