"""Requests may have fields without effect; fields that would change the output are refused by name."""

from typing import Any

import pytest
from structlog.testing import capture_logs

from tests.support.gateway.serving import CHAT, TEXT, Stack

pytestmark = [pytest.mark.contract, pytest.mark.asyncio(loop_scope="module")]

CHATS = "/v1/chat/completions"
HABITS = {"metadata": {"a": "b"}, "store": True, "service_tier": "flex", "unheard_of": [1]}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHATS, CHAT), ("/v1/completions", {"prompt": "a"}), ("/tokenize", {"prompt": "a"}),
        ("/tokenize", CHAT), ("/detokenize", {"tokens": [5]}),
    ],
)  # fmt: skip
async def test_one_debug_line_names_the_fields_without_effect(
    stack: Stack, path: str, body: dict[str, Any]
) -> None:
    """The answer is the same as without them."""
    plain = (await stack.http.post(path, json=body)).json()
    with capture_logs() as logs:
        answer = await stack.http.post(path, json={**body, **HABITS})
    lines = [line["fields"] for line in logs if line["event"] == "the request has fields without effect"]
    assert (answer.status_code, lines) == (200, [list(HABITS)])
    assert answer.json().get("choices") == plain.get("choices")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"type": "image_url", "image_url": {"url": "data:"}}, '"image_url"'),
        ({"type": "input_audio", "input_audio": {}}, '"input_audio"'),
        ({"type": "file", "file": {}}, '"file"'),
    ],
)
async def test_parts_that_are_no_text_are_refused_by_name(
    stack: Stack, content: dict[str, Any], words: str
) -> None:
    """A model that reads text alone must not answer as if there were no image."""
    body = {"messages": [{"role": "user", "content": [{"type": "text", "text": "What is it?"}, content]}]}
    answer = await stack.http.post(CHATS, json=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "messages[0].content")
    assert words in error["message"]


async def test_the_example_of_structured_output_is_accepted(stack: Stack) -> None:
    """vLLM-RBLN's example has a schema of unknown keywords alone, which says nothing."""
    schema = {"sentiment": "str", "score": "float"}
    answer = await stack.http.post(CHATS, json={**CHAT, "structured_outputs": {"json": schema}})
    assert answer.status_code == 200


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "ipython", "content": "hi"}],
        [{"role": "user", "content": ["hi", {"type": "text", "text": "there", "lang": "en"}]}],
        [*CHAT["messages"], {"role": "tool", "tool_call_id": "a", "content": None}],
        [{"role": "user", "content": "hi", "extra_field": "0"}],
    ],
)
async def test_odd_messages_are_served(stack: Stack, messages: Any) -> None:
    """SmolLM2's template shows any role."""
    answer = await stack.http.post(CHATS, json={"messages": messages, "max_tokens": 20.0})
    assert answer.json()["choices"][0]["message"]["content"] == TEXT


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHATS, CHAT),
        ("/tokenize", CHAT),
        ("/v1/responses", {"input": "hi"}),
        ("/v1/messages", {**CHAT, "max_tokens": 5}),
        ("/v1/embeddings", CHAT),
        ("/rerank", {"query": "a", "documents": ["b"]}),
    ],
)
async def test_a_template_of_the_client_is_refused_by_name(
    stack: Stack, path: str, body: dict[str, Any]
) -> None:
    """The error says where a template belongs."""
    answer = await stack.http.post(path, json={**body, "chat_template": "{{ messages }}"})
    message = answer.json()["error"]["message"]
    assert answer.status_code == 400
    assert "chat_template" in message
    assert "--chat-template" in message
