"""The access log's lines, and the counters of how sequences and requests end."""

import asyncio
import json
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from structlog.testing import capture_logs

from protos.errors import Overloaded, Unavailable
from tests.support.gateway.serving import Stack, running_stack
from tests.support.waiting import until

pytestmark = [pytest.mark.contract, pytest.mark.asyncio(loop_scope="module")]

BODY = {"model": "smollm2", "prompt": "x", "max_tokens": 3}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running() -> AsyncIterator[Stack]:
    async with running_stack("Paris is the capital of France.") as stack:
        yield stack


async def line_of(stack: Stack, body: dict[str, object]) -> dict[str, object]:
    with capture_logs() as lines:
        await stack.http.post("/v1/completions", json=body)
    (line,) = [dict(each) for each in lines if each["event"] == "request"]
    return line


async def metric(stack: Stack, start: str) -> float:
    text = (await stack.http.get("/metrics")).text
    return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith(start))


@pytest.mark.parametrize("streamed", [False, True])
async def test_an_answer_has_its_finish_reasons_and_its_first_token(stack: Stack, streamed: bool) -> None:
    """Each reason is there once, in order; the first token comes within the request's time."""
    line = await line_of(stack, BODY | {"n": 2, "stream": streamed})
    assert (line["status"], line["finish_reason"], line["completion_tokens"]) == (200, "length", 6)
    ttft_ms, ms = line["ttft_ms"], line["ms"]
    assert isinstance(ttft_ms, float)
    assert isinstance(ms, float)
    assert 0 < ttft_ms <= ms
    assert "error" not in line


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        (BODY | {"max_tokens": 100_000}, 400, "context_length_exceeded"),
        (BODY | {"model": "other"}, 404, "model_not_found"),
        (BODY | {"n": "two"}, 400, "invalid_value"),
        (BODY, 429, "rate_limit_exceeded"),
    ],
)
async def test_a_refusal_has_its_code(stack: Stack, body: dict[str, object], status: int, code: str) -> None:
    """The log and a counter have the code that the client sees; no sequence counts as failed."""
    stack.scheduler.refuse = lambda _: Overloaded("full", retry_after_ms=1000)
    start = f'triptych:gateway_errors_total{{code="{code}",handler="/v1/completions"}}'
    before = await metric(stack, start)
    failed = await metric(stack, "vllm:request_success_total")
    line = await line_of(stack, body)
    assert (line["status"], line["error"]) == (status, code)
    assert "ttft_ms" not in line
    assert await metric(stack, start) == before + 1
    assert await metric(stack, "vllm:request_success_total") == failed


async def test_a_failure_behind_the_first_token_has_its_code_too(stack: Stack) -> None:
    """The status is 200 by then, the stream ends properly, and the sequence counts as its engine's error."""
    start = 'vllm:request_success_total{engine="r0",finished_reason="error"'
    before = await metric(stack, start)
    stack.scheduler.pause_after = 1
    with capture_logs() as lines:
        async with stack.http.stream("POST", "/v1/completions", json=BODY | {"stream": True}) as answer:
            chunks = answer.aiter_lines()
            await anext(chunks)
            stack.gateway.client.fail_all(Unavailable("lost for good"))
            *_, error, done = [chunk async for chunk in chunks if chunk]
    assert json.loads(error.removeprefix("data: "))["error"]["code"] == "service_unavailable"
    assert done == "data: [DONE]"
    (line,) = [each for each in lines if each["event"] == "request"]
    assert (line["status"], line["error"]) == (200, "service_unavailable")
    assert await metric(stack, start) == before + 1


async def test_a_client_that_leaves_is_an_abort(stack: Stack) -> None:
    """The log says that it left, and its sequences count as aborted."""
    start = 'vllm:request_success_total{engine="r0",finished_reason="abort"'
    before = await metric(stack, start)
    stack.scheduler.pause_after = 1
    body = json.dumps(BODY | {"stream": True, "n": 2})
    with capture_logs() as lines:
        reader, writer = await asyncio.open_connection("127.0.0.1", stack.gateway.port)
        writer.write(
            f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n{body}".encode()
        )
        await reader.readuntil(b"data: ")
        writer.close()
        await until(lambda: any(each["event"] == "request" for each in lines))
    (line,) = [each for each in lines if each["event"] == "request"]
    assert line["client_gone"] is True
    assert await metric(stack, start) == before + 2
