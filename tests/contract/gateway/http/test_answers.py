"""Answers over real HTTP and real gRPC, against a fake scheduler."""

from typing import Any

import pytest

from tests.support.gateway.serving import CHAT, TEXT, Stack

pytestmark = [pytest.mark.contract, pytest.mark.asyncio(loop_scope="module")]


async def test_chat(stack: Stack) -> None:
    """A chat answer has OpenAI's shape, and the prompt went through the model's template."""
    response = await stack.http.post("/v1/chat/completions", json={**CHAT, "model": "smollm2"})
    assert response.status_code == 200
    body = response.json()
    assert body.pop("id").startswith("chatcmpl-")
    assert body.pop("created") > 1_700_000_000
    assert body.pop("system_fingerprint").startswith("fp_")
    prompt_tokens = len(stack.scheduler.requests[0].prompt_token_ids)
    assert body == {
        "object": "chat.completion",
        "model": "smollm2",
        "choices": [{
            "index": 0, "message": {"role": "assistant", "content": TEXT, "refusal": None},
            "logprobs": None, "finish_reason": "stop", "stop_reason": None,
        }],
        "usage": {
            "prompt_tokens": prompt_tokens, "completion_tokens": len(stack.scheduler.reply),
            "total_tokens": prompt_tokens + len(stack.scheduler.reply), "prompt_tokens_details": {"cached_tokens": 3},
            "completion_tokens_details": {"reasoning_tokens": 0},
        },
        "service_tier": "default",
    }  # fmt: skip
    assert list(stack.scheduler.requests[0].prompt_token_ids)[:1] == [1]
    assert not stack.scheduler.requests[0].sampling.HasField("max_tokens")


async def test_completion(stack: Stack) -> None:
    """A plain completion stops after 16 tokens by default."""
    body = (await stack.http.post("/v1/completions", json={"prompt": "The capital"})).json()
    assert body["object"] == "text_completion"
    assert body["id"].startswith("cmpl-")
    (choice,) = body["choices"]
    assert TEXT.startswith(choice["text"])
    assert (choice["finish_reason"], body["usage"]["completion_tokens"]) == (
        "stop" if len(stack.scheduler.reply) <= 16 else "length",
        min(16, len(stack.scheduler.reply)),
    )


async def test_chat_stream(stack: Stack) -> None:
    """A stream has role, deltas, reason, usage and end, as OpenAI sends them."""
    events = await stack.stream("/v1/chat/completions", {**CHAT, "stream_options": {"include_usage": True}})
    assert events.pop() == "[DONE]"
    usage = events.pop()
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == len(stack.scheduler.reply)
    deltas = [event["choices"][0]["delta"] for event in events]
    assert deltas[0] == {"role": "assistant", "content": "", "refusal": None}
    assert "".join(delta["content"] for delta in deltas[1:-1]) == TEXT
    assert len(deltas) > 5
    assert deltas[-1] == {}
    assert [event["choices"][0]["finish_reason"] for event in events] == [None] * (len(events) - 1) + ["stop"]
    assert all(event["usage"] is None for event in events)
    assert len({(event["id"], event["created"], event["model"]) for event in [*events, usage]}) == 1


async def test_usage_in_chunks(stack: Stack) -> None:
    """By default no chunk has usage; with continuous_usage_stats, each counts the tokens so far."""
    events = await stack.stream("/v1/completions", {"prompt": "x"})
    assert all("usage" not in event for event in events[:-1])
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"prompt": "x", "max_tokens": 5, "stream_options": options}
    counts = [
        event["usage"]["completion_tokens"] for event in (await stack.stream("/v1/completions", body))[:-1]
    ]
    assert counts == sorted(counts)
    assert (counts[0] < 5, counts[-1]) == (True, 5)


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("tokens_per_event", [1, 3, 100])
@pytest.mark.parametrize(("stop", "include", "text"), [
    (" of Fr", False, "Paris is the capital"), (" of Fr", True, "Paris is the capital of Fr"),
    (["zzz", "."], False, "Paris is the capital of France"), ("Paris", False, ""),
])  # fmt: skip
async def test_stop_strings(
    stack: Stack, streamed: bool, tokens_per_event: int, stop: Any, include: bool, text: str
) -> None:
    """A stop string, even inside a token, ends the text, the count and the request."""
    stack.scheduler.tokens_per_event, stack.scheduler.pause_after = tokens_per_event, 12
    body = {"prompt": "x", "max_tokens": 100, "stop": stop, "include_stop_str_in_output": include}
    if streamed:
        events = await stack.stream("/v1/completions", {**body, "stream_options": {"include_usage": True}})
        found = "".join(event["choices"][0]["text"] for event in events[:-2])
        choice, usage = events[-3]["choices"][0], events[-2]["usage"]
    else:
        answer = (await stack.http.post("/v1/completions", json=body)).json()
        choice, usage = answer["choices"][0], answer["usage"]
        found = choice["text"]
    assert found == text
    assert choice["finish_reason"] == "stop"
    assert choice["stop_reason"] == (stop if isinstance(stop, str) else ".")
    assert usage["completion_tokens"] <= 7
    await stack.scheduler.until(lambda: bool(stack.scheduler.aborted) or tokens_per_event == 100)
