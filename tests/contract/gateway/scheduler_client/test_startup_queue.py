"""New requests that wait in the client while no scheduler with a ready worker is there, over real gRPC."""

import pytest

from gateway.scheduler_client.in_flight import StartupQueue
from protos.errors import Overloaded, Unavailable
from tests.support.gateway.clients import EventReader, pool_request, request, started, tokens_of
from tests.support.gateway.fake_scheduler import FakeScheduler, serving
from tests.support.waiting import until

pytestmark = pytest.mark.contract

REPLY = list(range(100, 120))


async def test_a_refused_request_without_a_place_fails(scheduler: FakeScheduler, port: int) -> None:
    """It fails with the scheduler's own error."""
    scheduler.refuse = lambda _: Unavailable("no worker is ready yet", retry_after_ms=2000)
    async with serving(scheduler, port), started(port, startup_queue=StartupQueue(max_requests=1)) as client:
        EventReader(client.submit([request("a")]))
        await scheduler.until(lambda: len(scheduler.requests) == 1)
        with pytest.raises(Unavailable, match="no worker is ready yet") as caught:
            await tokens_of(EventReader(client.submit([request("b")])))
        assert caught.value.retry_after_ms == 2000


async def test_an_overloaded_scheduler_is_not_waited_for(scheduler: FakeScheduler, port: int) -> None:
    """A full queue refuses parked requests, too: startup_queue does not lengthen the queue."""
    scheduler.refuse = lambda _: Overloaded("full", retry_after_ms=700)
    async with started(port) as client:
        group = EventReader(client.submit([request()]))
        async with serving(scheduler, port):
            with pytest.raises(Overloaded):
                await tokens_of(group)
        assert len(client.startup_queue) == 0


async def test_a_request_that_the_scheduler_has_taken_frees_its_place(
    scheduler: FakeScheduler, port: int
) -> None:
    """A long queue at the scheduler costs no places, and its loss is a pause as for running requests."""
    scheduler.pause_after = 0
    async with started(port) as client:
        group = EventReader(client.submit([request()]))
        async with serving(scheduler, port):
            await scheduler.until(lambda: len(scheduler.requests) == 1)
            await until(lambda: not len(client.startup_queue))
            assert client.num_pending == 1
        scheduler.pause_after = None
        async with serving(scheduler, port):
            assert await tokens_of(group) == [REPLY]


async def test_a_scheduler_that_dies_again_at_once_is_a_pause(scheduler: FakeScheduler, port: int) -> None:
    """A request that was sent but not taken is still parked, and is sent to the next scheduler as new."""
    scheduler.pause_after, scheduler.acknowledge = 0, False
    async with started(port) as client:
        group = EventReader(client.submit([request()]))
        async with serving(scheduler, port):
            await scheduler.until(lambda: len(scheduler.requests) == 1)
        assert len(client.startup_queue) == 1
        scheduler.pause_after = None
        async with serving(scheduler, port):
            assert await tokens_of(group) == [REPLY]
        assert not scheduler.requests[-1].HasField("age_ms")
        assert len(client.startup_queue) == 0


async def test_pooling_requests_wait_for_a_worker(scheduler: FakeScheduler, port: int) -> None:
    """Refusals are repeated as for generating requests, and bounded in number and time."""
    refusals = iter([Unavailable("no worker is ready yet", retry_after_ms=20)])
    scheduler.refuse_pool = lambda _: next(refusals, None)
    async with serving(scheduler, port), started(port, startup_queue=StartupQueue(timeout_s=5.0)) as client:
        (result,) = await client.pool([pool_request()], vector_size=4)
        assert len(result.values) == 4
        assert len(client.startup_queue) == 0
    scheduler.refuse_pool = lambda _: Unavailable("no worker is ready yet", retry_after_ms=20)
    async with serving(scheduler, port), started(port, startup_queue=StartupQueue(timeout_s=0.2)) as client:
        with pytest.raises(Unavailable, match="no worker is ready yet"):
            await client.pool([pool_request()], vector_size=4)
        assert len(client.startup_queue) == 0
