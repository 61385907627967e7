"""Conversations as clients of vLLM send them: in odd shapes."""

from typing import Any

import pytest

from tests.support.gateway.serving import CHAT, TEXT, Stack

pytestmark = [pytest.mark.contract, pytest.mark.asyncio(loop_scope="module")]

CHATS = "/v1/chat/completions"


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
