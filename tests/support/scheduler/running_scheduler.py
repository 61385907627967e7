"""A running scheduler for contract tests, its clients' calls and its workers, all over real gRPC."""

import asyncio
import contextlib
import gc
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import grpc.aio
import pytest

from protos.errors import TriptychError, from_rpc_error
from protos.service.grpc_options import SCHEMA_REVISION, open_channel
from protos.service.server import Server
from protos.triptych.v1 import (
    common_pb2,
    inference_pb2,
    inference_pb2_grpc,
    registry_pb2,
    registry_pb2_grpc,
    worker_pb2_grpc,
)
from scheduler_svc.api.inference import InferenceServicer
from scheduler_svc.api.registry import RegistryServicer
from scheduler_svc.engine.engine import Engine
from scheduler_svc.settings import Settings
from scheduler_svc.workers.deployment import Deployment
from scheduler_svc.workers.replicas import make_engine
from tests.support.scheduler.fake_worker import FakeWorker


@dataclass
class RunningScheduler:
    """A scheduler's parts and its services on a free port."""

    engine: Engine
    deployment: Deployment
    servicer: InferenceServicer
    server: Server
    channel: grpc.aio.Channel
    serving: asyncio.Queue[bool]
    port: int

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
    """Runs the parts of `scheduler_svc.__main__` within the block, wired as there.

    Only the garbage of this process is left alone: most of its objects are pytest's and torch's, and scanning
    them for every worker that joins takes longer than the tests.
    """
    settings = settings or Settings()
    engine = make_engine(settings)
    deployment = Deployment(settings, engine)
    serving: asyncio.Queue[bool] = asyncio.Queue()
    deployment.on_serving(serving.put_nowait)
    servicer = InferenceServicer(deployment, settings)
    registry = RegistryServicer(deployment)

    def register(server: grpc.aio.Server) -> None:
        inference_pb2_grpc.add_InferenceServicer_to_server(servicer, server)
        registry_pb2_grpc.add_WorkerRegistryServicer_to_server(registry, server)

    server = Server(("triptych.v1.Inference", "triptych.v1.WorkerRegistry"), register)
    port = await server.start("127.0.0.1", port, settings.socket)
    channel = open_channel(f"127.0.0.1:{port}")
    timeouts = asyncio.create_task(deployment.timeouts.run())
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(gc, "freeze", lambda: None)
            yield RunningScheduler(engine, deployment, servicer, server, channel, serving, port)
    finally:
        timeouts.cancel()
        await channel.close()
        await server.stop(0)


@contextlib.asynccontextmanager
async def run_worker(worker: FakeWorker, path: Path | None = None) -> AsyncIterator[int]:
    """Serves a worker within the block, on a Unix socket, too, if one is given; yields its port."""
    server = Server(
        ("triptych.v1.Worker",),
        lambda grpc_server: worker_pb2_grpc.add_WorkerServicer_to_server(worker, grpc_server),
    )
    try:
        yield await server.start("127.0.0.1", 0, path)
    finally:
        worker.gate.set()
        await server.stop(0)


def registration(port: int, worker_id: str = "w") -> registry_pb2.RegisterRequest:
    """Returns the registration of a worker on this machine."""
    return registry_pb2.RegisterRequest(schema_revision=SCHEMA_REVISION, worker_id=worker_id, port=port)


async def register(
    scheduler: RunningScheduler, port: int, worker_id: str = "w"
) -> "grpc.aio.UnaryStreamCall[registry_pb2.RegisterRequest, registry_pb2.RegisterEvent]":
    """Registers a worker and waits until it serves; returns the open call, which ends with the worker."""
    while True:
        # Channels of a process share connections by address: after an earlier server on the same port, the
        # first attempt may still be held back.
        call = scheduler.registry.Register(registration(port, worker_id), wait_for_ready=True)
        try:
            async for event in call:
                if event.state == registry_pb2.RegisterEvent.STATE_SERVING:
                    return call
        except grpc.aio.AioRpcError as error:
            # An earlier registration is about to end; workers register again, too.
            if "still registered" not in (error.details() or ""):
                raise


@contextlib.asynccontextmanager
async def joined(
    scheduler: RunningScheduler, worker: FakeWorker, worker_id: str = "w"
) -> AsyncIterator[None]:
    """Runs a worker that serves within the block and leaves at its end."""
    async with run_worker(worker) as port:
        call = await register(scheduler, port, worker_id)
        try:
            yield
        finally:
            call.cancel()


def generate_request(prompt: list[int] | None = None, *, request_id: str = "", max_tokens: int | None = 8,
                     **sampling: object) -> inference_pb2.GenerateRequest:  # fmt: skip
    request = inference_pb2.GenerateRequest(request_id=request_id, prompt_token_ids=prompt or [5, 6, 7])
    request.sampling.CopyFrom(common_pb2.SamplingParams(max_tokens=max_tokens, **sampling))  # type: ignore[arg-type]
    return request


def num_live(scheduler: RunningScheduler) -> int:
    """Returns how many requests wait or run."""
    load = scheduler.deployment.load()
    return load.num_waiting + load.num_running


async def failure(call: object) -> TriptychError:
    """Returns the typed error that a call ends with."""
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
