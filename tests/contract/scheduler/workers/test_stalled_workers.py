"""Replicas that compute nothing while requests run, over real gRPC."""

import asyncio

import pytest
from structlog.testing import capture_logs

from protos.errors import Unavailable
from scheduler_svc.replica.quarantine import Loss
from scheduler_svc.workers.progress import MOST_IN_A_ROW, Stall
from tests.support.scheduler.factories import expected_tokens
from tests.support.scheduler.fake_worker import FakeWorker
from tests.support.scheduler.running_scheduler import (
    RunningScheduler,
    failure,
    generate_request,
    joined,
    register,
    registration,
    run_scheduler,
    run_worker,
    tokens_of,
)

pytestmark = [pytest.mark.contract, pytest.mark.timeout(30)]

ALWAYS = 1_000_000


async def next_health(scheduler: RunningScheduler) -> bool:
    async with asyncio.timeout(5):
        return await scheduler.serving.get()


async def test_empty_results_in_a_row_make_a_replica_start_over() -> None:
    """One log line and one count say so; health is bad until the next step runs, and no token is lost."""
    worker = FakeWorker(skips=MOST_IN_A_ROW + 1)  # a plan that was sent with the first one does not count
    async with run_scheduler() as scheduler, joined(scheduler, worker):
        assert await next_health(scheduler)
        with capture_logs() as logs:
            async with asyncio.timeout(5):
                assert await tokens_of(scheduler, generate_request()) == expected_tokens([5, 6, 7], 8)
        assert [await next_health(scheduler) for _ in range(2)] == [False, True]
        assert scheduler.deployment.losses.stalls == {Stall.EMPTY: 1}
        assert not scheduler.deployment.losses.workers
        lines = [log for log in logs if log["event"] == "no_progress"]
        assert [(log["reason"], log["running"]) for log in lines] == [("empty", 1)]


async def test_a_replica_that_computes_nothing_again_is_lost() -> None:
    """Its requests go on elsewhere, and its worker pauses before it may register again."""
    async with run_scheduler() as scheduler:
        async with run_worker(FakeWorker(skips=ALWAYS)) as port:
            call = await register(scheduler, port)
            answers = [
                asyncio.create_task(tokens_of(scheduler, generate_request([5, number]))) for number in (6, 7)
            ]
            async with asyncio.timeout(2):
                error = await failure(call)
            assert isinstance(error, Unavailable)
            assert "nothing was computed" in error.message
            assert scheduler.deployment.losses.stalls == {Stall.EMPTY: 2}
            assert scheduler.deployment.losses.workers == {Loss.STALLED: 1}
            again = await failure(scheduler.registry.Register(registration(port)))
            assert again.retry_after_ms > 0
        async with joined(scheduler, FakeWorker(), "w2"):
            async with asyncio.timeout(5):
                assert await asyncio.gather(*answers) == [
                    expected_tokens([5, number], 8) for number in (6, 7)
                ]


async def test_a_request_alone_on_workers_that_compute_nothing_ends() -> None:
    """It is a suspect after the first, and fails after the second: it would wait for ever."""
    async with run_scheduler() as scheduler:
        answer = None
        for worker_id in ("w1", "w2"):
            async with run_worker(FakeWorker(skips=ALWAYS)) as port:
                call = await register(scheduler, port, worker_id)
                answer = answer or asyncio.create_task(
                    failure(scheduler.inference.Generate(generate_request()))
                )
                async with asyncio.timeout(5):
                    await failure(call)
        assert answer is not None
        async with asyncio.timeout(5):
            assert "2 workers were lost while they ran this request" in (await answer).message


async def test_running_requests_without_a_plan_are_a_stall(monkeypatch: pytest.MonkeyPatch) -> None:
    """A scheduler that forgets them loses its replica within seconds, and another one runs them."""
    async with run_scheduler() as scheduler:
        async with run_worker(FakeWorker(hold_at_step=2)) as port:
            call = await register(scheduler, port)
            (replica,) = scheduler.engine.replicas.values()
            answer = asyncio.create_task(tokens_of(scheduler, generate_request()))
            while not replica.scheduler.num_running:
                await asyncio.sleep(0)
            monkeypatch.setattr(replica.scheduler, "next_plan", lambda: None)
            async with asyncio.timeout(5):
                error = await failure(call)
            assert "unplanned" in error.message
            assert scheduler.deployment.losses.stalls == {Stall.UNPLANNED: 2}
        async with joined(scheduler, FakeWorker(), "w2"):
            assert await answer == expected_tokens([5, 6, 7], 8)
