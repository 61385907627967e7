"""A pooling deployment over real gRPC: shapes, errors, lost workers and refusals."""

import asyncio

import pytest

from protos.errors import (
    Aborted,
    ConfigurationRefused,
    ContextExceeded,
    Internal,
    InvalidArgument,
    NotFound,
    Unavailable,
    Unsupported,
)
from protos.triptych.v1 import common_pb2, inference_pb2
from scheduler_svc.settings import Settings
from tests.support.scheduler.fake_pool_worker import POISON, FakePoolWorker, embedding_of, pool_request
from tests.support.scheduler.fake_worker import FakeWorker
from tests.support.scheduler.running_scheduler import (
    RunningScheduler,
    failure,
    generate_request,
    joined,
    num_live,
    register,
    registration,
    run_scheduler,
    run_worker,
)
from tests.support.waiting import until

pytestmark = pytest.mark.contract


async def values_of(scheduler: RunningScheduler, prompt: list[int]) -> list[float]:
    return list((await scheduler.inference.Pool(pool_request(prompt))).values)


async def until_waiting(scheduler: RunningScheduler, count: int) -> None:
    """Waits until `count` requests wait in the scheduler's queue."""
    await until(lambda: scheduler.deployment.load().num_waiting == count)


async def test_a_result_arrives_complete(scheduler: RunningScheduler) -> None:
    """The response has values, shape, prompt length and id."""
    response = await scheduler.inference.Pool(pool_request([5, 6, 7], request_id="mine"))
    info = await scheduler.inference.GetModel(inference_pb2.GetModelRequest())
    assert (response.request_id, list(response.values)) == ("mine", embedding_of([5, 6, 7]))
    assert (list(response.shape), response.num_prompt_tokens) == ([4], 3)
    assert list(info.pool_tasks) == [common_pb2.POOL_TASK_EMBED]
    assert (info.pooled_size, info.max_model_len) == (4, 16)
    assert [(shape.batch, shape.query_len) for shape in info.pooling.shapes] == [(1, 4), (4, 4), (2, 16)]


async def test_one_bad_row_fails_alone(scheduler: RunningScheduler, worker: FakePoolWorker) -> None:
    """The other rows of the batch get their results."""
    worker.gate.clear()
    first = asyncio.create_task(values_of(scheduler, [5]))
    await worker.received.wait()
    calls = [asyncio.create_task(values_of(scheduler, [n])) for n in (1, POISON, 3)]
    await until_waiting(scheduler, 3)
    worker.gate.set()
    good, bad, also_good = await asyncio.gather(*calls, return_exceptions=True)
    await first
    assert (good, also_good) == (embedding_of([1]), embedding_of([3]))
    assert isinstance(bad, Exception)
    assert worker.batches[1] == (3, 4, 4)


async def test_a_failed_batch_is_tried_again(settings: Settings) -> None:
    """A step that failed once is tried again; a request fails alone after max_step_failures of its own."""
    settings = settings.model_copy(update={"max_step_failures": 2})
    async with run_scheduler(settings) as scheduler, joined(scheduler, FakePoolWorker(fail_step=1)):
        assert await values_of(scheduler, [5, 6]) == embedding_of([5, 6])
    worker = FakePoolWorker(fails_with=7)
    async with run_scheduler(settings) as scheduler, joined(scheduler, worker):
        worker.gate.clear()
        first = asyncio.create_task(values_of(scheduler, [5]))
        await worker.received.wait()
        bad = asyncio.create_task(failure(scheduler.inference.Pool(pool_request([7, 8]))))
        others = [asyncio.create_task(values_of(scheduler, [n])) for n in (1, 3)]
        await until_waiting(scheduler, 3)
        worker.gate.set()
        assert (await bad).message == "the device failed"
        assert await asyncio.gather(first, *others) == [embedding_of([n]) for n in (5, 1, 3)]


async def test_a_request_that_kills_workers_fails_alone(settings: Settings) -> None:
    """Requests of a lost batch run alone, so that only the one that killed two workers fails."""
    async with run_scheduler(settings) as scheduler:
        worker = FakePoolWorker(dies_with=7)
        worker.gate.clear()
        async with run_worker(worker) as port:
            call = await register(scheduler, port)
            first = asyncio.create_task(values_of(scheduler, [5]))
            await worker.received.wait()
            bad = asyncio.create_task(failure(scheduler.inference.Pool(pool_request([7, 8]))))
            others = [asyncio.create_task(values_of(scheduler, [n])) for n in (1, 3)]
            await until_waiting(scheduler, 3)
            worker.gate.set()
            await failure(call)
            call = await register(scheduler, port)
            await failure(call)
            assert "2 workers were lost while they ran this request" in (await bad).message
            call = await register(scheduler, port)
            assert await asyncio.gather(first, *others) == [embedding_of([n]) for n in (5, 1, 3)]
            call.cancel()


async def test_a_lost_workers_requests_run_elsewhere(settings: Settings) -> None:
    """Running and waiting requests of a lost worker run on the next one."""
    async with run_scheduler(settings) as scheduler:
        dying = FakePoolWorker(die_at_step=1)
        dying.gate.clear()
        async with run_worker(dying) as port:
            call = await register(scheduler, port)
            calls = [asyncio.create_task(values_of(scheduler, [n])) for n in (1, 2, 3)]
            await until(lambda: num_live(scheduler) == 3)
            dying.gate.set()
            assert isinstance(await failure(call), Unavailable)
        async with joined(scheduler, FakePoolWorker(), "w2"):
            assert await asyncio.gather(*calls) == [embedding_of([n]) for n in (1, 2, 3)]


async def test_a_cancelled_call_and_an_abort_end_a_request(
    scheduler: RunningScheduler, worker: FakePoolWorker
) -> None:
    """Both end waiting and running requests and free their slots."""
    worker.gate.clear()
    running = scheduler.inference.Pool(pool_request(request_id="running"))
    aborted = asyncio.create_task(failure(running))
    await worker.received.wait()
    waiting = scheduler.inference.Pool(pool_request(request_id="waiting"))
    await until_waiting(scheduler, 1)
    waiting.cancel()
    await until_waiting(scheduler, 0)
    answer = await scheduler.inference.Abort(inference_pb2.AbortRequest(request_id="running"))
    assert answer.found
    assert isinstance(await aborted, Aborted)
    worker.gate.set()
    assert await values_of(scheduler, [8]) == embedding_of([8])
    assert not (await scheduler.inference.Abort(inference_pb2.AbortRequest(request_id="running"))).found
    assert [rows for rows, _, _ in worker.batches] == [1, 1]


async def test_draining_lets_running_requests_finish(
    scheduler: RunningScheduler, worker: FakePoolWorker
) -> None:
    """A draining scheduler refuses new requests and finishes the running one."""
    worker.gate.clear()
    call = asyncio.create_task(values_of(scheduler, [1]))
    await worker.received.wait()
    drain = asyncio.create_task(scheduler.servicer.drain(20.0))
    assert isinstance(await failure(scheduler.inference.Pool(pool_request())), Unavailable)
    assert not drain.done()
    worker.gate.set()
    assert await call == embedding_of([1])
    await drain


async def test_a_prompt_that_fits_no_shape_is_refused_with_the_shapes(scheduler: RunningScheduler) -> None:
    """The error lists the shapes and the longest prompt."""
    error = await failure(scheduler.inference.Pool(pool_request([1] * 17)))
    assert isinstance(error, ContextExceeded)
    assert error.message == (
        "the prompt has 17 tokens and fits none of the shapes 1x4, 4x4, 2x16 (rows x tokens); shorten it to at most 16 tokens"
    )


@pytest.mark.parametrize(
    ("request_", "error", "text"),
    [
        (pool_request([]), InvalidArgument, "prompt_token_ids is empty"),
        (pool_request([97]), InvalidArgument, "this model's ids end at 96"),
        (pool_request(model="other"), NotFound, "not served here"),
        (inference_pb2.PoolRequest(prompt_token_ids=[1], task=common_pb2.POOL_TASK_SCORE), Unsupported, "serves embed, not score"),
        (inference_pb2.PoolRequest(prompt_token_ids=[1], task=9), InvalidArgument, "task 9 is not known"),  # type: ignore[arg-type]
        (pool_request(request_id="x" * 129), InvalidArgument, "longer than 128"),
    ],
)  # fmt: skip
async def test_an_invalid_request_is_refused(
    scheduler: RunningScheduler, request_: inference_pb2.PoolRequest, error: type[Exception], text: str
) -> None:
    """An invalid request gets a typed error that names the problem."""
    caught = await failure(scheduler.inference.Pool(request_))
    assert type(caught) is error
    assert text in caught.message


async def test_each_kind_of_model_refuses_the_calls_of_the_other() -> None:
    """The error names the call to use: Pool on a pooling model, Generate on a generating one."""
    async with run_scheduler() as scheduler, joined(scheduler, FakePoolWorker()):
        error = await failure(scheduler.inference.Generate(generate_request()))
        assert isinstance(error, Unsupported)
        assert "call Pool" in error.message
        reset = await scheduler.inference.ResetPrefixCache(inference_pb2.ResetPrefixCacheRequest())
        assert reset.num_replicas == 0
    async with run_scheduler() as scheduler, joined(scheduler, FakeWorker()):
        error = await failure(scheduler.inference.Pool(pool_request()))
        assert isinstance(error, Unsupported)
        assert "call Generate" in error.message
    async with run_scheduler() as scheduler:
        assert isinstance(await failure(scheduler.inference.Pool(pool_request())), Unavailable)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        (Settings(pool_batch_sizes=(1,), pool_prompt_lens=(65,)), "65 exceeds the model's context of 64"),
        (Settings(pool_batch_sizes=(9,), pool_prompt_lens=(4,)), "9 exceeds this device's limit of 8 rows"),
    ],
)
async def test_shapes_that_cannot_run_are_refused(settings: Settings, text: str) -> None:
    """The worker gets the reason."""
    async with run_scheduler(settings) as scheduler, run_worker(FakePoolWorker()) as port:
        error = await failure(scheduler.registry.Register(registration(port)))
    assert isinstance(error, ConfigurationRefused)
    assert text in error.message


async def test_generating_and_pooling_workers_do_not_mix() -> None:
    """All replicas of a deployment run one model."""
    async with (
        run_scheduler() as scheduler,
        joined(scheduler, FakePoolWorker()),
        run_worker(FakeWorker()) as port,
    ):
        error = await failure(scheduler.registry.Register(registration(port, "w2")))
    assert isinstance(error, ConfigurationRefused)
    assert "all workers must run one model" in error.message


async def test_a_later_worker_gets_the_shapes_of_the_first() -> None:
    """A later worker runs the same shapes, or is refused if it cannot."""
    async with run_scheduler() as scheduler, joined(scheduler, FakePoolWorker()):
        like, smaller = FakePoolWorker(max_batch=4096), FakePoolWorker(max_batch=2)
        async with joined(scheduler, like, "like"), run_worker(smaller) as port:
            error = await failure(scheduler.registry.Register(registration(port, "smaller")))
    assert like.configured is not None
    assert [(shape.batch, shape.query_len) for shape in like.configured.pool_shapes] == [(1, 64), (4, 64)]
    assert isinstance(error, ConfigurationRefused)
    assert "4 exceeds this device's limit of 2 rows" in error.message


async def test_a_result_of_another_size_is_an_error() -> None:
    """A result with the wrong number of values is an error."""
    async with run_scheduler() as scheduler, joined(scheduler, FakePoolWorker(pooled_size=5)):
        error = await failure(scheduler.inference.Pool(pool_request()))
    assert isinstance(error, Internal)
    assert "4 values" in error.message
