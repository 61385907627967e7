"""The workers of a replica's ranks behind real gRPC servers in one process, without a model."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import grpc.aio
import pytest
import torch

from protos.service.grpc_options import open_channel
from protos.triptych.v1 import worker_pb2, worker_pb2_grpc
from tests.support.ranks.fake_ranks import PATIENCE_S, FakeGroup, FakeSteps, Ranks
from worker_svc.api.model_thread import ModelThread
from worker_svc.api.servicer import WorkerServicer
from worker_svc.api.watchdog import FailedSteps
from worker_svc.execution import worker as worker_module
from worker_svc.execution.engine import Engine
from worker_svc.execution.worker import Worker
from worker_svc.phases import Phases
from worker_svc.ranks.layout import RankLayout
from worker_svc.settings import Settings
from worker_svc.shapes import ShapeConfig, Shapes


class FakeEngine(Engine):
    """An engine whose steps and warm-up meet those of the other ranks."""

    bytes_per_block = (64,)
    num_compiled = 0
    num_late = 0
    code_folder = None
    chunk_starts = "whole"

    def __init__(self, ranks: Ranks, layout: RankLayout) -> None:
        """Has no model to open."""
        self._ranks = ranks
        self._steps = FakeSteps(ranks, layout.rank)
        self._started = False
        self.layout = layout
        self.group = None

    def check(self, shapes: Shapes) -> ShapeConfig:
        """Accepts all shapes."""
        assert isinstance(shapes, ShapeConfig)
        return shapes

    def start(self, shapes: Shapes, load: Callable[[], None], phases: Phases) -> Shapes:
        """Warms up: all ranks must, at the same time and with the same shapes."""
        self._check_equal(shapes)
        self._ranks.launch_together(self.layout.rank, f"warm up {shapes}")
        if (gate := self._ranks.gates.get(self.layout.rank)) is not None:
            assert gate.wait(PATIENCE_S)
        if (refusal := self._ranks.refusals.pop(self.layout.rank, None)) is not None:
            raise refusal
        self._started = True
        self.launch, self.apply, self.reset = self._steps.launch, self._steps.apply, self._steps.reset  # type: ignore[method-assign]
        return shapes

    def release(self) -> None:
        """Drops the configuration, if there is one."""
        if self._started:
            self._started = False
            self._steps.release()


@dataclass
class RankServers:
    """The ranks' servers, with a client of each."""

    ranks: Ranks
    stubs: list[Any] = field(default_factory=list)
    workers: list[Worker] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    """Why a rank gave up."""

    def configure_rank(self, rank: int, request: worker_pb2.ConfigureRequest) -> "asyncio.Task[None]":
        """Starts to configure one rank."""
        return asyncio.create_task(_configured(self.stubs[rank], request))

    async def configure(self, request: worker_pb2.ConfigureRequest) -> None:
        """Configures all ranks at once, again until none refuses, as a scheduler does."""
        while True:
            calls = [self.configure_rank(rank, request) for rank in range(len(self.stubs))]
            try:
                await asyncio.gather(*calls)
                return
            except grpc.aio.AioRpcError as error:
                if error.code() != grpc.StatusCode.UNAVAILABLE:
                    raise
            finally:
                for call in calls:
                    call.cancel()
                await asyncio.gather(*calls, return_exceptions=True)


async def _configured(stub: Any, request: worker_pb2.ConfigureRequest) -> None:
    async for _ in stub.Configure(request):
        pass


@contextlib.asynccontextmanager
async def rank_servers(
    tensor: int, pipeline: int, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[RankServers]:
    """Serves the ranks of a layout for the block."""
    running = RankServers(Ranks(tensor, pipeline))
    monkeypatch.setattr(
        worker_module, "RankGroup", lambda layout, *_, **__: FakeGroup(running.ranks, layout.rank)
    )
    async with contextlib.AsyncExitStack() as stack:
        for layout in running.ranks.layouts:
            running.stubs.append(await stack.enter_async_context(_rank(running, layout)))
        yield running
        running.ranks.close()


@contextlib.asynccontextmanager
async def _rank(running: RankServers, layout: RankLayout) -> AsyncIterator[Any]:
    thread = ModelThread()
    running.workers.append(_worker(running, layout))
    servicer = WorkerServicer(
        running.workers[-1],
        thread,
        prepared=thread.submit(lambda: None),
        worker_id=f"w{layout.rank}",
        model="m",
        on_configured=_noted,
        failed_steps=FailedSteps(3, lambda failed: running.reasons.append(str(failed))),
    )
    server = grpc.aio.server()
    worker_pb2_grpc.add_WorkerServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with open_channel(f"127.0.0.1:{port}") as channel:
        yield worker_pb2_grpc.WorkerStub(channel)
    await server.stop(0)
    await thread.close(1)
    servicer.close()


async def _noted(configured: bool) -> None:
    """Tells nothing about the worker's health."""


def _worker(running: RankServers, layout: RankLayout) -> Worker:
    """Returns a worker as it is after `prepare`."""
    settings = Settings(
        model="m", tensor_parallel_size=layout.tensor, pipeline_parallel_size=layout.pipeline, rank=layout.rank,
        master="127.0.0.1:1", replica_id="r0",
    )  # fmt: skip
    worker = Worker(settings, running.reasons.append)
    device = SimpleNamespace(
        torch_device=torch.device("cpu"), states_device=torch.device("cpu"), identity=lambda: "", collectives="gloo",
        has_own_compiler=False, default_collectives="gloo", prepare_ranks=lambda _: None,
        default_level=0, highest_level=0, compiler_packages=(), name="cpu", product_name=lambda: "a device",
        use_ranks=lambda _: None, block_copies=lambda _: "tensors", release_unused=lambda: None, free_memory=lambda: 0,
    )  # fmt: skip
    description = SimpleNamespace(dtype=torch.float32)
    worker.device = cast("Any", device)
    worker._model = cast("Any", SimpleNamespace(release_caches=lambda: None, description=description))
    worker._engine = FakeEngine(running.ranks, layout)
    worker._digest.set_result("ab12")
    return worker
