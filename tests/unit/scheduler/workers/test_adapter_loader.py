"""A replica's LoadAdapter and UnloadAdapter calls."""

import asyncio
from typing import Any, cast

import grpc.aio
import pytest

from protos.errors import TriptychError, Unavailable
from protos.service.logs import get_logger
from protos.triptych.v1 import worker_pb2
from scheduler_svc.adapters.registry import Adapter, LoadedAdapter
from scheduler_svc.workers import adapter_loader
from scheduler_svc.workers.adapter_loader import AdapterLoader


class Rank:
    """Notes the calls, and ends each when it is told to."""

    def __init__(self) -> None:
        self.open: dict[str, asyncio.Event] = {}
        self.log: list[str] = []

    async def _call(self, name: str) -> None:
        self.log.append(name)
        self.open[name] = asyncio.Event()
        await self.open[name].wait()
        del self.open[name]

    async def LoadAdapter(
        self, request: worker_pb2.LoadAdapterRequest, **_: object
    ) -> worker_pb2.LoadAdapterResponse:
        needed = " ".join(map(str, request.needed_ids))
        await self._call(f"load {request.adapter_id}" + (f", needed {needed}" if needed else ""))
        return worker_pb2.LoadAdapterResponse(rank=8, digest="d", displaced_ids=[9])

    async def UnloadAdapter(
        self, request: worker_pb2.UnloadAdapterRequest, **_: object
    ) -> worker_pb2.UnloadAdapterResponse:
        await self._call(f"unload {request.adapter_id}")
        return worker_pb2.UnloadAdapterResponse()

    async def end(self, name: str) -> None:
        """Ends a call, and lets everything run that follows from it."""
        self.open[name].set()
        await settle()


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def loader_of(rank: Rank) -> tuple[AdapterLoader, list[LoadedAdapter | TriptychError]]:
    answers: list[LoadedAdapter | TriptychError] = []
    return AdapterLoader([cast("Any", rank)], get_logger()), answers


async def test_an_adapter_is_unloaded_once_its_load_has_ended() -> None:
    """A load ends at its own time; nothing else waits for it."""
    rank = Rank()
    loader, answers = loader_of(rank)
    loader.load(Adapter(1, "a", "a"), 1, list, answers.append)
    loader.unload(1)
    loader.unload(2)
    loader.load(Adapter(1, "a", "a"), 3, lambda: [7, 8], answers.append)
    await settle()
    assert set(rank.open) == {"load 1", "unload 2", "load 3, needed 7 8"}
    await rank.end("load 3, needed 7 8")
    await rank.end("load 1")
    assert rank.log[3:] == ["unload 1"]
    assert answers == [LoadedAdapter(8, "d", displaced=(9,))] * 2
    loader.close()


async def test_loads_are_bounded() -> None:
    """The next one begins when one has ended."""
    rank = Rank()
    loader, answers = loader_of(rank)
    most = adapter_loader.MAX_LOADS
    for number in range(most + 2):
        loader.load(Adapter(1, "a", "a"), number, list, answers.append)
    await settle()
    assert len(rank.open) == most
    await rank.end("load 2")
    assert set(rank.open) == {f"load {number}" for number in range(most + 1) if number != 2}
    loader.close()


class FailingRank(Rank):
    """A rank whose loads end with a status of gRPC's own."""

    def __init__(self, status: grpc.StatusCode) -> None:
        super().__init__()
        self.status = status

    async def LoadAdapter(
        self, request: worker_pb2.LoadAdapterRequest, **_: object
    ) -> worker_pb2.LoadAdapterResponse:
        raise grpc.aio.AioRpcError(self.status, grpc.aio.Metadata(), grpc.aio.Metadata())


@pytest.mark.parametrize("status", [grpc.StatusCode.CANCELLED, grpc.StatusCode.DEADLINE_EXCEEDED])
async def test_a_call_that_a_worker_ends_may_be_retried(status: grpc.StatusCode) -> None:
    """A worker that stops or is slow says nothing against the adapter."""
    rank = FailingRank(status)
    loader, answers = loader_of(rank)
    loader.load(Adapter(1, "a", "a"), 1, list, answers.append)
    await settle()
    await rank.end("unload 1")
    (answer,) = answers
    assert isinstance(answer, Unavailable)
    loader.close()
