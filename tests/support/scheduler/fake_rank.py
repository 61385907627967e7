"""Ranks of a replica on simulated devices, each with a registration, over real gRPC."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import grpc.aio

from protos.errors import Context, TriptychError, abort, from_rpc_error
from protos.service.grpc_options import SCHEMA_REVISION
from protos.triptych.v1 import common_pb2, registry_pb2, worker_pb2
from protos.triptych.v1.registry_pb2 import RegisterEvent
from tests.support.scheduler.fake_worker import FakeWorker
from tests.support.scheduler.running_scheduler import RunningScheduler, run_worker


@dataclass
class FakeRank(FakeWorker):
    """The process of one rank. It joins one group in its life, as a real one does."""

    rank: int = 0
    tensor: int = 2
    pipeline: int = 1
    life: int = 0
    """Which process of this rank it is."""
    replica_id: str = "r0"
    device_kind: str = "cpu"
    epoch: str = ""
    """The group that the process has joined."""
    configure_gate: asyncio.Event = field(default_factory=asyncio.Event)
    """Configure is answered while this is set."""
    refusals: list[TriptychError] = field(default_factory=list)
    """What Configure calls end with, one each, before one is accepted."""
    configuring: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once Configure was called."""
    grammars: list[common_pb2.StructuredOutput] = field(default_factory=list)
    """The grammars that the scheduler had compiled here."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.configure_gate.set()

    @property
    def worker_id(self) -> str:
        return f"{self.replica_id}-{self.rank}-{self.life}"

    def registration(self, port: int) -> registry_pb2.RegisterRequest:
        return registry_pb2.RegisterRequest(
            schema_revision=SCHEMA_REVISION, worker_id=self.worker_id, port=port, replica_id=self.replica_id, rank=self.rank,
            world_size=self.tensor * self.pipeline, tensor_parallel_size=self.tensor, pipeline_parallel_size=self.pipeline,
        )  # fmt: skip

    async def Describe(
        self, request: worker_pb2.DescribeRequest, context: Context
    ) -> worker_pb2.DescribeResponse:
        response = await super().Describe(request, context)
        response.worker_id, response.device, response.group_epoch = (
            self.worker_id,
            self.device_kind,
            self.epoch,
        )
        response.sampling_fields.append("structured_output")
        return response

    async def Configure(
        self, request: worker_pb2.ConfigureRequest, context: Context
    ) -> AsyncIterator[worker_pb2.ConfigureEvent]:
        assert request.group_epoch
        if self.refusals:
            await abort(context, self.refusals.pop(0))
        assert self.epoch in ("", request.group_epoch), "a process joins one group in its life"
        if self.refuse_configure is None:
            self.epoch = request.group_epoch
        self.configuring.set()
        await self.configure_gate.wait()
        async for event in super().Configure(request, context):
            yield event

    async def CompileGrammar(
        self, request: worker_pb2.CompileGrammarRequest, context: Context
    ) -> worker_pb2.CompileGrammarResponse:
        self.grammars.append(request.structured_output)
        return worker_pb2.CompileGrammarResponse(memory_bytes=1, compile_us=1)

    async def Execute(
        self, request_iterator: AsyncIterator[worker_pb2.StepPlan], context: Context
    ) -> AsyncIterator[worker_pb2.StepResult]:
        assert self.rank == 0, "the scheduler sends plans to rank 0 alone"
        async for result in super().Execute(request_iterator, context):
            yield result


@dataclass
class RegisteredRank:
    """A rank's server and its registration."""

    worker: FakeRank
    port: int
    call: "grpc.aio.UnaryStreamCall[registry_pb2.RegisterRequest, RegisterEvent]"

    async def told(self, state: RegisterEvent.State.ValueType) -> str:
        """Waits for an event in a state; returns its message."""
        async for event in self.call:
            if event.state == state:
                return event.message
        raise AssertionError(f"the registration of {self.worker.worker_id} ended without {state}")

    async def accepted(self) -> str:
        """Returns the next message of a rank that does not serve yet."""
        return await self.told(RegisterEvent.STATE_ACCEPTED)

    async def serving(self) -> None:
        """Waits until the replica serves."""
        await self.told(RegisterEvent.STATE_SERVING)

    async def released(self) -> str:
        """Waits for the loss of another rank; returns the message once the registration has ended."""
        message = await self.told(RegisterEvent.STATE_RANK_LOST)
        assert (await self.end())[0] == []
        return message

    async def end(self) -> tuple[list[RegisterEvent], TriptychError | None]:
        """Waits for the end of the registration; returns the events that were left, and the error."""
        events = []
        try:
            async for event in self.call:
                events.append(event)  # noqa: PERF401 - the events before the error count
        except grpc.aio.AioRpcError as error:
            return events, from_rpc_error(error)
        return events, None


@contextlib.asynccontextmanager
async def rank_process(scheduler: RunningScheduler, worker: FakeRank) -> AsyncIterator[RegisteredRank]:
    """Runs a rank that registers within the block; at its end the process is dead."""
    async with run_worker(worker) as port:
        registered = register_rank(scheduler, worker, port)
        try:
            yield registered
        finally:
            registered.call.cancel()


def register_rank(scheduler: RunningScheduler, worker: FakeRank, port: int) -> RegisteredRank:
    """Registers a rank that runs."""
    return RegisteredRank(worker, port, scheduler.registry.Register(worker.registration(port)))
