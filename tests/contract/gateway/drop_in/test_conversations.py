"""Conversations as clients of vLLM send them: several at once, and in odd shapes."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from gateway.chat_prompts.encoding import ChatEncoder
from gateway.schemas.answers import BatchCompletion
from tests.support.gateway.serving import CHAT, TEXT, Stack, running_stack
from tests.support.gateway.tool_templates import folder_with

pytestmark = [pytest.mark.contract, pytest.mark.asyncio(loop_scope="module")]

CHATS = "/v1/chat/completions"
BATCH = {"messages": [CHAT["messages"], [{"role": "user", "content": "Who is there?"}]]}


@pytest.mark.parametrize(
    "more", [{}, {"logprobs": True, "top_logprobs": 1}, {"return_token_ids": True, "prompt_logprobs": 0}]
)
@pytest.mark.parametrize("number", [1, 2])
async def test_a_batch_answers_each_conversation(stack: Stack, more: dict[str, Any], number: int) -> None:
    """Choices are in the order of the conversations and equal the answers to them alone."""
    conversations = BATCH["messages"][:number]
    response = await stack.http.post(f"{CHATS}/batch", json={"messages": conversations, **more})
    answer = response.json()
    assert response.status_code == 200, answer
    BatchCompletion.model_validate(answer)
    alone = [(await stack.http.post(CHATS, json={"messages": one, **more})).json() for one in conversations]
    assert not answer.keys() & {"prompt_token_ids", "prompt_logprobs"}
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
        ({"chat_template": "{{ messages }}"}, "chat_template"),
    ],
)  # fmt: skip
async def test_what_a_batch_cannot_have_is_refused_by_name(
    stack: Stack, fields: dict[str, Any], param: str
) -> None:
    """A batch is collected, and has one choice for each conversation."""
    response = await stack.http.post(f"{CHATS}/batch", json={**BATCH, **fields})
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


async def test_a_batch_ends_with_its_client(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    """Conversations that are not encoded yet are left alone."""
    began, ended = asyncio.Event(), asyncio.Event()

    async def encode(*_: Any, **__: Any) -> list[int]:
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()
        return []

    monkeypatch.setattr(ChatEncoder, "encode", encode)
    call = asyncio.create_task(stack.http.post(f"{CHATS}/batch", json=BATCH))
    async with asyncio.timeout(5):
        await began.wait()
        call.cancel()
        await ended.wait()
    assert not stack.scheduler.requests


async def test_a_batch_counts_the_thinking_of_each_conversation(tmp_path: Path) -> None:
    """An answer may begin within the thinking that its prompt has opened, and another before any."""
    template = "{{ messages[0].content }}{# <think></think> #}"
    folder = folder_with(tmp_path, template, ["<think>", "</think>"])
    async with running_stack("Hm.</think>\n\n12", folder=folder) as stack:
        conversations = [[{"role": "user", "content": text}] for text in ("hi", "hi<think>\n")]
        alone = [(await stack.http.post(CHATS, json={"messages": one})).json() for one in conversations]
        counts = [one["usage"]["completion_tokens_details"]["reasoning_tokens"] for one in alone]
        assert counts[0] == 0 < counts[1]
        answer = (await stack.http.post(f"{CHATS}/batch", json={"messages": conversations})).json()
        assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == counts[1]


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
