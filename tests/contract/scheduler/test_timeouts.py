"""Bounds on how long a request may wait, over real gRPC."""

import asyncio

import grpc
import pytest

from protos.errors import TimedOut
from protos.triptych.v1 import inference_pb2
from scheduler_svc.settings import Settings
from tests.support.scheduler.fake_pool_worker import FakePoolWorker, pool_request
from tests.support.scheduler.fake_worker import FakeWorker
from tests.support.scheduler.running_scheduler import (
    RunningScheduler,
    failure,
    generate_request,
    joined,
    run_scheduler,
)

pytestmark = pytest.mark.contract


async def metrics_of(scheduler: RunningScheduler) -> str:
    return (await scheduler.inference.GetMetrics(inference_pb2.GetMetricsRequest())).text.decode()


async def test_a_long_queue_and_a_silent_worker() -> None:
    """The request that runs and the one that waits fail with the setting's name, and the metrics say why."""
    worker = FakeWorker()
    settings = Settings(max_num_seqs=1, queue_timeout_s=0.5, token_timeout_s=1.0)
    async with run_scheduler(settings) as scheduler, joined(scheduler, worker):
        worker.gate.clear()
        calls = [scheduler.inference.Generate(generate_request(request_id=f"r{n}")) for n in range(2)]
        runs, waits = await asyncio.gather(*map(failure, calls))
        assert isinstance(waits, TimedOut)
        assert "--queue-timeout-s" in waits.message
        assert isinstance(runs, TimedOut)
        assert "--token-timeout-s" in runs.message
        assert await calls[0].code() == grpc.StatusCode.DEADLINE_EXCEEDED
        text = await metrics_of(scheduler)
        assert 'triptych:timed_out_requests_total{reason="queue"} 1.0' in text
        assert 'triptych:timed_out_requests_total{reason="token"} 1.0' in text
        worker.gate.set()
        assert not scheduler.engine.live()


async def test_a_long_queue_of_an_embedding_model() -> None:
    """The bounds hold for requests that generate nothing, too: they wait for a batch, then for its result."""
    worker = FakePoolWorker()
    settings = Settings(
        pool_batch_sizes=(1,), pool_prompt_lens=(8,), queue_timeout_s=0.5, token_timeout_s=1.0
    )
    async with run_scheduler(settings) as scheduler, joined(scheduler, worker):
        worker.gate.clear()
        errors = await asyncio.gather(*(failure(scheduler.inference.Pool(pool_request([5]))) for _ in "ab"))
        assert sorted(error.message.partition("(")[2].partition(")")[0] for error in errors) == [
            "--queue-timeout-s",
            "--token-timeout-s",
        ]
        worker.gate.set()
