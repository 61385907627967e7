"""Refusals, failures and clients that disconnect, over real HTTP and real gRPC, against a fake scheduler."""

import asyncio
import json

import pytest

from gateway.generation.sequence_text import Delta
from gateway.openai.answers import ChatChunks
from protos.errors import (
    ContextExceeded,
    Internal,
    NotFound,
    Overloaded,
    TriptychError,
    Unavailable,
    Unsupported,
)
from tests.support.gateway.serving import CHAT, TEXT, Stack

pytestmark = [pytest.mark.contract, pytest.mark.asyncio(loop_scope="module")]

CHATS, TEXTS = "POST /v1/chat/completions", "POST /v1/completions"


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(
    ("error", "status", "code", "retry_after"),
    [
        (Overloaded("the queue is full", retry_after_ms=2100), 429, "rate_limit_exceeded", "3"),
        (Unavailable("no replica is ready"), 503, "service_unavailable", "1"),
        (Unsupported("min_p is not served", param="min_p"), 400, "unsupported_parameter", None),
        (ContextExceeded("too long", param="prompt"), 400, "context_length_exceeded", None),
        (NotFound("no such model", param="model"), 404, "model_not_found", None),
        (Internal("broken"), 500, "internal_error", None),
    ],
)  # fmt: skip
async def test_the_schedulers_errors_have_their_status(stack: Stack, streamed: bool, error: TriptychError, status: int, code: str, retry_after: str | None) -> None:  # fmt: skip
    """Typed errors become statuses, even for streams: nothing has been sent yet."""
    stack.scheduler.refuse = lambda _: error
    response = await stack.http.post("/v1/completions", json={"prompt": "x", "stream": streamed})
    assert response.status_code == status
    found = response.json()["error"]
    assert (found["message"], found["param"], found["code"]) == (error.message, error.param or None, code)
    assert response.headers.get("retry-after") == retry_after


async def test_one_refused_prompt_fails_the_whole_body(stack: Stack) -> None:
    stack.scheduler.refuse = lambda request: Overloaded("full") if request.request_id.endswith("-1") else None
    stack.scheduler.pause_after = 2
    response = await stack.http.post("/v1/completions", json={"prompt": ["a", "b"]})
    assert response.status_code == 429
    await stack.scheduler.until(lambda: [name[-2:] for name in stack.scheduler.aborted] == ["-0"])


async def test_a_token_that_cannot_be_written_ends_its_stream_alone(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, calls = ChatChunks.write, 0

    def fail_once(self: ChatChunks, delta: Delta) -> bytes:
        nonlocal calls
        calls += 1
        if calls == 5:
            raise RuntimeError("on purpose")
        return write(self, delta)

    monkeypatch.setattr(ChatChunks, "write", fail_once)
    stack.scheduler.step_s = 0.002
    streams = await asyncio.gather(*(stack.stream("/v1/chat/completions", CHAT) for _ in range(2)))
    failed = [any(isinstance(chunk, dict) and "error" in chunk for chunk in chunks) for chunks in streams]
    assert sorted(failed) == [False, True]
    whole = streams[failed.index(False)][:-1]
    assert "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in whole) == TEXT


@pytest.mark.parametrize(
    ("path", "body", "status", "code", "param"),
    [
        (CHATS, b"{", 400, "invalid_value", None),
        (CHATS, b"", 400, "invalid_value", None),
        (TEXTS, b'{"prompt": 5}', 400, "invalid_value", "prompt"),
        (TEXTS, b'{"prompt": ""}', 400, "invalid_value", "prompt"),
        (TEXTS, b'{"prompt": "x", "model": "gpt-9"}', 404, "model_not_found", "model"),
        (TEXTS, b'{"prompt": "x", "temperature": -1}', 400, "invalid_value", "temperature"),
        (TEXTS, b'{"prompt": "x", "best_of": 2}', 400, "unsupported_parameter", "best_of"),
        (TEXTS, b'{"prompt": "x", "max_tokens": 512}', 400, "context_length_exceeded", "prompt"),
        (TEXTS, b'{"prompt": ["a","b","c","d","e"]}', 400, "invalid_value", "prompt"),
        (TEXTS, b'{"prompt": [49152]}', 400, "invalid_value", "prompt"),
        (TEXTS, b'{"prompt": "%s"}' % (b"word " * 600), 400, "context_length_exceeded", "prompt"),
        (TEXTS, b" " * 100_001, 413, "payload_too_large", None),
        ("GET /v1/completions", b"", 405, "method_not_allowed", None),
        ("DELETE /health", b"", 405, "method_not_allowed", None),
        ("GET /", b"", 404, "not_found", None),
        ("GET /v1/audio/speech", b"", 404, "not_found", None),
        ("GET /v1/models/none/such", b"", 404, "model_not_found", "model"),
        ("POST /tokenize", b"{}", 400, "invalid_value", None),
        ("POST /detokenize", b'{"tokens": "x"}', 400, "invalid_value", "tokens"),
    ],
)
async def test_every_refusal_is_an_openai_error(
    stack: Stack, path: str, body: bytes, status: int, code: str, param: str | None
) -> None:
    """A refusal has status, code and parameter, and one line for people."""
    response = await stack.http.request(*path.split(), content=body)
    assert response.status_code == status
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["code"], error["param"], error["type"]) == (code, param, "invalid_request_error")
    assert error["message"]
    assert "\n" not in error["message"]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("streamed", [False, True])
async def test_a_client_that_disconnects_cancels_its_request(stack: Stack, path: str, streamed: bool) -> None:
    stack.scheduler.pause_after = 3
    body = json.dumps(
        {"prompt": "x", "stream": streamed} if path == "/v1/completions" else {**CHAT, "stream": streamed}
    )
    reader, writer = await asyncio.open_connection("127.0.0.1", stack.gateway.port)
    writer.write(f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n{body}".encode())
    await stack.scheduler.until(lambda: bool(stack.scheduler.requests))
    if streamed:
        await reader.readuntil(b"data: ")
    writer.close()
    await stack.scheduler.until(lambda: stack.scheduler.aborted == [stack.scheduler.requests[0].request_id])
