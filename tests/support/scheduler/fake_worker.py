"""A worker on a simulated device that speaks the Worker service over real gRPC."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field, replace

from protos.errors import Context, Internal, TriptychError, abort
from protos.service.grpc_options import SCHEMA_REVISION
from protos.step_messages import plan_from_proto, result_to_proto
from protos.steps import StepPlan, StepResult
from protos.triptych.v1 import common_pb2, worker_pb2, worker_pb2_grpc
from scheduler_svc.shapes.shape_config import ShapeConfig
from scheduler_svc.workers.descriptions import groups_from_proto
from tests.support.plan_order import SimulatedWorker
from tests.support.scheduler.factories import EOS, simulated_adapters
from tests.support.scheduler.simulated_device import (
    DeviceLostError,
    Moment,
    SimulatedDevice,
    StepFailedError,
    never,
)

FILES = {"tokenizer.json": b"{}" * 400_000, "tokenizer_config.json": b"{}", "empty.txt": b""}


@dataclass
class FakeWorker(worker_pb2_grpc.WorkerServicer):
    """Serves any registered scheduler; a simulated device computes the tokens."""

    num_blocks: int = 65
    die_at_step: int | None = None
    """Ends the Execute stream instead of answering this step."""
    kills: Callable[[Moment], bool | None] = never
    """Whether the Execute stream ends instead of doing this."""
    hold_at_step: int | None = None
    """Closes the gate before this step, counted over all plans."""
    holds: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once it has done so."""
    first_step_timeout_s: float = 0.0
    """What Configure says about steps that make graphs."""
    refuse_configure: TriptychError | None = None
    refuse_execute: TriptychError | None = None
    silent: bool = False
    """Accepts the Execute stream and answers nothing."""
    fail_from_step: int | None = None
    """Answers this step and all later ones with an error, until it is None again."""
    skips: int = 0
    """Answers the next plans with work, so many of them, without running the work."""
    schema_revision: int = SCHEMA_REVISION
    kind: common_pb2.KvGroupKind.ValueType = common_pb2.KV_GROUP_KIND_FULL
    window: int = 0
    source: str = "simulated"
    vocab_size: int = 97
    """Ids that a prompt may have; the device makes tokens below 97."""
    max_model_len: int = 64
    files: Mapping[str, bytes] = field(default_factory=lambda: FILES)
    """The tokenizer files."""
    weights_digest: str = ""
    default_chunk: int = 4
    prefill_buckets: bool = True
    default_block_size: int = 4
    block_copies: worker_pb2.BlockCopies.ValueType = worker_pb2.BLOCK_COPIES_TENSORS
    block_copies_when_ready: worker_pb2.BlockCopies.ValueType = worker_pb2.BLOCK_COPIES_UNSPECIFIED
    """The answer of Configure, if it differs."""
    max_loras: int = 0
    """Adapter slots; 0: it runs no adapters."""
    max_cpu_loras: int = 0
    sources: dict[str, str | TriptychError] = field(default_factory=dict)
    """Adapters by source: their weights, or why they cannot be loaded. A source that is absent is its own
    weights."""
    loads: list[str] = field(default_factory=list)
    """The sources of the adapters that the scheduler had loaded here, in order. Behind "@", the commit that
    it asked for."""
    may_load: asyncio.Event = field(default_factory=asyncio.Event)
    """Calls of LoadAdapter are answered while this is set."""
    revisions: dict[str, str] = field(default_factory=dict)
    """The commits of adapters of a hub, by source."""
    slow_sources: dict[str, asyncio.Event] = field(default_factory=dict)
    """A call of LoadAdapter for one of these sources is answered once its event is set."""
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    """Steps run while this is set."""
    configured: worker_pb2.ConfigureRequest | None = None
    """The configuration that Configure received."""
    plans: asyncio.Queue[StepPlan] = field(default_factory=asyncio.Queue)
    """The plans that have arrived, in order."""
    device: SimulatedDevice | None = None
    steps: int = 0
    """Steps that have run."""

    def __post_init__(self) -> None:
        self.gate.set()
        self.may_load.set()
        self._store = (
            simulated_adapters(self.max_loras, self.max_cpu_loras, self.sources) if self.max_loras else None
        )

    @property
    def adapters(self) -> dict[int, str]:
        """The adapters on the host by id, with their weights."""
        assert self._store is not None
        return self._store.hosted

    @property
    def group(self) -> common_pb2.KvGroup:
        """The model's only KV group."""
        return common_pb2.KvGroup(
            group_id=0, kind=self.kind, window=self.window, num_layers=1, bytes_per_token=8
        )

    async def Describe(
        self, request: worker_pb2.DescribeRequest, context: Context
    ) -> worker_pb2.DescribeResponse:
        return worker_pb2.DescribeResponse(
            schema_revision=self.schema_revision, worker_id="w", device="cpu", device_name="simulated",
            model=common_pb2.ModelInfo(source=self.source, architecture="Hash", vocab_size=self.vocab_size, max_model_len=self.max_model_len,
                                       eos_token_ids=[EOS], dtype="float32"),
            kv_groups=[self.group],
            block_size_multiple=4, max_batch=8, max_chunk=16, default_block_size=self.default_block_size,
            default_chunk=self.default_chunk, default_max_num_seqs=4, sampling_fields=["temperature", "seed", "top_p"], max_logprobs=5,
            max_lease_steps=32, prefill_buckets=self.prefill_buckets, block_copies=self.block_copies,
            lora=worker_pb2.LoraLimits(max_loras=self.max_loras, max_rank=16, max_cpu_loras=self.max_cpu_loras) if self.max_loras else None,
        )  # fmt: skip

    async def Configure(
        self, request: worker_pb2.ConfigureRequest, context: Context
    ) -> AsyncIterator[worker_pb2.ConfigureEvent]:
        if self.refuse_configure is not None:
            await abort(context, self.refuse_configure)
        self.configured = request
        progress = worker_pb2.ConfigureProgress(
            phase=worker_pb2.ConfigureProgress.PHASE_LOAD, message="weights"
        )
        yield worker_pb2.ConfigureEvent(progress=progress)
        yield worker_pb2.ConfigureEvent(
            ready=worker_pb2.ConfigureReady(
                num_blocks=[self.num_blocks],
                first_step_timeout_s=self.first_step_timeout_s,
                weights_digest=self.weights_digest,
                block_copies=self.block_copies_when_ready or self.block_copies,
            )
        )

    async def GetModelFiles(
        self, request: worker_pb2.GetModelFilesRequest, context: Context
    ) -> AsyncIterator[common_pb2.FileChunk]:
        for name, data in self.files.items():
            half = len(data) // 2
            yield common_pb2.FileChunk(name=name, data=data[:half])
            yield common_pb2.FileChunk(name=name, data=data[half:], last=True)

    async def CompileGrammar(
        self, request: worker_pb2.CompileGrammarRequest, context: Context
    ) -> worker_pb2.CompileGrammarResponse:
        raise AssertionError("this worker does not offer structured_output")

    async def LoadAdapter(
        self, request: worker_pb2.LoadAdapterRequest, context: Context
    ) -> worker_pb2.LoadAdapterResponse:
        assert self._store is not None
        self.loads.append("@".join(filter(None, (request.source, request.revision))))
        displaced = self._store.begin(request.adapter_id, request.needed_ids)
        await self.may_load.wait()
        if (slow := self.slow_sources.get(request.source)) is not None:
            await slow.wait()
        try:
            loaded = self._store.end(request.adapter_id, request.source, displaced)
        except TriptychError as error:
            await abort(context, error)
        return worker_pb2.LoadAdapterResponse(
            rank=8, digest=loaded.digest, memory_bytes=1, revision=self.revisions.get(request.source, ""),
            displaced_ids=displaced,
        )  # fmt: skip

    async def UnloadAdapter(
        self, request: worker_pb2.UnloadAdapterRequest, context: Context
    ) -> worker_pb2.UnloadAdapterResponse:
        assert self._store is not None
        self._store.unload(request.adapter_id)
        return worker_pb2.UnloadAdapterResponse()

    async def Execute(
        self, request_iterator: AsyncIterator[worker_pb2.StepPlan], context: Context
    ) -> AsyncIterator[worker_pb2.StepResult]:
        if self.refuse_execute is not None:
            await abort(context, self.refuse_execute)
        assert self.configured is not None
        shapes = ShapeConfig(
            self.configured.max_model_len, self.configured.max_num_seqs, self.configured.chunk,
            self.configured.block_size, tuple(self.configured.decode_buckets),
            prefill_buckets=tuple(self.configured.prefill_buckets),
        )  # fmt: skip
        groups = groups_from_proto(worker_pb2.DescribeResponse(kv_groups=[self.group]))
        self.device = SimulatedDevice(shapes, groups, kills=self.kills, adapters=self._store)
        worker = SimulatedWorker(self._run_step)
        plans: asyncio.Queue[StepPlan | None] = asyncio.Queue()
        reading = asyncio.ensure_future(self._read_ahead(request_iterator, plans))
        try:
            while (plan := await plans.get()) is not None:
                if self.silent:
                    continue
                if plan.step == 0:
                    yield worker_pb2.StepResult(last=True)
                    continue
                worker.take(plan)
                while worker.has_work:
                    self.steps += 1
                    if self.steps == self.hold_at_step:
                        self.gate.clear()
                        self.holds.set()
                    await self.gate.wait()
                    if self.steps == self.die_at_step:
                        return
                    while not plans.empty():
                        if (newer := plans.get_nowait()) is None:
                            return
                        worker.take(newer)
                    result = worker.run()
                    yield result_to_proto(StepPlan(result.step), result)
        except DeviceLostError:
            return
        finally:
            reading.cancel()
            # The next scheduler knows nothing of them.
            self._forget_adapters()

    def _forget_adapters(self) -> None:
        if self._store is not None:
            self._store.forget()
            self._store.forget_slots()

    def _run_step(self, plan: StepPlan) -> StepResult:
        assert self.device is not None
        if plan.work is not None and self.skips:
            self.skips -= 1
            plan = replace(plan, work=None)
        self.device.broken = int(self.fail_from_step is not None and self.steps >= self.fail_from_step)
        try:
            return self.device.run(plan)
        except StepFailedError:
            return StepResult(plan.step, error=Internal("the device failed"))

    async def _read_ahead(
        self, messages: AsyncIterator[worker_pb2.StepPlan], plans: asyncio.Queue[StepPlan | None]
    ) -> None:
        try:
            async for message in messages:
                plan = plan_from_proto(message)
                plans.put_nowait(plan)
                if plan.step > 0:
                    self.plans.put_nowait(plan)
        finally:
            plans.put_nowait(None)
