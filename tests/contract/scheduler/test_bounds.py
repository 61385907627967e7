"""Bounds on clients that do not read their streams and on how long a request may wait, over real gRPC."""

import asyncio
import contextlib
from collections.abc import AsyncIterable, AsyncIterator

import grpc
import grpc.aio
import pytest

from protos.errors import Overloaded, TimedOut, from_rpc_error
from protos.service.grpc_options import SCHEMA_REVISION
from protos.triptych.v1 import inference_pb2, inference_pb2_grpc
from scheduler_svc.settings import Settings
from tests.support.scheduler.factories import expected_tokens
from tests.support.scheduler.fake_pool_worker import FakePoolWorker, pool_request
from tests.support.scheduler.fake_worker import FakeWorker
from tests.support.scheduler.running_scheduler import (
    RunningScheduler,
    failure,
    generate_request,
    joined,
    run_scheduler,
    tokens_of,
)
from tests.support.waiting import until

pytestmark = pytest.mark.contract

# Longer than what a scheduler and a client's library buffer together.
_LONG = 60_000


@contextlib.asynccontextmanager
async def serving(settings: Settings) -> AsyncIterator[RunningScheduler]:
    """Runs a scheduler whose worker generates long answers on few slots."""
    worker = FakeWorker(max_model_len=_LONG, num_blocks=_LONG // 2, default_chunk=16, default_block_size=16)
    async with run_scheduler(settings) as scheduler, joined(scheduler, worker):
        yield scheduler


@contextlib.asynccontextmanager
async def slow_client(scheduler: RunningScheduler) -> AsyncIterator["inference_pb2_grpc.InferenceAsyncStub"]:
    """Yields the stub of a client with a channel of its own, which takes little without being read."""
    port = scheduler.server.port
    options = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1024)]
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=options) as channel:
        yield inference_pb2_grpc.InferenceStub(channel)


def long_request(name: str) -> inference_pb2.GenerateRequest:
    return generate_request(request_id=name, max_tokens=_LONG - 10)


async def error_of(stream: AsyncIterable[object]) -> Overloaded:
    """Reads a stream to its end and returns the error that it ends with."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in stream:
            pass
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    error = from_rpc_error(caught.value)
    assert isinstance(error, Overloaded)
    return error


async def test_a_stream_that_is_not_read_ends() -> None:
    """Its requests are aborted at once. When the client reads on, it finds RESOURCE_EXHAUSTED."""
    settings = Settings(max_num_seqs=4, max_unread_tokens_per_stream=2048)
    async with serving(settings) as scheduler, slow_client(scheduler) as stub:
        call = stub.Connect()
        for number in range(4):
            await call.write(
                inference_pb2.ConnectRequest(
                    schema_revision=SCHEMA_REVISION, generate=long_request(f"r{number}")
                )
            )
        await until(lambda: len(scheduler.engine.live()) == 4)
        assert await tokens_of(scheduler, generate_request([9])) == expected_tokens([9], 8)
        await until(lambda: not scheduler.engine.live())
        assert "--max-unread-tokens-per-stream" in (await error_of(call)).message
        samples = (await scheduler.inference.GetMetrics(inference_pb2.GetMetricsRequest())).text.decode()
        assert "triptych:unread_tokens 0.0" in samples
        assert "triptych:slow_readers_total 1.0" in samples


async def test_a_single_request_that_is_not_read_ends() -> None:
    """The same holds for Generate. A client that reads may ask for far more tokens than may wait."""
    settings = Settings(max_num_seqs=4, max_unread_tokens_per_stream=1024)
    async with serving(settings) as scheduler, slow_client(scheduler) as stub:
        call = stub.Generate(long_request("slow"))
        await until(lambda: bool(scheduler.engine.live()))
        await until(lambda: not scheduler.engine.live())
        assert "--max-unread-tokens-per-stream" in (await error_of(call)).message
        assert len(await tokens_of(scheduler, generate_request(max_tokens=2000))) == 2000


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
