"""Calls of a pooling model that fail, on a clock of their own."""

import asyncio
from typing import Any, cast

import grpc.aio
import pytest

from gateway.scheduler_client import pool_calls
from gateway.scheduler_client.in_flight import StartupQueue
from protos.errors import Unavailable
from protos.triptych.v1 import inference_pb2 as inference


class Broken:
    """A scheduler that new calls do not reach; each takes some time to fail."""

    def __init__(self, call_s: float) -> None:
        self.now_s = 0.0
        self.num_calls = 0
        self._call_s = call_s

    async def PoolAll(self, _request: inference.PoolAllRequest) -> inference.PoolAllResponse:
        self.now_s += self._call_s
        self.num_calls += 1
        await asyncio.sleep(0)
        if self._call_s > pool_calls._AT_ONCE_S and self.num_calls == 3:
            return inference.PoolAllResponse(responses=[inference.PoolResponse(request_id="p")])
        raise grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata())


async def pool(broken: Broken) -> list[inference.PoolResponse]:
    """Asks for one result, while another connection to the scheduler is there all the time."""
    return await pool_calls.pool_all(
        cast("Any", broken), [inference.PoolRequest(request_id="p")], StartupQueue(), vector_size=4,
        resume_timeout_s=60.0, last_connected_s=lambda: broken.now_s, clock=lambda: broken.now_s,
    )  # fmt: skip


async def test_calls_that_fail_at_once_end_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise each failure would count as the loss of a scheduler that was there, for ever."""
    monkeypatch.setattr(pool_calls, "_RETRY_PAUSE_S", 0.0)
    broken = Broken(call_s=0.5)
    with pytest.raises(Unavailable):
        await asyncio.wait_for(pool(broken), 10)
    assert 60 <= broken.now_s <= 62


async def test_calls_that_ran_for_long_are_lost_each_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_calls, "_RETRY_PAUSE_S", 0.0)
    (response,) = await asyncio.wait_for(pool(Broken(call_s=100.0)), 10)
    assert response.request_id == "p"
