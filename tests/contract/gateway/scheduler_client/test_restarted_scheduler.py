"""The client's requests on a real scheduler that is restarted, or that drops what waits for the client."""

import asyncio

import pytest

from gateway.scheduler_client.client import InferenceClient
from gateway.scheduler_client.in_flight import InFlightRequests, Outbox, StartupQueue
from protos.errors import NotFound
from protos.service.grpc_options import CHANNEL_OPTIONS
from protos.triptych.v1 import common_pb2 as pb
from protos.triptych.v1 import inference_pb2 as inference
from scheduler_svc.settings import Settings
from tests.support.campaign.processes.link import Link
from tests.support.gateway.clients import EventReader, started
from tests.support.scheduler.factories import expected_tokens
from tests.support.scheduler.fake_worker import FakeWorker
from tests.support.scheduler.running_scheduler import RunningScheduler, joined, num_live, run_scheduler
from tests.support.waiting import until

pytestmark = pytest.mark.contract


def request(name: str, token: int, max_tokens: int = 40) -> inference.GenerateRequest:
    return inference.GenerateRequest(
        request_id=name,
        prompt_token_ids=[token] * 4,
        sampling=pb.SamplingParams(max_tokens=max_tokens, temperature=0.9),
    )


async def tokens_of(group: EventReader, begun: asyncio.Event | None = None) -> list[int]:
    """Returns all tokens of a group of one request; tells when the first has arrived."""
    found: list[int] = []
    while events := await group.take():
        found += [token for _, event in events for token in event.token_ids]
        if begun is not None:
            begun.set()
    return found


async def seeds_of(worker: FakeWorker, count: int) -> dict[str, int]:
    """Returns the seeds of the next requests that a worker admits, by the client's ids."""
    seeds: dict[str, int] = {}
    while len(seeds) < count:
        plan = await worker.plans.get()
        seeds |= {one.request_id.partition(".")[0]: one.sampling.seed for one in plan.admit}
    return seeds


@pytest.mark.parametrize("drains", [False, True], ids=["lost", "drains"])
async def test_a_restarted_scheduler_takes_back_more_requests_than_its_queue_holds(drains: bool) -> None:
    """Each continues without a lost token; those that had begun keep the seed that was drawn for them."""
    settings = Settings(max_waiting_requests=6, max_num_seqs=4)
    names = [f"r{number}" for number in range(10)]
    async with run_scheduler(settings) as first:
        port = first.server.port
        client = InferenceClient(
            f"127.0.0.1:{port}", resume_timeout_s=20.0, startup_queue=StartupQueue(max_requests=0)
        )
        connected = asyncio.Event()
        client.on_connect(connected.set)
        await client.start()
        await connected.wait()
        worker = FakeWorker(hold_at_step=12)
        async with joined(first, worker):
            groups = [
                EventReader(client.submit([request(name, 20 + number)])) for number, name in enumerate(names)
            ]
            begun = [asyncio.Event() for _ in names]
            answers = [asyncio.create_task(tokens_of(*pair)) for pair in zip(groups, begun, strict=True)]
            drawn = await seeds_of(worker, 4)
            await asyncio.gather(*[event.wait() for event in begun[:4]])
            if drains:
                await first.servicer.drain(20.0)
                await until(lambda: not num_live(first))  # its gateways have taken everything back
            await first.server.stop(0)
    try:
        fewer = Settings(max_waiting_requests=2, max_num_seqs=4)
        async with run_scheduler(fewer, port=port) as second:
            worker = FakeWorker(hold_at_step=3)
            async with joined(second, worker), asyncio.timeout(20):
                while second.engine.num_running + second.engine.num_waiting < 10:
                    await asyncio.sleep(0)
                worker.gate.set()
                kept = await seeds_of(worker, 10)
                assert await asyncio.gather(*answers) == [
                    expected_tokens([20 + number] * 4, 40) for number in range(10)
                ]
    finally:
        await client.close()
    assert {name: kept[name] for name in drawn} == drawn


@pytest.mark.parametrize("version", ["old", "new"])
async def test_an_answer_goes_on_with_the_same_version_of_its_adapter(version: str) -> None:
    """After a restart, `--lora-modules` are read again. If their files have changed, the answer ends."""
    settings = Settings(lora_modules=("a=/a",), max_num_seqs=4)
    begun, asked = asyncio.Event(), request("r", 20)
    asked.lora_name = "a"
    async with run_scheduler(settings) as first:
        port = first.server.port
        client = InferenceClient(f"127.0.0.1:{port}", resume_timeout_s=20.0)
        await client.start()
        worker = FakeWorker(hold_at_step=12, max_loras=2, max_cpu_loras=2, sources={"/a": "old"})
        async with joined(first, worker):
            answer = asyncio.create_task(tokens_of(EventReader(client.submit([asked])), begun))
            await begun.wait()
            await first.server.stop(0)
    try:
        worker = FakeWorker(max_loras=2, max_cpu_loras=2, sources={"/a": version})
        async with (
            run_scheduler(settings, port=port) as second, joined(second, worker), asyncio.timeout(20)
        ):  # fmt: skip
            if version == "old":
                assert await answer == expected_tokens([20] * 4, 40, weights="old")
            else:
                with pytest.raises(NotFound, match="began with another version of the adapter 'a'"):
                    await answer
            fresh = request("fresh", 20)
            fresh.lora_name = "a"
            assert await tokens_of(EventReader(client.submit([fresh])), begun) == expected_tokens(
                [20] * 4, 40, weights=version
            )
    finally:
        await client.close()


async def test_losses_are_for_the_next_scheduler_and_not_for_the_reader() -> None:
    """An event that counts lost workers reaches no reader; the request repeats it when it is sent again."""
    outbox = Outbox()
    outbox.open()
    table = InFlightRequests(outbox, StartupQueue(), resume_timeout_s=1.0)
    group = EventReader(table.submit([request("r", 5)]))
    await outbox.pop()
    events = [
        inference.GenerateEvent(request_id="r", worker_losses=1),
        inference.GenerateEvent(request_id="r", token_ids=[9]),
    ]
    table.deliver(inference.ConnectResponse(events=events))
    assert [list(event.token_ids) for _, event in await group.take()] == [[9]]
    table.resubmit_all()
    again = (await outbox.pop()).generate
    assert list(again.resumed) == [inference.ResumedSequence(token_ids=[9], worker_losses=1)]
    assert again.HasField("age_ms")
    group.abort()


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
    """When a stalled link delivers again, every answer continues without a lost or doubled token."""
    count, length = 8, 800
    worker = FakeWorker(max_model_len=4096, num_blocks=count * 300, default_chunk=16, default_block_size=16)
    settings = Settings(max_num_seqs=count, max_unread_tokens_per_stream=1024)
    async with run_scheduler(settings) as scheduler, joined(scheduler, worker), asyncio.timeout(60):
        # The client's library takes little without being read, so that a short stall is enough.
        little = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1024))
        monkeypatch.setattr("protos.service.grpc_options.CHANNEL_OPTIONS", (*CHANNEL_OPTIONS, *little))
        link = Link(("127.0.0.1", scheduler.server.port))
        await link.open()
        async with started(link.port, connected=True) as client:
            worker.gate.clear()
            answers = [
                asyncio.create_task(
                    tokens_of(EventReader(client.submit([request(f"r{number}", number, length)])))
                )
                for number in range(5, 5 + count)
            ]
            await until(lambda: len(scheduler.engine.live()) == count)
            link.silence()
            worker.gate.set()
            await until_dropped(scheduler)
            link.restore()
            assert await asyncio.gather(*answers) == [
                expected_tokens([number] * 4, length) for number in range(5, 5 + count)
            ]
        await link.close()
