"""What all replicas have in common: the model, the geometry, the engine, and whether anybody can be served."""

import asyncio
import time
from collections.abc import Callable

from protos.errors import ConfigurationRefused, Unavailable
from protos.logs import get_logger
from protos.triptych.v1 import inference_pb2, worker_pb2
from scheduler_svc.batch_histogram import BatchHistogram, histogram_path
from scheduler_svc.buckets import decode_buckets
from scheduler_svc.convert import groups_from_proto
from scheduler_svc.engine import AttachedReplica, Engine, ServedModel
from scheduler_svc.geometry import Geometry
from scheduler_svc.kv_cache import CacheOptions, KvCache
from scheduler_svc.model_files import ServedFiles, describe_served
from scheduler_svc.policy.interleave import Interleave
from scheduler_svc.policy.order import ArrivalOrder, PriorityFairOrder
from scheduler_svc.policy.windows import KeepEnds, KeepJunctions
from scheduler_svc.scheduler import ReplicaScheduler
from scheduler_svc.settings import Settings

_KEEP_POLICIES = {"junctions": KeepJunctions, "ends": KeepEnds}


def make_engine(settings: Settings, clock: Callable[[], float] = time.monotonic) -> Engine:
    """The engine that the settings describe."""
    order = ArrivalOrder() if settings.order == "arrival" else None
    return Engine(
        max_waiting=settings.max_waiting_requests,
        max_waiting_tokens=settings.max_waiting_tokens,
        clock=clock,
        order=order or PriorityFairOrder(settings.ageing_s, settings.tenant_weights),
        max_pinned_share=settings.max_pinned_share,
    )


class Deployment:
    """Joins settings, engine and replicas.

    Attributes:
        served: the model and its files, once the first replica is ready.
        granule: tokens under one prefix key, once the first replica is ready.
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
        self.served: ServedFiles | None = None
        self.granule = 0
        self.starting: dict[str, str] = {}
        self._listeners: list[Callable[[bool], None]] = []

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

    def geometry_for(self, description: worker_pb2.DescribeResponse) -> Geometry:
        """The static shapes for a worker: the settings, and its own defaults where they say nothing.

        Raises:
            ConfigurationRefused: if the settings contradict one another on this device.
        """
        settings = self._settings
        max_num_seqs = settings.max_num_seqs or description.default_max_num_seqs
        chunk = settings.max_num_batched_tokens or description.default_chunk
        try:
            buckets = decode_buckets(
                settings.decode_bucket_strategy,
                max_batch=max_num_seqs,
                minimum=settings.decode_bucket_min,
                step=settings.decode_bucket_step,
                limit=settings.decode_bucket_limit,
                manual=settings.decode_buckets,
            )
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
        self.granule = geometry.granule
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
        )

    def attach(self, replica_id: str, replica: AttachedReplica) -> None:
        """A replica receives steps from now on."""
        if self._give_up is not None:
            self._give_up.cancel()
            self._give_up = None
        self.starting.pop(replica_id, None)
        self._engine.attach(replica_id, replica)
        self._announce()

    def detach(self, replica_id: str) -> int:
        """A replica is gone. Its requests wait for another one, but not for ever.

        Returns:
            How many requests were put back.
        """
        self.starting.pop(replica_id, None)
        was_attached = replica_id in self._engine.replicas
        count = self._engine.detach(replica_id)
        if was_attached:
            self._announce()
        if not self._engine.replicas and self._give_up is None:
            wait_s = self._settings.replica_wait_s
            self._give_up = asyncio.get_running_loop().call_later(wait_s, self._fail_waiting)
        return count

    def dispatch(self) -> None:
        """Between two steps of some replica: lets waiting requests have what became free."""
        self._engine.dispatch()
        self.histogram.tick()

    def _fail_waiting(self) -> None:
        self._give_up = None
        wait_s = self._settings.replica_wait_s
        failed = self._engine.fail_waiting(
            Unavailable(f"no worker was ready for {wait_s:g} s; retry later", retry_after_ms=5000)
        )
        # New requests are refused at once until a worker is back.
        self._engine.model = None
        if failed:
            self._log.error("waiting_requests_failed", count=failed, reason="no worker")

    def _announce(self) -> None:
        for listener in self._listeners:
            listener(bool(self._engine.replicas))

    def _check_same_model(self, new: ServedFiles, replica_id: str) -> None:
        if self.served is None:
            return
        for field in ("source", "architecture", "vocab_size", "max_model_len", "dtype", "tokenizer_sha256"):
            ours, theirs = getattr(self.served.info, field), getattr(new.info, field)
            if ours != theirs:
                raise ConfigurationRefused(
                    f"replica {replica_id} has {field} {theirs!r} and this deployment serves {ours!r}; all workers must run one model"
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
                replica_id=replica_id, state=inference_pb2.REPLICA_STATE_CONFIGURING, detail=detail
            )
            for replica_id, detail in self.starting.items()
        )
        return inference_pb2.Load(
            num_running=self._engine.num_running,
            num_waiting=self._engine.num_waiting,
            num_waiting_tokens=self._engine.waiting.num_tokens,
            kv_usage=sum(replica.kv_usage for replica in replicas) / max(1, len(self._engine.replicas)),
            replicas=replicas,
        )
