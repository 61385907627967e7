"""Clients continue their streams on another gateway, over a real scheduler with a fake worker."""

import asyncio
import contextlib
import copy
import json
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
import pytest_asyncio

from protos.triptych.v1 import inference_pb2
from scheduler_svc.settings import Settings
from tests.support.gateway.serving import Gateway, running_gateway, smollm2_folder
from tests.support.scheduler.fake_worker import FakeWorker
from tests.support.scheduler.running_scheduler import RunningScheduler, joined, run_scheduler

pytestmark = [pytest.mark.contract, pytest.mark.asyncio(loop_scope="module")]

CHAT: dict[str, Any] = {
    "messages": [{"role": "user", "content": "hi"}],
    "max_tokens": 40,
    "seed": 7,
    "stream": True,
    "stream_options": {"resumable": True, "include_usage": True},
}
COMPLETION: dict[str, Any] = {
    "prompt": [[20, 30, 40], [21, 31]],
    "n": 2,
    "max_tokens": 20,
    "stream": True,
    "stream_options": {"resumable": True, "include_usage": True},
}


@dataclass
class Received:
    """What a client has of a stream."""

    ids: list[str] = field(default_factory=list)
    chunks: list[dict[str, Any]] = field(default_factory=list)
    done: bool = False

    @property
    def choices(self) -> dict[int, list[dict[str, Any]]]:
        """The chunks of each choice, in order."""
        found: dict[int, list[dict[str, Any]]] = {}
        for chunk in self.chunks:
            for choice in chunk["choices"]:
                found.setdefault(choice["index"], []).append(chunk)
        return found

    @property
    def usage(self) -> list[dict[str, Any]]:
        return [chunk for chunk in self.chunks if not chunk["choices"]]


def content(received: Received) -> Any:
    """Returns what two runs of a stream have in common: all but their id and time, and the order of choices.

    Within one stream, id and time must not change.
    """
    (_,) = {(chunk["id"], chunk["created"]) for chunk in received.chunks}
    plain = Received(chunks=[{**chunk, "id": "", "created": 0} for chunk in received.chunks])
    return plain.choices, plain.usage, received.done


@contextlib.asynccontextmanager
async def scheduler_with(worker: FakeWorker, **settings: Any) -> AsyncIterator[RunningScheduler]:
    async with run_scheduler(Settings(**settings)) as scheduler, joined(scheduler, worker):
        yield scheduler


def fake_worker() -> FakeWorker:
    folder = smollm2_folder()
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    return FakeWorker(files=files, vocab_size=49152, max_model_len=128)


async def read(
    url: str, path: str, body: dict[str, Any], received: Received, *, cut_after: int | None = None
) -> Received:
    """Reads a stream, from where ``received`` ends; closes the connection after ``cut_after`` chunks."""
    headers = {"last-event-id": received.ids[-1]} if received.ids else {}
    async with (
        httpx.AsyncClient(base_url=url, timeout=20) as http,
        http.stream("POST", path, json=body, headers=headers) as response,
    ):
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            kind, _, value = line.partition(": ")
            if kind == "id":
                received.ids.append(value)
            elif value == "[DONE]":
                received.done = True
            elif kind == "data":
                assert "error" not in value, value
                received.chunks.append(json.loads(value))
                if len(received.chunks) == cut_after:
                    break
    assert len(received.ids) == len(received.chunks)
    return received


@contextlib.contextmanager
def gateway_processes(count: int, scheduler_port: int) -> Iterator[list[tuple["subprocess.Popen[str]", str]]]:
    """Starts gateways of their own; yields the processes and their URLs."""
    command = [
        sys.executable, "-m", "gateway", "--port", "0", "--scheduler-address", f"127.0.0.1:{scheduler_port}",
    ]  # fmt: skip
    with contextlib.ExitStack() as stack:
        processes = []
        for _ in range(count):
            process = stack.enter_context(subprocess.Popen(command, stderr=subprocess.PIPE, text=True))
            stack.callback(process.kill)
            processes.append(process)
        urls = []
        for process in processes:
            assert process.stderr is not None
            urls.append(f"http://127.0.0.1:{json.loads(process.stderr.readline())['port']}")
        yield list(zip(processes, urls, strict=True))


async def test_a_stream_whose_gateway_is_killed_goes_on_at_another() -> None:
    """The blocks return within a second, and the client receives what an undisturbed stream has."""
    worker = fake_worker()
    async with scheduler_with(worker) as scheduler:
        port = scheduler.server.port
        with gateway_processes(2, port) as [(first, first_url), (_, second_url)]:
            await read(second_url, "/v1/chat/completions", CHAT, Received())  # for the prefix cache
            whole = await read(second_url, "/v1/chat/completions", CHAT, Received())
            (free,) = [group.num_free for one in scheduler.engine.memory().values() for group in one.groups]
            worker.hold_at_step = worker.steps + 30
            received = Received()
            reading = asyncio.create_task(read(first_url, "/v1/chat/completions", CHAT, received))
            async with asyncio.timeout(20):
                while worker.steps < worker.hold_at_step:
                    await asyncio.sleep(0.01)
                while len(received.chunks) < 10:
                    await asyncio.sleep(0.01)
            first.kill()
            with pytest.raises(httpx.HTTPError):
                await reading
            async with asyncio.timeout(1):
                while scheduler.engine.num_running:
                    await asyncio.sleep(0.01)
            (now,) = [group.num_free for one in scheduler.engine.memory().values() for group in one.groups]
            assert now == free
            worker.gate.set()
            assert not received.done
            assert content(await read(second_url, "/v1/chat/completions", CHAT, received)) == content(whole)


@pytest.mark.slow
async def test_a_frozen_gateway_keeps_nothing_beyond_the_keepalive() -> None:
    """No reset tells of it, so its requests end after a ping in vain: 10 s until it is sent, 5 s to wait."""
    worker = fake_worker()
    body = {**CHAT, "max_tokens": 90}
    async with scheduler_with(worker) as scheduler:
        with gateway_processes(2, scheduler.server.port) as [(first, first_url), (_, second_url)]:
            received = Received()
            reading = asyncio.create_task(read(first_url, "/v1/chat/completions", body, received))
            async with asyncio.timeout(20):
                while len(received.chunks) < 5:
                    await asyncio.sleep(0.001)
            worker.gate.clear()
            first.send_signal(signal.SIGSTOP)
            async with asyncio.timeout(20):
                while scheduler.engine.num_running:
                    # Slow steps, so that the answer lasts, but no hung one.
                    worker.gate.set()
                    await asyncio.sleep(0)
                    worker.gate.clear()
                    await asyncio.sleep(0.5)
            assert scheduler.engine.num_waiting == 0
            worker.gate.set()
            reading.cancel()
            assert not received.done
            assert (await read(second_url, "/v1/chat/completions", body, received)).done


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateways() -> AsyncIterator[tuple[Gateway, Gateway]]:
    """Two gateways of one scheduler."""
    async with (
        scheduler_with(fake_worker()) as scheduler,
        running_gateway(scheduler.server.port) as first,
        running_gateway(scheduler.server.port) as second,
    ):
        yield first, second


async def test_a_stream_does_not_go_on_with_another_version_of_its_adapter() -> None:
    """It was replaced meanwhile: the client is told. Once the old version is back, the stream goes on."""
    worker = fake_worker()
    worker.max_loras, worker.max_cpu_loras = 2, 4
    async with (
        scheduler_with(worker) as scheduler,
        running_gateway(scheduler.server.port) as first,
        running_gateway(scheduler.server.port) as second,
    ):
        body = {**CHAT, "model": "a"}
        await scheduler.inference.LoadLora(inference_pb2.LoadLoraRequest(name="a", source="old"))
        await read(first.base_url, "/v1/chat/completions", body, Received())  # for the prefix cache
        whole = await read(first.base_url, "/v1/chat/completions", body, Received())
        received = await read(first.base_url, "/v1/chat/completions", body, Received(), cut_after=8)
        replaced = inference_pb2.LoadLoraRequest(name="a", source="new", load_inplace=True)
        await scheduler.inference.LoadLora(replaced)
        with pytest.raises(AssertionError, match="began with another version of the adapter 'a'"):
            await read(second.base_url, "/v1/chat/completions", body, copy.deepcopy(received))
        replaced.source = "old"
        await scheduler.inference.LoadLora(replaced)
        assert content(await read(second.base_url, "/v1/chat/completions", body, received)) == content(whole)


@pytest.mark.parametrize("cut_after", [1, 5, 30, 83])
async def test_all_choices_of_all_prompts_go_on(gateways: tuple[Gateway, Gateway], cut_after: int) -> None:
    """Several prompts with several choices, cut anywhere, the usage chunk included."""
    first, second = gateways
    path = "/v1/completions"
    await read(first.base_url, path, COMPLETION, Received())  # for the prefix cache
    whole = await read(first.base_url, path, COMPLETION, Received())
    received = await read(first.base_url, path, COMPLETION, Received(), cut_after=cut_after)
    assert content(await read(second.base_url, path, COMPLETION, received)) == content(whole)


async def refusal(
    gateway: Gateway, body: dict[str, Any], path: str = "/v1/chat/completions", **headers: str
) -> tuple[int, str]:
    """Returns the status and the message that a request is refused with."""
    async with httpx.AsyncClient(base_url=gateway.base_url, timeout=20) as http:
        response = await http.post(
            path, json=body, headers={name.replace("_", "-"): value for name, value in headers.items()}
        )
        return response.status_code, response.json()["error"]["message"]


async def test_a_stream_that_still_runs_is_taken_over(gateways: tuple[Gateway, Gateway]) -> None:
    """A client that lost its connection unnoticed goes on elsewhere; the first stream ends with an error."""
    first, second = gateways
    body = {**CHAT, "max_tokens": 90}
    async with (
        httpx.AsyncClient(base_url=first.base_url, timeout=20) as http,
        http.stream("POST", "/v1/chat/completions", json=body) as response,
    ):
        lines = response.aiter_lines()
        received = Received(ids=[(await anext(lines)).removeprefix("id: ")])
        received.chunks.append(json.loads((await anext(lines)).removeprefix("data: ")))
        rest = await read(second.base_url, "/v1/chat/completions", body, received)
        assert rest.done
        assert rest.usage[0]["usage"]["completion_tokens"] == 90


async def test_a_client_that_has_everything_gets_the_end(gateways: tuple[Gateway, Gateway]) -> None:
    """With the usage chunk, nothing is missing but the mark of the end."""
    first, second = gateways
    received = await read(first.base_url, "/v1/chat/completions", CHAT, Received())
    before = list(received.chunks)
    assert (await read(second.base_url, "/v1/chat/completions", CHAT, received)).chunks == before


@pytest.mark.parametrize(
    ("change", "headers", "path"),
    [
        ({"seed": 8}, {}, "/v1/chat/completions"),
        ({}, {"x_tenant": "another"}, "/v1/chat/completions"),
    ],
)
async def test_another_request_does_not_continue_a_stream(
    gateways: tuple[Gateway, Gateway], change: dict[str, Any], headers: dict[str, str], path: str
) -> None:
    """The same id with another body or tenant is refused, and says so."""
    received = await read(gateways[0].base_url, path, CHAT, Received(), cut_after=3)
    status, message = await refusal(
        gateways[1], {**CHAT, **change}, path, last_event_id=received.ids[-1], **headers
    )
    assert status == 400
    assert "send the same body to the same path, with the same X-Tenant" in message


async def test_white_space_and_order_of_the_body_do_not_count(gateways: tuple[Gateway, Gateway]) -> None:
    """A client may write the same request in another way."""
    received = await read(gateways[0].base_url, "/v1/chat/completions", CHAT, Received(), cut_after=3)
    other = dict(reversed(CHAT.items()))
    assert (await read(gateways[1].base_url, "/v1/chat/completions", other, received)).done


@pytest.mark.parametrize(
    ("last_event_id", "resumable", "status", "advice"),
    [
        (f"chatcmpl-{'0' * 32}:3", True, 404, "send the request again without Last-Event-ID"),
        ("chatcmpl-1:3", True, 400, "is not the id of a chunk"),
        (f"cmpl-{'0' * 32}:3", True, 400, "is not the id of a chunk"),
        (f"chatcmpl-{'0' * 32}:3-4", True, 400, "is not the id of a chunk"),
        (f"chatcmpl-{'0' * 32}:3", False, 400, "omit the header"),
    ],
)
async def test_ids_that_lead_nowhere_are_refused(
    gateways: tuple[Gateway, Gateway], last_event_id: str, resumable: bool, status: int, advice: str
) -> None:
    """The error says what to do instead."""
    body = {**CHAT, "stream_options": {"resumable": resumable}}
    found, message = await refusal(gateways[0], body, last_event_id=last_event_id)
    assert found == status
    assert advice in message


async def test_choices_of_a_resumable_stream_are_bounded(gateways: tuple[Gateway, Gateway]) -> None:
    """Every id counts all choices, so there is a limit, which the error names."""
    status, message = await refusal(gateways[0], {**COMPLETION, "n": 9}, "/v1/completions")
    assert status == 400
    assert "at most 16 choices, not 18" in message


async def test_a_stream_is_forgotten_after_a_while() -> None:
    """Behind the setting's time the client begins anew."""
    async with (
        scheduler_with(fake_worker(), event_log_ttl_s=0.05) as scheduler,
        running_gateway(scheduler.server.port) as gateway,
    ):
        received = await read(gateway.base_url, "/v1/chat/completions", CHAT, Received(), cut_after=3)
        logs = scheduler.servicer.logs
        async with asyncio.timeout(20):
            while len(logs):
                await asyncio.sleep(0.01)
        status, message = await refusal(gateway, CHAT, last_event_id=received.ids[-1])
        assert (status, logs.num_tokens) == (404, 0)
        assert "was kept for 0.05 s" in message
