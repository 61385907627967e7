"""Several pooling requests in one call, over real gRPC."""

import asyncio

import grpc.aio
import pytest

from protos.errors import Internal, InvalidArgument, NotFound, Overloaded, TriptychError, from_rpc_error
from protos.triptych.v1 import common_pb2 as pb
from protos.triptych.v1 import inference_pb2
from scheduler_svc.requests.pooled_model import MOST_VALUES
from scheduler_svc.settings import Settings
from tests.support.scheduler.fake_pool_worker import POISON, FakePoolWorker, embedding_of, pool_request
from tests.support.scheduler.running_scheduler import (
    RunningScheduler,
    joined,
    num_live,
    run_scheduler,
)
from tests.support.waiting import until

pytestmark = pytest.mark.contract


def request_for(*prompts: list[int]) -> inference_pb2.PoolAllRequest:
    named = [pool_request(prompt, request_id=f"p{index}") for index, prompt in enumerate(prompts)]
    return inference_pb2.PoolAllRequest(requests=named)


async def results_of(
    scheduler: RunningScheduler, request: inference_pb2.PoolAllRequest
) -> list[tuple[str, list[float]]]:
    """Returns the ids and the values of the answers."""
    answer = await scheduler.inference.PoolAll(request)
    return [(response.request_id, list(response.values)) for response in answer.responses]


async def failure_of(scheduler: RunningScheduler, request: inference_pb2.PoolAllRequest) -> TriptychError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await scheduler.inference.PoolAll(request)
    return from_rpc_error(caught.value)


async def test_requests_arrive_together(scheduler: RunningScheduler, worker: FakePoolWorker) -> None:
    """They fill batches from the first step on, and results have the order of the requests."""
    prompts = [[5], [1] * 9, [1, 2, 3], [6, 7], [9] * 4]
    results = await results_of(scheduler, request_for(*prompts))
    assert results == [(f"p{index}", embedding_of(prompt)) for index, prompt in enumerate(prompts)]
    assert worker.batches == [(4, 4, 4), (1, 2, 16)]


async def test_requests_need_no_ids(scheduler: RunningScheduler, worker: FakePoolWorker) -> None:
    """The scheduler makes ids up."""
    sent = inference_pb2.PoolAllRequest(requests=[pool_request([5]), pool_request([6])])
    results = await results_of(scheduler, sent)
    assert [values for _, values in results] == [embedding_of([5]), embedding_of([6])]
    assert len({name for name, _ in results}) == 2


async def test_a_failure_ends_all(scheduler: RunningScheduler, worker: FakePoolWorker) -> None:
    """Requests that still wait are aborted, and their ids are free."""
    error = await failure_of(scheduler, request_for([POISON], *([n] * 9 for n in range(1, 7))))
    assert type(error) is Internal
    async with asyncio.timeout(10):
        assert await results_of(scheduler, request_for([5])) == [("p0", embedding_of([5]))]
    assert scheduler.deployment.load().num_waiting == 0


async def test_the_end_of_the_call_aborts_all(scheduler: RunningScheduler, worker: FakePoolWorker) -> None:
    """A client that goes away leaves nothing in the queue."""
    worker.gate.clear()
    call = scheduler.inference.PoolAll(request_for([5], [1] * 9, [2] * 9))
    await worker.received.wait()
    call.cancel()
    await until(lambda: not num_live(scheduler))
    worker.gate.set()


@pytest.mark.parametrize(
    ("sent", "kind", "text"),
    [
        (inference_pb2.PoolAllRequest(), InvalidArgument, "requests is empty; send at least one entry"),
        (
            request_for(*([5] for _ in range(257))),
            InvalidArgument,
            "requests takes at most 256 entries, got 257",
        ),
        (
            inference_pb2.PoolAllRequest(requests=[pool_request([5], request_id="same")] * 2),
            InvalidArgument,
            "request id 'same' is in use",
        ),
        (request_for([5], []), InvalidArgument, "prompt_token_ids"),
        (
            inference_pb2.PoolAllRequest(requests=[pool_request([5], request_id="p", model="other")]),
            NotFound,
            "'other' is not served here",
        ),
    ],
)
async def test_a_refused_request_refuses_all(
    scheduler: RunningScheduler,
    worker: FakePoolWorker,
    sent: inference_pb2.PoolAllRequest,
    kind: type[TriptychError],
    text: str,
) -> None:
    """One line says why; no request stays behind."""
    error = await failure_of(scheduler, sent)
    assert type(error) is kind
    assert text in error.message
    assert num_live(scheduler) == 0


@pytest.mark.parametrize("limit", [{"max_waiting_requests": 2}, {"max_waiting_tokens": 5}])
async def test_a_queue_that_is_not_empty_takes_a_call_whole_or_not_at_all(
    settings: Settings, limit: dict[str, int]
) -> None:
    """A call of any size enters an empty queue; while another request waits, the queue's bounds hold."""
    worker = FakePoolWorker()
    call = request_for([5, 5], [6, 6], [7, 7])
    async with run_scheduler(settings.model_copy(update=limit)) as scheduler, joined(scheduler, worker):
        assert len(await results_of(scheduler, call)) == 3
        worker.gate.clear()
        worker.received.clear()
        others = [asyncio.ensure_future(scheduler.inference.Pool(pool_request([8])))]
        await worker.received.wait()
        others.append(asyncio.ensure_future(scheduler.inference.Pool(pool_request([9]))))
        await until(lambda: scheduler.deployment.load().num_waiting)
        error = await failure_of(scheduler, call)
        assert type(error) is Overloaded
        assert error.message == "1 requests with 1 tokens are waiting; retry later"
        assert scheduler.deployment.load().num_waiting == 1
        worker.gate.set()
        await asyncio.gather(*others)


async def test_a_flood_of_one_tenant_refuses_no_call_of_another(settings: Settings) -> None:
    """The full queue has a reserve, which tenants share."""
    worker = FakePoolWorker()
    limits = settings.model_copy(update={"max_waiting_requests": 8})
    async with run_scheduler(limits) as scheduler, joined(scheduler, worker):
        worker.gate.clear()
        calls = [asyncio.ensure_future(scheduler.inference.Pool(pool_request([8])))]
        await worker.received.wait()
        calls += [asyncio.ensure_future(scheduler.inference.Pool(pool_request([9]))) for _ in range(8)]
        await until(lambda: scheduler.deployment.load().num_waiting == 8)
        assert type(await failure_of(scheduler, request_for([7]))) is Overloaded
        other = pool_request([7])
        other.tenant = "another"
        calls.append(asyncio.ensure_future(scheduler.inference.Pool(other)))
        await until(lambda: scheduler.deployment.load().num_waiting == 9)
        worker.gate.set()
        await asyncio.gather(*calls)


async def test_results_that_fit_no_message_are_refused() -> None:
    """The error has both numbers of values; nothing runs."""
    worker = FakePoolWorker(tasks=(pb.POOL_TASK_TOKEN_EMBED,), pooled_size=MOST_VALUES // 8)
    request = request_for([5] * 4, [6] * 5)
    for each in request.requests:
        each.task = pb.POOL_TASK_TOKEN_EMBED
    settings = Settings(pool_batch_sizes=(1,), pool_prompt_lens=(8,))
    async with run_scheduler(settings) as scheduler, joined(scheduler, worker):
        error = await failure_of(scheduler, request)
    assert type(error) is InvalidArgument
    assert f"would have {MOST_VALUES // 8 * 9} values, and a message holds {MOST_VALUES}" in error.message
    assert worker.batches == []
