"""A link to the scheduler that stalls for so long that the scheduler drops what waits for the gateway."""

import asyncio

import pytest

from gateway.scheduler_client.client import InferenceClient
from protos.service.grpc_options import CHANNEL_OPTIONS
from protos.triptych.v1 import common_pb2 as pb
from protos.triptych.v1 import inference_pb2 as inference
from scheduler_svc.settings import Settings
from tests.support.campaign.processes.link import Link
from tests.support.gateway.event_reader import EventReader
from tests.support.scheduler.factories import expected_tokens
from tests.support.scheduler.fake_worker import FakeWorker
from tests.support.scheduler.running_scheduler import RunningScheduler, joined, run_scheduler

pytestmark = pytest.mark.contract

_REQUESTS = 8
_TOKENS = 800


async def tokens_of(group: EventReader) -> list[int]:
    found: list[int] = []
    while events := await group.take():
        found += [token for _, event in events for token in event.token_ids]
    return found


async def until_dropped(scheduler: RunningScheduler) -> None:
    """Waits until the scheduler has ended a stream that was not read, and has aborted its requests."""
    while True:
        answer = await scheduler.inference.GetMetrics(inference.GetMetricsRequest())
        if b"triptych:slow_readers_total 1.0" in answer.text:
            break
        await asyncio.sleep(0.02)
    assert not scheduler.engine.live()


async def test_a_gateway_that_could_not_read_sends_its_requests_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """When the link delivers again, every answer continues without a lost or doubled token."""
    worker = FakeWorker(
        max_model_len=4096, num_blocks=_REQUESTS * 300, default_chunk=16, default_block_size=16
    )
    settings = Settings(max_num_seqs=_REQUESTS, max_unread_tokens_per_stream=1024)
    async with run_scheduler(settings) as scheduler, joined(scheduler, worker), asyncio.timeout(60):
        # The client's library takes little without being read, so that a short stall is enough.
        little = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1024))
        monkeypatch.setattr("protos.service.grpc_options.CHANNEL_OPTIONS", (*CHANNEL_OPTIONS, *little))
        link = Link(("127.0.0.1", scheduler.server.port))
        await link.open()
        client = InferenceClient(f"127.0.0.1:{link.port}")
        connected = asyncio.Event()
        client.on_connect(connected.set)
        await client.start()
        try:
            await connected.wait()
            worker.gate.clear()
            requests = [
                inference.GenerateRequest(
                    request_id=f"r{number}",
                    prompt_token_ids=[number + 5],
                    sampling=pb.SamplingParams(max_tokens=_TOKENS, temperature=0.0),
                )
                for number in range(_REQUESTS)
            ]
            answers = [
                asyncio.create_task(tokens_of(EventReader(client.submit([request])))) for request in requests
            ]
            while len(scheduler.engine.live()) < _REQUESTS:
                await asyncio.sleep(0.01)
            link.silence()
            worker.gate.set()
            await until_dropped(scheduler)
            link.restore()
            assert await asyncio.gather(*answers) == [
                expected_tokens([number + 5], _TOKENS) for number in range(_REQUESTS)
            ]
        finally:
            await client.close()
            await link.close()
