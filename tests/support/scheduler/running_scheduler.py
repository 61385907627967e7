"""The scheduler's two neighbours for contract tests: a worker on a simulated device, and a running scheduler, both on real gRPC."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import grpc.aio
import pytest

from protos.errors import TriptychError, abort, from_rpc_error
from protos.server import Server
from protos.step_messages import plan_from_proto
from protos.steps import Decode, StepPlan
from protos.triptych.v1 import (
    common_pb2,
    inference_pb2,
    inference_pb2_grpc,
    registry_pb2,
    registry_pb2_grpc,
    worker_pb2,
    worker_pb2_grpc,
)
from protos.wire import SCHEMA_REVISION, Context, open_channel
from scheduler_svc.api.inference import InferenceServicer
from scheduler_svc.api.registry import RegistryServicer
from scheduler_svc.convert.configuration import groups_from_proto
from scheduler_svc.dispatch.engine import Engine
from scheduler_svc.settings import Settings
from scheduler_svc.shapes.geometry import Geometry
from scheduler_svc.workers.deployment import Deployment
from scheduler_svc.workers.generating import make_engine
from tests.support.scheduler.factories import EOS, SimulatedDevice, next_leased

FILES = {"tokenizer.json": b"{}" * 400_000, "tokenizer_config.json": b"{}", "empty.txt": b""}


@dataclass
class ScriptedWorker(worker_pb2_grpc.WorkerServicer):
    """Speaks the Worker service over real gRPC; computes tokens with a simulated device.

    Attributes:
        gate: steps are answered while this is set.
        hold_at_step: closes the gate before that step, counted as they are run.
        heard: the plans that came, as they came.
        die_at_step: ends the Execute stream instead of answering that step.
        default_chunk, default_block_size: what it would run with if the settings say nothing.
        configured: what Configure asked for.
    """

    num_blocks: int = 65
    die_at_step: int | None = None
    hold_at_step: int | None = None
    refuse_configure: TriptychError | None = None
    schema_revision: int = SCHEMA_REVISION
    kind: common_pb2.KvGroupKind.ValueType = common_pb2.KV_GROUP_KIND_FULL
    window: int = 0
    source: str = "simulated"
    default_chunk: int = 4
    default_block_size: int = 4
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    configured: worker_pb2.ConfigureRequest | None = None
    heard: asyncio.Queue[StepPlan] = field(default_factory=asyncio.Queue)
    device: SimulatedDevice | None = None
    steps: int = 0

    def __post_init__(self) -> None:
        self.gate.set()

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
            model=common_pb2.ModelInfo(source=self.source, architecture="Hash", vocab_size=97, max_model_len=64,
                                       eos_token_ids=[EOS], dtype="float32"),
            kv_groups=[self.group],
            block_size_multiple=4, max_batch=8, max_chunk=16, default_block_size=self.default_block_size,
            default_chunk=self.default_chunk, default_max_num_seqs=4, sampling_fields=["temperature", "seed", "top_p"], max_logprobs=5,
            max_lease_steps=32,
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
        yield worker_pb2.ConfigureEvent(ready=worker_pb2.ConfigureReady(num_blocks=[self.num_blocks]))

    async def GetModelFiles(
        self, request: worker_pb2.GetModelFilesRequest, context: Context
    ) -> AsyncIterator[common_pb2.FileChunk]:
        for name, data in FILES.items():
            half = len(data) // 2
            yield common_pb2.FileChunk(name=name, data=data[:half])
            yield common_pb2.FileChunk(name=name, data=data[half:], last=True)

    async def CompileGrammar(
        self, request: worker_pb2.CompileGrammarRequest, context: Context
    ) -> worker_pb2.CompileGrammarResponse:
        raise AssertionError("it does not say that it honours structured_output")

    async def Execute(
        self, request_iterator: AsyncIterator[worker_pb2.StepPlan], context: Context
    ) -> AsyncIterator[worker_pb2.StepResult]:
        assert self.configured is not None
        geometry = Geometry(
            self.configured.max_model_len, self.configured.max_num_seqs, self.configured.chunk,
            self.configured.block_size, tuple(self.configured.decode_buckets),
        )  # fmt: skip
        groups = groups_from_proto(worker_pb2.DescribeResponse(kv_groups=[self.group]))
        self.device = SimulatedDevice(geometry, groups)
        plans: asyncio.Queue[StepPlan | None] = asyncio.Queue()
        reading = asyncio.ensure_future(self._read_ahead(request_iterator, plans))
        try:
            while (plan := await plans.get()) is not None:
                lease = plan.work.lease if isinstance(plan.work, Decode) else 1
                for index in range(lease):
                    self.steps += 1
                    if self.steps == self.hold_at_step:
                        self.gate.clear()
                    await self.gate.wait()
                    if self.steps == self.die_at_step:
                        return
                    result = self.device.run(plan)
                    # As a worker does: it looks for a newer plan after each step.
                    last = index + 1 == lease or not plans.empty()
                    yield worker_pb2.StepResult(
                        step=result.step, lease_index=index, last=last, token_ids=result.token_ids
                    )
                    if last:
                        break
                    plan = next_leased(plan)
        finally:
            reading.cancel()

    async def _read_ahead(
        self, messages: AsyncIterator[worker_pb2.StepPlan], plans: asyncio.Queue[StepPlan | None]
    ) -> None:
        try:
            async for message in messages:
                plan = plan_from_proto(message)
                plans.put_nowait(plan)
                self.heard.put_nowait(plan)
        finally:
            plans.put_nowait(None)


@dataclass
class RunningScheduler:
    """A scheduler's services on a port of their own."""

    engine: Engine
    deployment: Deployment
    servicer: InferenceServicer
    server: Server
    channel: grpc.aio.Channel
    serving: asyncio.Queue[bool]

    @property
    def inference(self) -> "inference_pb2_grpc.InferenceAsyncStub":
        return inference_pb2_grpc.InferenceStub(self.channel)

    @property
    def registry(self) -> "registry_pb2_grpc.WorkerRegistryAsyncStub":
        return registry_pb2_grpc.WorkerRegistryStub(self.channel)


@contextlib.asynccontextmanager
async def run_scheduler(
    settings: Settings | None = None, *, port: int = 0
) -> AsyncIterator[RunningScheduler]:
    """The parts of ``scheduler_svc.__main__``, wired as there."""
    settings = settings or Settings()
    engine = make_engine(settings)
    deployment = Deployment(settings, engine)
    serving: asyncio.Queue[bool] = asyncio.Queue()
    deployment.on_serving(serving.put_nowait)
    servicer = InferenceServicer(deployment)
    registry = RegistryServicer(deployment, step_timeout_s=settings.step_timeout_s)

    def register(server: grpc.aio.Server) -> None:
        inference_pb2_grpc.add_InferenceServicer_to_server(servicer, server)
        registry_pb2_grpc.add_WorkerRegistryServicer_to_server(registry, server)

    server = Server(("triptych.v1.Inference", "triptych.v1.WorkerRegistry"), register)
    port = await server.start("127.0.0.1", port)
    channel = open_channel(f"127.0.0.1:{port}")
    try:
        yield RunningScheduler(engine, deployment, servicer, server, channel, serving)
    finally:
        await channel.close()
        await server.stop(0)


@contextlib.asynccontextmanager
async def run_worker(worker: ScriptedWorker) -> AsyncIterator[int]:
    """Serves the worker; yields its port."""
    server = Server(
        ("triptych.v1.Worker",),
        lambda grpc_server: worker_pb2_grpc.add_WorkerServicer_to_server(worker, grpc_server),
    )
    try:
        yield await server.start("127.0.0.1", 0)
    finally:
        worker.gate.set()
        await server.stop(0)


def announcement(port: int, worker_id: str = "w") -> registry_pb2.RegisterRequest:
    """What a worker on this machine says of itself."""
    return registry_pb2.RegisterRequest(schema_revision=SCHEMA_REVISION, worker_id=worker_id, port=port)


@contextlib.asynccontextmanager
async def joined(
    scheduler: RunningScheduler, worker: ScriptedWorker, worker_id: str = "w"
) -> AsyncIterator[None]:
    """The worker is registered and serving within the block, and leaves at its end."""
    async with run_worker(worker) as port:
        call = scheduler.registry.Register(announcement(port, worker_id))
        async for event in call:
            if event.state == registry_pb2.RegisterEvent.STATE_SERVING:
                break
        try:
            yield
        finally:
            call.cancel()


def generate_request(prompt: list[int] | None = None, *, request_id: str = "", max_tokens: int | None = 8,
                     **sampling: object) -> inference_pb2.GenerateRequest:  # fmt: skip
    request = inference_pb2.GenerateRequest(request_id=request_id, prompt_token_ids=prompt or [5, 6, 7])
    request.sampling.CopyFrom(common_pb2.SamplingParams(max_tokens=max_tokens, **sampling))  # type: ignore[arg-type]
    return request


async def failure(call: object) -> TriptychError:
    """The typed error that a call ends with."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:  # noqa: PT012 -- two kinds of call
        if hasattr(call, "__aiter__"):
            async for _ in call:
                pass
        else:
            await call  # type: ignore[misc]
    return from_rpc_error(caught.value)


async def tokens_of(scheduler: RunningScheduler, request: inference_pb2.GenerateRequest) -> list[int]:
    return [token async for event in scheduler.inference.Generate(request) for token in event.token_ids]


async def collect(stream: "grpc.aio.UnaryStreamCall[inference_pb2.GenerateRequest, inference_pb2.GenerateEvent]",
                  ) -> list[inference_pb2.GenerateEvent]:  # fmt: skip
    return [event async for event in stream]
