"""Calls with many inputs of a pooling model, and what a lost scheduler costs them, over real gRPC."""

import asyncio
import contextlib

import pytest

from protos.errors import Overloaded, Unavailable
from protos.triptych.v1 import common_pb2 as pb
from protos.triptych.v1 import inference_pb2 as inference
from tests.support.gateway.clients import pool_request, started
from tests.support.gateway.fake_scheduler import FakeScheduler, serving

pytestmark = pytest.mark.contract


async def test_inputs_share_calls(scheduler: FakeScheduler, port: int) -> None:
    """Many inputs are sent in a few calls, two at a time; results have the order of the inputs."""
    scheduler.pool_gate.clear()
    names = [f"p{index}" for index in range(70)]
    async with serving(scheduler, port), started(port) as client:
        asking = asyncio.create_task(client.pool([pool_request(name) for name in names], vector_size=4))
        await scheduler.until(lambda: len(scheduler.pool_calls) == 2)
        assert scheduler.pool_calls == [32, 32]
        scheduler.pool_gate.set()
        assert [result.request_id for result in await asyncio.wait_for(asking, 20)] == names
    assert scheduler.pool_calls == [32, 32, 6]


async def test_large_results_have_calls_of_their_own(scheduler: FakeScheduler, port: int) -> None:
    """A call's results stay far below the size of a message: matrices count token by token."""
    thousands = {"a": 3, "b": 2, "c": 0, "d": 9}  # 600,000, 400,000, 200,000 and 1,800,000 values
    requests = [
        inference.PoolRequest(
            request_id=name,
            prompt_token_ids=[5] * 200,
            task=pb.POOL_TASK_TOKEN_EMBED,
            dimensions=1000 * count,
        )
        for name, count in thousands.items()
    ]
    requests.append(pool_request("e"))
    async with serving(scheduler, port), started(port) as client:
        results = await client.pool(requests, vector_size=1000)
    assert [result.request_id for result in results] == ["a", "b", "c", "d", "e"]
    assert sorted(scheduler.pool_calls) == [1, 1, 1, 2]


async def test_long_inputs_have_calls_of_their_own(scheduler: FakeScheduler, port: int) -> None:
    """The prompts of a call have 131,072 tokens at most, unless one has more."""
    lengths = {"a": 131_000, "b": 72, "c": 1, "d": 200_000, "e": 2}
    requests = [pool_request(name, length) for name, length in lengths.items()]
    async with serving(scheduler, port), started(port) as client:
        results = await client.pool(requests, vector_size=4)
    assert [result.request_id for result in results] == list(lengths)
    assert sorted(scheduler.pool_calls) == [1, 1, 1, 2]


async def test_a_call_without_room_waits_for_the_others(scheduler: FakeScheduler, port: int) -> None:
    """A queue that holds one call of the request gets them one by one; a call that is refused alone fails."""
    scheduler.pool_gate.clear()
    refused = asyncio.Event()

    def refuse(request: inference.PoolRequest) -> Overloaded | None:
        if request.request_id != "p32" or refused.is_set():
            return None
        refused.set()
        return Overloaded("full")

    scheduler.refuse_pool = refuse
    names = [f"p{index}" for index in range(70)]
    async with serving(scheduler, port), started(port) as client:
        asking = asyncio.create_task(client.pool([pool_request(name) for name in names], vector_size=4))
        await asyncio.wait_for(refused.wait(), 20)
        scheduler.pool_gate.set()
        assert [result.request_id for result in await asyncio.wait_for(asking, 20)] == names
        assert sorted(scheduler.pool_calls) == [6, 32, 32, 32]
        scheduler.refuse_pool = lambda _: Overloaded("full")
        with pytest.raises(Overloaded):
            await client.pool([pool_request()], vector_size=4)


async def test_calls_have_no_deadline(scheduler: FakeScheduler, port: int) -> None:
    async with serving(scheduler, port), started(port) as client:
        await client.pool([pool_request()], vector_size=4)
    assert scheduler.pool_deadlines == [None]


async def test_each_loss_of_the_scheduler_counts_by_itself(scheduler: FakeScheduler, port: int) -> None:
    """Time in which a scheduler was there does not count against --resume-timeout-s."""
    now_s = 0.0
    scheduler.pool_gate.clear()
    async with started(port, resume_timeout_s=0.5, clock=lambda: now_s) as client:
        connected = asyncio.Event()
        client.on_connect(connected.set)
        async with contextlib.AsyncExitStack() as stack:
            await stack.enter_async_context(serving(scheduler, port))
            await connected.wait()
            asking = asyncio.create_task(client.pool([pool_request()], vector_size=4))
            await scheduler.until(lambda: len(scheduler.pool_calls) == 1)
        connected.clear()
        async with serving(scheduler, port):
            await scheduler.until(lambda: len(scheduler.pool_calls) == 2)
            await connected.wait()
            now_s = 3600.0
        scheduler.pool_gate.set()
        async with serving(scheduler, port):
            (result,) = await asyncio.wait_for(asking, 20)
        # Its number counts attempts.
        assert result.request_id.startswith("p.")


async def test_a_scheduler_that_stays_away_fails_the_request(scheduler: FakeScheduler, port: int) -> None:
    """After --resume-timeout-s, although attempts go on until then."""
    scheduler.pool_gate.clear()
    async with started(port, resume_timeout_s=0.5) as client:
        connected = asyncio.Event()
        client.on_connect(connected.set)
        async with serving(scheduler, port):
            await connected.wait()
            asking = asyncio.create_task(client.pool([pool_request()], vector_size=4))
            await scheduler.until(lambda: len(scheduler.pool_calls) == 1)
        with pytest.raises(Unavailable):
            await asyncio.wait_for(asking, 20)
