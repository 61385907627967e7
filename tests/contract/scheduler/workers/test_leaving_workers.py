"""Workers that say that they leave, lose their connection, or register again, over real gRPC."""

import asyncio

import grpc.aio
import pytest

from protos.errors import Unavailable
from protos.triptych.v1 import registry_pb2
from scheduler_svc.replica.quarantine import Loss
from scheduler_svc.settings import Settings
from tests.support.scheduler.factories import expected_tokens
from tests.support.scheduler.fake_worker import FakeWorker
from tests.support.scheduler.running_scheduler import (
    RunningScheduler,
    collect,
    failure,
    generate_request,
    joined,
    register,
    run_scheduler,
    run_worker,
)
from tests.support.waiting import until

pytestmark = [pytest.mark.contract, pytest.mark.timeout(30)]


async def leave(scheduler: RunningScheduler, worker_id: str) -> None:
    await scheduler.registry.Leave(registry_pb2.LeaveRequest(worker_id=worker_id))


async def test_a_worker_that_leaves_makes_no_suspect() -> None:
    """Its requests continue elsewhere, even if every worker that runs them leaves."""
    async with (
        run_scheduler(Settings(max_worker_losses=1)) as scheduler,
        run_worker(FakeWorker()) as first,
        run_worker(FakeWorker()) as second,
    ):
        call = await register(scheduler, first, "w0")
        stream = scheduler.inference.Generate(generate_request(max_tokens=50))
        events = [await anext(aiter(stream))]
        for number, port in ((1, second), (2, first), (3, second)):
            other = await register(scheduler, port, f"w{number}")
            await leave(scheduler, f"w{number - 1}")
            assert [event async for event in call] == [], "the registration ends without an error"
            call = other
        events += await collect(stream)
        call.cancel()
    assert [token for event in events for token in event.token_ids] == expected_tokens([5, 6, 7], 50)
    assert not any(event.HasField("worker_losses") for event in events)
    assert scheduler.deployment.losses.workers[Loss.LEFT] == 3
    assert scheduler.deployment.losses.num_suspects == 0


async def test_a_worker_answers_its_running_plan_before_it_leaves() -> None:
    """Leave is answered once the requests wait again, and no step is unanswered. No lease is renewed."""
    worker = FakeWorker(hold_at_step=3)
    async with run_scheduler() as scheduler, run_worker(worker) as port:
        call = await register(scheduler, port)
        stream = scheduler.inference.Generate(generate_request(max_tokens=50))
        await worker.holds.wait()
        leaving = asyncio.create_task(leave(scheduler, "w"))
        await asyncio.wait({leaving}, timeout=0.1)
        assert not leaving.done()
        worker.gate.set()
        await leaving
        assert worker.steps < 40
        assert len(scheduler.engine.replicas) == 0
        assert [event async for event in call] == []
        async with joined(scheduler, FakeWorker(), "w2"):
            tokens = [token for event in await collect(stream) for token in event.token_ids]
        assert tokens == expected_tokens([5, 6, 7], 50)


async def test_a_worker_that_dies_while_it_leaves_makes_no_suspect() -> None:
    """It had said so, whatever step it did not answer."""
    worker = FakeWorker(hold_at_step=3)
    async with run_scheduler(Settings(max_worker_losses=1)) as scheduler:
        async with run_worker(worker) as port:
            call = await register(scheduler, port)
            stream = scheduler.inference.Generate(generate_request())
            await worker.holds.wait()
            leaving = asyncio.create_task(leave(scheduler, "w"))
            await asyncio.wait({leaving}, timeout=0.1)
            worker.die_at_step = 3
            worker.gate.set()
            await leaving
        assert isinstance(await failure(call), Unavailable)
        assert scheduler.deployment.losses.workers == {Loss.LEFT: 1}
        async with joined(scheduler, FakeWorker(), "w2"):
            tokens = [token for event in await collect(stream) for token in event.token_ids]
    assert tokens == expected_tokens([5, 6, 7], 8)


async def test_a_worker_that_nobody_knows_may_leave() -> None:
    """Leave is idempotent."""
    async with run_scheduler() as scheduler:
        await leave(scheduler, "unknown")


async def test_a_cut_link_makes_no_suspect() -> None:
    """A worker whose process still answers has not died; its requests continue."""
    worker = FakeWorker(hold_at_step=3)
    async with run_scheduler(Settings(max_worker_losses=1)) as scheduler, run_worker(worker) as port:
        call = await register(scheduler, port)
        stream = scheduler.inference.Generate(generate_request())
        await worker.holds.wait()
        call.cancel()  # as when the worker's connection to the scheduler breaks
        await until(lambda: not scheduler.engine.replicas)
        worker.gate.set()
        assert scheduler.deployment.losses.workers == {Loss.CUT_OFF: 1}
        call = await register(scheduler, port)
        tokens = [token for event in await collect(stream) for token in event.token_ids]
        assert tokens == expected_tokens([5, 6, 7], 8)
        call.cancel()


async def test_a_worker_that_registers_again_ends_its_earlier_registration() -> None:
    """The scheduler need not notice first that the old connection is dead."""
    async with run_scheduler() as scheduler, run_worker(FakeWorker()) as port:
        call = await register(scheduler, port)
        again = await register(scheduler, port)
        assert (await failure(call)).message == "the worker has registered again"
        stream = scheduler.inference.Generate(generate_request())
        tokens = [token for event in await collect(stream) for token in event.token_ids]
        assert tokens == expected_tokens([5, 6, 7], 8)
        again.cancel()


async def test_a_worker_that_hangs_or_dies_makes_suspects() -> None:
    """The log, the metrics and the request's client say so."""
    async with run_scheduler(Settings(step_timeout_s=0.3)) as scheduler:
        async with run_worker(FakeWorker(hold_at_step=3)) as port:
            call = await register(scheduler, port)
            answer = asyncio.create_task(collect(scheduler.inference.Generate(generate_request())))
            assert "the worker hangs" in (await failure(call)).message
        async with run_worker(FakeWorker(die_at_step=1)) as port:
            await failure(await register(scheduler, port, "w1"))
        with pytest.raises(grpc.aio.AioRpcError, match="2 workers were lost while they ran"):
            await answer
    losses = scheduler.deployment.losses
    assert losses.workers == {Loss.HUNG: 1, Loss.DIED: 1}
    assert (losses.num_suspects, losses.num_failed) == (2, 1)
