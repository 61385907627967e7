"""Conversations as clients of vLLM send them: several at once, and in odd shapes."""

from typing import Any

import pytest

from gateway.schemas.answers import BatchCompletion
from tests.support.gateway.serving import CHAT, TEXT, Stack

pytestmark = [pytest.mark.contract, pytest.mark.asyncio(loop_scope="module")]

CHATS = "/v1/chat/completions"
BATCH = {"messages": [CHAT["messages"], [{"role": "user", "content": "Who is there?"}]]}


@pytest.mark.parametrize(
    "more", [{}, {"logprobs": True, "top_logprobs": 1}, {"return_token_ids": True, "prompt_logprobs": 0}]
)
async def test_a_batch_answers_each_conversation(stack: Stack, more: dict[str, Any]) -> None:
    """Choices are in the order of the conversations and equal the answers to them alone."""
    response = await stack.http.post(f"{CHATS}/batch", json={**BATCH, **more})
    answer = response.json()
    assert response.status_code == 200, answer
    BatchCompletion.model_validate(answer)
    alone = [
        (await stack.http.post(CHATS, json={"messages": one, **more})).json() for one in BATCH["messages"]
    ]
    for index, (choice, single) in enumerate(zip(answer["choices"], alone, strict=True)):
        own = {name: single[name] for name in ("prompt_token_ids", "prompt_logprobs") if name in single}
        assert choice == {**single["choices"][0], **own, "index": index}
    for count in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert answer["usage"][count] == sum(one["usage"][count] for one in alone)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"stream": True}, "stream"), ({"n": 2}, "n"), ({"tools": [{"function": {"name": "f"}}]}, "tools"),
        ({"tool_choice": "auto"}, "tool_choice"), ({"messages": []}, "messages"), ({"messages": [[]]}, "messages[0]"),
        ({"messages": CHAT["messages"]}, "messages[0]"), ({"messages": BATCH["messages"] * 3}, "messages"),
    ],
)  # fmt: skip
async def test_what_a_batch_cannot_have_is_refused_by_name(
    stack: Stack, fields: dict[str, Any], param: str
) -> None:
    """A batch is collected, and has one choice for each conversation."""
    response = await stack.http.post(f"{CHATS}/batch", json={**BATCH, **fields})
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


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


async def test_a_refused_bias_is_named(stack: Stack) -> None:
    """The error quotes the key that is not a token id."""
    answer = await stack.http.post(CHATS, json={**CHAT, "logit_bias": {"5": 1, "not_an_id": 2}})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "logit_bias")
    assert "not_an_id" in error["message"]
