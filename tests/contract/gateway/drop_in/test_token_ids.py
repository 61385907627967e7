"""Answers with the ids of their tokens, as vLLM gives them."""

from typing import Any

import pytest

from tests.support.gateway.serving import CHAT, Stack

pytestmark = [pytest.mark.contract, pytest.mark.asyncio(loop_scope="module")]

PATHS = {"/v1/chat/completions": CHAT, "/v1/completions": {"prompt": ["The capital", "A"], "max_tokens": 5}}
# Parsed for thinking, so that text and tokens come apart.
THINKING = {**CHAT, "tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "required"}


@pytest.mark.parametrize("path", PATHS)
async def test_collected_answers_have_token_ids(stack: Stack, path: str) -> None:
    """Each choice has its own; a chat has its prompt's once, a completion in each choice."""
    body = {**PATHS[path], "n": 2, "return_token_ids": True}
    answer = (await stack.http.post(path, json=body)).json()
    prompts = [list(request.prompt_token_ids) for request in stack.scheduler.requests]
    for choice in answer["choices"]:
        prompt, sequence = prompts[choice["index"] // 2], choice["index"] % 2
        assert (choice if path == "/v1/completions" else answer)["prompt_token_ids"] == prompt
        expected = stack.scheduler.reply[sequence:]
        assert choice["token_ids"] == expected[: len(choice["token_ids"])]
    assert (
        sum(len(choice["token_ids"]) for choice in answer["choices"]) == answer["usage"]["completion_tokens"]
    )


@pytest.mark.parametrize(
    ("path", "body"), [*PATHS.items(), ("/v1/chat/completions", THINKING)], ids=["chat", "text", "parsed"]
)
@pytest.mark.parametrize("more", [{}, {"stop": ["zzz"]}, {"logprobs": 1}])
async def test_streams_have_token_ids(
    stack: Stack, path: str, body: dict[str, Any], more: dict[str, Any]
) -> None:
    """The first chunk has the prompt's, and the chunks together those of the answer."""
    if "chat" in path and "logprobs" in more:
        more = {"logprobs": True}
    *chunks, _ = await stack.stream(path, {**body, **more, "return_token_ids": True})
    found: dict[int, list[int]] = {}
    first: dict[int, list[int]] = {}
    for chunk in chunks:
        (choice,) = chunk["choices"]
        found.setdefault(choice["index"], []).extend(choice.get("token_ids", []))
        if ids := {**chunk, **choice}.get("prompt_token_ids"):
            first[choice["index"]] = ids
    requests = stack.scheduler.requests
    assert first == {index: list(request.prompt_token_ids) for index, request in enumerate(requests)}
    assert all(ids == stack.scheduler.reply[: len(ids)] and ids for ids in found.values())


async def test_answers_have_no_ids_unless_they_are_asked_for(stack: Stack) -> None:
    """The fields are absent, as before."""
    text = (await stack.http.post("/v1/chat/completions", json=CHAT)).text
    assert "token_ids" not in text
