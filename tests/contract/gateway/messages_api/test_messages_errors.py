"""Errors of the Messages API: each status in Anthropic's form, whichever layer refuses."""

import json
from typing import Any

import anthropic
import pytest
from pydantic import SecretStr

from gateway.messages_api.schemas import AnthropicErrorAnswer
from protos.errors import Internal, Overloaded, TimedOut, TriptychError, Unavailable
from tests.support.gateway.anthropic_types import PATH, streamed, strict_error
from tests.support.gateway.documented import check_answer
from tests.support.gateway.serving import Stack, running_stack

pytestmark = [pytest.mark.contract, pytest.mark.asyncio(loop_scope="module")]

ASK: dict[str, Any] = {"model": "smollm2", "max_tokens": 50, "messages": [{"role": "user", "content": "hi"}]}


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "kind"),
    [
        ("POST", PATH, b"{", 400, "invalid_request_error"),
        ("POST", PATH, b'{"max_tokens": 5}', 400, "invalid_request_error"),
        ("POST", PATH, json.dumps({**ASK, "model": "other"}).encode(), 404, "not_found_error"),
        ("POST", PATH, json.dumps({**ASK, "max_tokens": 5000}).encode(), 400, "invalid_request_error"),
        ("POST", f"{PATH}/batches", b"{}", 404, "not_found_error"),
        ("GET", PATH, b"", 405, "not_found_error"),
        ("POST", f"{PATH}/count_tokens", b"{}", 400, "invalid_request_error"),
        ("POST", PATH, b"x" * 100_001, 413, "request_too_large"),
    ],
)
async def test_refusals(stack: Stack, method: str, path: str, body: bytes, status: int, kind: str) -> None:
    """The gateway's own refusals have a type, one line and the request's id."""
    stack.scheduler.loras.clear()
    response = await stack.http.request(method, path, content=body, headers={"x-request-id": "mine"})
    found = response.json()
    check_answer(AnthropicErrorAnswer, found)
    assert (response.status_code, found["error"].pop("type")) == (status, kind)
    assert found.pop("error").keys() == {"message"}
    assert found == {"type": "error", "request_id": "mine"}
    assert (response.headers["request-id"], response.headers["x-request-id"]) == ("mine", "mine")
    assert response.headers["x-should-retry"] == "false"


@pytest.mark.parametrize(
    ("error", "status", "kind", "raised"),
    [
        (Overloaded("full", retry_after_ms=3000), 429, "rate_limit_error", anthropic.RateLimitError),
        (Unavailable("no replica"), 529, "overloaded_error", anthropic.InternalServerError),
        (TimedOut("too slow"), 529, "overloaded_error", anthropic.InternalServerError),
        (Internal("a bug"), 500, "api_error", anthropic.InternalServerError),
    ],
)
async def test_failures_of_the_scheduler(
    stack: Stack,
    client: anthropic.AsyncAnthropic,
    error: TriptychError,
    status: int,
    kind: str,
    raised: type[anthropic.APIStatusError],
) -> None:
    """The client raises its own exception, and knows whether and when to retry."""
    stack.scheduler.refuse = lambda _: error
    for stream in (False, True):
        with pytest.raises(raised) as caught:
            await client.messages.create(**ASK, stream=stream)
        response = caught.value.response
        assert (response.status_code, caught.value.type) == (status, kind)
        assert (caught.value.api_message, caught.value.request_id) == (
            error.message,
            response.headers["x-request-id"],
        )
        strict_error(json.loads(response.text))
        assert ("retry-after" in response.headers) == error.retryable


async def test_a_stream_that_fails(stack: Stack, client: anthropic.AsyncAnthropic) -> None:
    """The last event is the error; the client raises it."""
    stack.reply_with("It rains. " * 20)
    stack.scheduler.pause_after = 3
    stream = await client.messages.create(**ASK, stream=True)
    seen = [await anext(stream), await anext(stream)]
    stack.gateway.client.fail_all(Unavailable("gone"))
    with pytest.raises(anthropic.APIStatusError) as caught:
        seen += [event async for event in stream]
    assert [event.type for event in seen[:2]] == ["message_start", "content_block_start"]
    assert "message_stop" not in {event.type for event in seen}
    body: Any = caught.value.body
    assert body["error"] == {"type": "overloaded_error", "message": "gone"}
    strict_error(body)


async def test_batches_are_not_served(client: anthropic.AsyncAnthropic) -> None:
    """Every call of the client about them is answered in one clear line."""
    batches = client.messages.batches
    for call in (
        batches.create(requests=[]), batches.retrieve("b"), batches.cancel("b"), batches.delete("b"),
        batches.list(),
    ):  # fmt: skip
        with pytest.raises(anthropic.NotFoundError, match="nothing is stored here; send each request"):
            await call


async def test_errors_of_other_paths_stay_openais(stack: Stack) -> None:
    """Only this API has another form."""
    response = await stack.http.post("/v1/chat/completions", content=b"{")
    assert response.json().keys() == {"error"}
    assert "request-id" not in response.headers
    stack.reply_with("x")
    assert [event["type"] for event in await streamed(stack, **ASK)][-1] == "message_stop"


async def test_keys() -> None:
    """The client's key travels as X-Api-Key; without a right one, the refusal has Anthropic's form."""
    async with running_stack("x", api_key=(SecretStr("sk-a"),)) as stack:
        for key, kind in (("sk-a", None), ("sk-b", "authentication_error")):
            response = await stack.http.post(PATH, json=ASK, headers={"x-api-key": key})
            if kind is None:
                assert response.status_code == 200
            else:
                assert (response.status_code, strict_error(response.json()).error.type) == (401, kind)
