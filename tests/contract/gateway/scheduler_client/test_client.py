"""The client over a real gRPC server: requests, typed errors, and schedulers that are lost or late."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from gateway.scheduler_client import client as client_module
from gateway.scheduler_client.client import InferenceClient
from gateway.scheduler_client.in_flight import InFlightRequests, Outbox, StartupQueue
from protos.errors import (
    Aborted,
    ConfigurationRefused,
    InvalidArgument,
    Overloaded,
    TriptychError,
    Unavailable,
    Unsupported,
)
from protos.triptych.v1 import common_pb2 as pb
from protos.triptych.v1 import inference_pb2 as inference
from tests.support.gateway.clients import EventReader, pool_request, request, started, tokens_of
from tests.support.gateway.fake_scheduler import FakeScheduler, serving
from tests.support.gateway.serving import smollm2_folder
from tests.support.waiting import until

pytestmark = pytest.mark.contract

REPLY = list(range(100, 120))


def connected(port: int, **options: Any) -> AbstractAsyncContextManager[InferenceClient]:
    """Runs a client that is connected and parks no request."""
    return started(port, connected=True, startup_queue=StartupQueue(max_requests=0), **options)


@pytest.mark.parametrize(
    "error",
    [
        InvalidArgument("bad", param="temperature"), Unsupported("no", param="min_p"), Overloaded("full", retry_after_ms=700),
        Unavailable("no replica", retry_after_ms=100),
    ],
)  # fmt: skip
async def test_a_refused_request_fails_alone_and_typed(
    scheduler: FakeScheduler, error: TriptychError
) -> None:
    """A refusal leaves other requests on the stream alone; its type, parameter and delay arrive."""
    scheduler.refuse = lambda r: error if r.request_id == "bad" else None
    async with serving(scheduler) as server, connected(server.port) as client:
        good = EventReader(client.submit([request("good")]))
        with pytest.raises(type(error), match=error.message) as caught:
            await tokens_of(EventReader(client.submit([request("bad")])))
        assert (caught.value.param, caught.value.retry_after_ms) == (error.param, error.retry_after_ms)
        assert await tokens_of(good) == [REPLY]


async def test_a_restarted_scheduler_is_a_pause(scheduler: FakeScheduler) -> None:
    """Another process may take over the port, and may have no replica at first."""
    scheduler.pause_after = 4
    async with serving(scheduler) as server:
        port = server.port
        async with connected(port) as client:
            group = EventReader(client.submit([request("a")]))
            reader = asyncio.create_task(tokens_of(group))
            await scheduler.until(lambda: bool(scheduler.requests))
            await until(lambda: len(group.requests[0].received[0]) >= 4)
            await server.stop(0)
            successor = FakeScheduler(smollm2_folder(), REPLY)
            refusals = iter([Unavailable("no replica yet", retry_after_ms=50)] * 2)
            successor.refuse = lambda _: next(refusals, None)
            async with serving(successor, port):
                assert await reader == [REPLY]
            assert [r.request_id for r in successor.requests] == ["a.r1", "a.r2", "a.r3"]
            assert all(list(r.resumed[0].token_ids) == REPLY[:4] for r in successor.requests)


async def test_a_lost_scheduler_is_given_up_in_the_end(scheduler: FakeScheduler) -> None:
    scheduler.pause_after = 4
    async with serving(scheduler) as server, connected(server.port, resume_timeout_s=0.2) as client:
        group = EventReader(client.submit([request("a")]))
        await scheduler.until(lambda: bool(scheduler.requests))
        await group.take()
        await server.stop(0)
        with pytest.raises(Unavailable, match="could not be resumed within"):
            await tokens_of(group)
        assert client.num_pending == 0


async def test_a_resumed_request_may_wait_its_turn(scheduler: FakeScheduler) -> None:
    """Once a scheduler has the request again, a long queue is no reason to give up."""

    def hold(sent: inference.GenerateRequest) -> None:
        if sent.resumed:
            scheduler.pause_after = 0

    scheduler.break_after, scheduler.refuse = 5, hold
    async with serving(scheduler) as server, connected(server.port, resume_timeout_s=1.0) as client:
        reader = asyncio.create_task(tokens_of(EventReader(client.submit([request("a")]))))
        await scheduler.until(lambda: len(scheduler.requests) == 2)
        done, _ = await asyncio.wait([reader], timeout=1.5)
        assert not done
        await scheduler.resume()
        assert await reader == [REPLY]


async def test_a_scheduler_that_only_refuses_is_given_up(scheduler: FakeScheduler) -> None:
    """Each attempt reaches the scheduler, yet the time between attempts adds up."""
    scheduler.break_after = 5
    scheduler.refuse = lambda r: Unavailable("no replica", retry_after_ms=20) if r.resumed else None
    async with serving(scheduler) as server, connected(server.port, resume_timeout_s=0.3) as client:
        with pytest.raises(Unavailable, match="could not be resumed within"):
            await tokens_of(EventReader(client.submit([request("a")])))
        assert len(scheduler.requests) > 2
        assert client.num_pending == 0


async def test_an_unexpected_exception_is_a_pause(
    scheduler: FakeScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    works, faults = InFlightRequests.deliver, [RuntimeError("a bug")]

    def fails_once(table: InFlightRequests, given: inference.ConnectResponse, **options: bool) -> None:
        if faults:
            raise faults.pop()
        works(table, given, **options)

    monkeypatch.setattr(InFlightRequests, "deliver", fails_once)
    async with serving(scheduler) as server, connected(server.port) as client:
        for name in ("a", "b"):
            assert await tokens_of(EventReader(client.submit([request(name)]))) == [REPLY]
        assert not faults


async def test_requests_outlast_a_scheduler_of_another_schema(scheduler: FakeScheduler) -> None:
    """During an upgrade, running and new requests wait for one of this release; the log says so once."""
    scheduler.break_after = 3
    async with serving(scheduler) as server, started(server.port, connected=True) as client:
        running = asyncio.create_task(tokens_of(EventReader(client.submit([request("a")]))))
        await scheduler.until(lambda: scheduler.break_after is None)
        scheduler.schema_revision += 1
        refusals = scheduler.refusals
        with capture_logs() as logs:
            await until(lambda: scheduler.refusals >= refusals + 3)
        assert [line["event"] for line in logs] == ["connection lost", "refused"]
        new = asyncio.create_task(tokens_of(EventReader(client.submit([request("b")]))))
        refusals = scheduler.refusals
        await until(lambda: scheduler.refusals > refusals)
        scheduler.schema_revision -= 1
        assert await running == [REPLY]
        assert await new == [REPLY]
        assert not client.is_refused


async def test_requests_that_outlive_their_patience_name_the_other_schema(scheduler: FakeScheduler) -> None:
    """A running one and a new one; no call is made to a scheduler whose messages may mean something else."""
    scheduler.break_after = 3
    queue = StartupQueue(timeout_s=0.5)
    async with (
        serving(scheduler) as server,
        started(server.port, connected=True, startup_queue=queue, resume_timeout_s=0.5) as client,
    ):
        running = asyncio.create_task(tokens_of(EventReader(client.submit([request("a")]))))
        await scheduler.until(lambda: scheduler.break_after is None)
        scheduler.schema_revision += 1
        await until(lambda: client.is_refused)
        new = asyncio.create_task(tokens_of(EventReader(client.submit([request("b")]))))
        for task in (running, new):
            with pytest.raises(
                Unavailable, match=r"within 0.5 s, because .* refuses this gateway: .*revision"
            ):
                await task
        for call in (client.get_load, client.get_model):
            with pytest.raises(Unavailable, match="refuses this gateway"):
                await call()


async def test_an_abort_from_elsewhere_is_an_error(scheduler: FakeScheduler) -> None:
    table = InFlightRequests(Outbox(), StartupQueue(), resume_timeout_s=1.0)
    group = EventReader(table.submit([request("a")]))
    event = inference.GenerateEvent(request_id="a", finish_reason=pb.FINISH_REASON_ABORT)
    table.deliver(inference.ConnectResponse(events=[event]))
    with pytest.raises(Aborted):
        await group.take()


async def test_model_load_and_tokenizer(scheduler: FakeScheduler, tmp_path: Path) -> None:
    """The unary calls work; the tokenizer's files arrive byte for byte."""
    async with serving(scheduler) as server, connected(server.port) as client:
        assert (await client.get_model()).served_name == "smollm2"
        assert (await client.get_load()).replicas[0].state == inference.REPLICA_STATE_READY
        await client.get_tokenizer(tmp_path)
        for path in smollm2_folder().iterdir():
            assert (tmp_path / path.name).read_bytes() == path.read_bytes()
        scheduler.ready = False
        with pytest.raises(Unavailable, match="no replica is ready") as caught:
            await client.get_model()
        assert caught.value.retry_after_ms == 2500


@pytest.mark.parametrize(("limit", "value"), [("MAX_TOKENIZER_BYTES", 1000), ("MAX_TOKENIZER_FILES", 1)])
async def test_a_flood_of_tokenizer_files_is_refused(
    scheduler: FakeScheduler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, value: int
) -> None:
    monkeypatch.setattr(client_module, limit, value)
    async with serving(scheduler) as server, connected(server.port) as client:
        with pytest.raises(ConfigurationRefused, match=r"more than .* tokenizer files or .* MiB"):
            await client.get_tokenizer(tmp_path)
        assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= client_module.MAX_TOKENIZER_BYTES
        assert len(list(tmp_path.iterdir())) <= client_module.MAX_TOKENIZER_FILES


@pytest.mark.parametrize("name", ["", ".", "..", "../x", "a/b", "/x", "a\0b"])
async def test_unsafe_tokenizer_file_names_are_refused(
    scheduler: FakeScheduler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Nothing is written outside the folder, or under a name that no file can have."""

    async def files(*_: object) -> AsyncIterator[pb.FileChunk]:
        yield pb.FileChunk(name=name, data=b"x", last=True)

    monkeypatch.setattr(scheduler, "GetTokenizer", files)
    async with serving(scheduler) as server, connected(server.port) as client:
        with pytest.raises(ConfigurationRefused, match="tokenizer file with the name"):
            await client.get_tokenizer(tmp_path)


async def test_a_refused_request_without_a_place_fails(scheduler: FakeScheduler, port: int) -> None:
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
