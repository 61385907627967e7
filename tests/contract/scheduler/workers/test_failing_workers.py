"""Workers that hang, refuse their stream or fail every step, over real gRPC."""

import asyncio

import pytest

from protos.errors import Unavailable
from protos.triptych.v1 import registry_pb2
from scheduler_svc.settings import Settings
from scheduler_svc.workers import step_timeout
from tests.support.scheduler.factories import expected_tokens
from tests.support.scheduler.fake_pool_worker import FakePoolWorker, embedding_of, pool_request
from tests.support.scheduler.fake_worker import FakeWorker
from tests.support.scheduler.running_scheduler import (
    failure,
    generate_request,
    joined,
    register,
    registration,
    run_scheduler,
    run_worker,
    tokens_of,
)
from tests.support.waiting import until

pytestmark = [pytest.mark.contract, pytest.mark.timeout(30)]


async def test_a_step_that_takes_far_longer_than_usual_is_hung(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker is lost long before the timeout of first steps, and its request continues elsewhere."""
    monkeypatch.setattr(step_timeout, "SHORTEST_TIMEOUT_S", 0.3)
    async with run_scheduler(Settings(step_timeout_s=120)) as scheduler:
        async with run_worker(FakeWorker(hold_at_step=14)) as port:
            call = await register(scheduler, port)
            answer = asyncio.create_task(tokens_of(scheduler, generate_request(max_tokens=20)))
            told = await anext(aiter(call))
            error = await failure(call)
        assert isinstance(error, Unavailable)
        assert "the worker hangs" in error.message
        assert told.state == registry_pb2.RegisterEvent.STATE_HUNG, "the worker can end itself"
        assert len(scheduler.engine.replicas) == 0
        async with joined(scheduler, FakeWorker(), "w2"):
            assert await answer == expected_tokens([5, 6, 7], 20)


@pytest.mark.parametrize("first_s", [0.0, 30.0])
async def test_both_sides_know_how_long_a_step_may_take(first_s: float) -> None:
    """The worker learns the scheduler's limit, and the scheduler that of a step that makes its graph."""
    worker = FakeWorker(hold_at_step=1, first_step_timeout_s=first_s)
    async with run_scheduler(Settings(step_timeout_s=0.3)) as scheduler, run_worker(worker) as port:
        call = await register(scheduler, port)
        assert worker.configured is not None
        assert worker.configured.step_timeout_s == pytest.approx(0.3)
        answer = asyncio.create_task(tokens_of(scheduler, generate_request()))
        ended = asyncio.create_task(failure(call))
        await asyncio.wait({ended}, timeout=1)
        assert ended.done() == (first_s == 0)
        worker.gate.set()
        if not first_s:
            call = await register(scheduler, port)
        assert await answer == expected_tokens([5, 6, 7], 8)
        call.cancel()
        await asyncio.gather(ended, return_exceptions=True)


async def test_a_worker_that_refuses_its_stream_is_not_attached() -> None:
    """The scheduler never says SERVING for a worker that does not accept Execute."""
    worker = FakeWorker(refuse_execute=Unavailable("another Execute stream is open"))
    async with run_scheduler() as scheduler:
        async with run_worker(worker) as port:
            error = await failure(scheduler.registry.Register(registration(port)))
        assert isinstance(error, Unavailable)
        assert "another Execute stream is open" in error.message
        assert scheduler.serving.empty()
        async with joined(scheduler, FakeWorker()):
            assert await scheduler.serving.get() is True


async def test_a_worker_that_does_not_answer_on_its_stream_is_not_attached() -> None:
    """A stream that stays silent ends the registration after step_timeout_s."""
    async with run_scheduler(Settings(step_timeout_s=0.2)) as scheduler:
        async with run_worker(FakeWorker(silent=True)) as port:
            error = await failure(scheduler.registry.Register(registration(port)))
        assert "did not accept the Execute stream within 0.2 s" in error.message
        assert scheduler.serving.empty()


async def test_a_worker_that_fails_every_step_fails_no_request() -> None:
    """After three failed steps the worker is detached, and another worker runs the whole queue."""
    prompts = [[5, number] for number in range(3, 15)]
    async with run_scheduler(Settings(max_num_seqs=1)) as scheduler:
        broken = FakeWorker(fail_from_step=1)
        broken.gate.clear()
        async with run_worker(broken) as port:
            call = await register(scheduler, port)
            answers = [
                asyncio.create_task(tokens_of(scheduler, generate_request(prompt))) for prompt in prompts
            ]
            await until(lambda: len(scheduler.engine.live()) == len(prompts))
            broken.gate.set()
            error = await failure(call)
            assert isinstance(error, Unavailable)
            assert "3 steps failed in a row, the last with: the device failed" in error.message
        assert broken.steps == 3 + 1, "the plan behind the first one is skipped"
        async with joined(scheduler, FakeWorker(), "w2"):
            assert await asyncio.gather(*answers) == [expected_tokens(prompt, 8) for prompt in prompts]


async def test_a_failing_pooling_worker_is_the_last_choice() -> None:
    """A failed request and the next one go to the other worker although the failing one is free, too."""
    async with run_scheduler(Settings(pool_batch_sizes=(1,), pool_prompt_lens=(4,))) as scheduler:
        failing, good = FakePoolWorker(fail_step=1), FakePoolWorker()
        async with joined(scheduler, failing, "a"), joined(scheduler, good, "b"):
            for _ in range(2):
                answer = await scheduler.inference.Pool(pool_request())
                assert list(answer.values) == embedding_of([5, 6, 7])
    assert (failing.steps, good.steps) == (1, 2)
