"""Budgets of thinking over real HTTP: what each API sends to the scheduler."""

from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from google.protobuf.message import Message
from tokenizers import Tokenizer

from gateway.text.tokenization import TextCodec
from protos.triptych.v1 import common_pb2 as pb
from tests.support.gateway.serving import Stack, running_stack
from tests.support.gateway.tool_templates import WEATHER, folder_with

pytestmark = [pytest.mark.contract, pytest.mark.asyncio(loop_scope="module")]

BUDGETS = {"none": 0, "low": 12, "high": 4096}
USER = [{"role": "user", "content": "hi"}]
CHAT, RESPONSES, MESSAGES, COMPLETIONS = (
    "/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/completions",
)  # fmt: skip
# The fields that each body needs.
BASES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": USER},
    RESPONSES: {"input": "hi"},
    MESSAGES: {"messages": USER, "max_tokens": 99},
    COMPLETIONS: {"prompt": "a"},
}
OPENED = {"chat_template_kwargs": {"opened": True}}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running(qwen_folder: Path) -> AsyncIterator[Stack]:
    async with running_stack(
        "Hm.</think>\n\nx", folder=qwen_folder, reasoning_effort_budgets=BUDGETS
    ) as stack:
        yield stack


@pytest.fixture(scope="module")
def codec(qwen_folder: Path) -> TextCodec:
    return TextCodec.load(qwen_folder)


async def sent(stack: Stack, path: str, **fields: Any) -> list[pb.ThinkingBudget | None]:
    """Returns the budget of each prompt of a request."""
    before = len(stack.scheduler.requests)
    response = await stack.http.post(path, json={**BASES[path], **fields})
    assert response.status_code == 200, response.text
    samplings = [request.sampling for request in stack.scheduler.requests[before:]]
    return [each.thinking_budget if each.HasField("thinking_budget") else None for each in samplings]


def budget(codec: TextCodec, tokens: int, *, opened: bool = False) -> Message:
    """Returns the budget of a model that thinks as Qwen does."""
    ids = (codec.encode(text, add_special_tokens=False) for text in ("<think>", "</think>", "\n</think>\n\n"))
    start, end, close = ids
    return pb.ThinkingBudget(
        tokens=tokens,
        open=opened,
        starts=[pb.TokenSequence(token_ids=start)],
        ends=[pb.TokenSequence(token_ids=end)],
        close_ids=close,
    )


def texts(codec: TextCodec, markers: Iterable[pb.TokenSequence]) -> list[str]:
    return [codec.decode(marker.token_ids) for marker in markers]


@pytest.mark.parametrize(
    ("path", "fields", "tokens"),
    [
        (CHAT, {"thinking_token_budget": 7}, 7),
        (CHAT, {"thinking_token_budget": 0}, 0),
        (CHAT, {"reasoning_effort": "low"}, 12),
        (CHAT, {"reasoning_effort": "low", "thinking_token_budget": 7}, 7),
        (COMPLETIONS, {"thinking_token_budget": 7}, 7),
        (RESPONSES, {"thinking_token_budget": 7}, 7),
        (RESPONSES, {"reasoning": {"effort": "high"}}, 4096),
        (MESSAGES, {"thinking": {"type": "enabled", "budget_tokens": 7}}, 7),
        (MESSAGES, {"output_config": {"effort": "low"}}, 12),
    ],
)
async def test_the_scheduler_gets_the_budget(
    stack: Stack, codec: TextCodec, path: str, fields: dict[str, Any], tokens: int
) -> None:
    """The end is written as the chat template writes it, with its line breaks."""
    assert await sent(stack, path, **fields) == [budget(codec, tokens)]
    if path != COMPLETIONS:
        assert await sent(stack, path, **fields, **OPENED) == [budget(codec, tokens, opened=True)]


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, {}),
        (CHAT, {"thinking_token_budget": -1, "reasoning_effort": "low"}),
        (CHAT, {"reasoning_effort": "medium"}),
        (CHAT, {"reasoning_effort": "none"}),  # the prompt ends the thinking
        (CHAT, {"thinking_token_budget": 7, "chat_template_kwargs": {"enable_thinking": False}}),
        (MESSAGES, {"thinking": {"type": "adaptive", "budget_tokens": 7}}),
        (MESSAGES, {"thinking": {"type": "enabled"}}),
        (RESPONSES, {"reasoning": {}}),
    ],
)
async def test_other_requests_have_none(stack: Stack, path: str, fields: dict[str, Any]) -> None:
    assert await sent(stack, path, **fields) == [None]


async def test_each_prompt_may_have_opened_a_thought(stack: Stack, codec: TextCodec) -> None:
    prompts = ["a", "a<think>\n", "a<think>\n</think>\n\n"]
    expected = [budget(codec, 3), budget(codec, 3, opened=True), None]
    assert await sent(stack, COMPLETIONS, prompt=prompts, thinking_token_budget=3) == expected


async def test_a_call_ends_a_thought_too(stack: Stack, codec: TextCodec) -> None:
    """Where the request has tools; the worker must not write into a call."""
    for choice, expected in (("auto", ["</think>", "<tool_call>"]), ("none", ["</think>"])):
        (found,) = await sent(stack, CHAT, thinking_token_budget=3, tools=[WEATHER], tool_choice=choice)
        assert found is not None
        assert texts(codec, found.ends) == expected


async def test_markers_of_several_tokens_may_share_their_last_one(tmp_path: Path) -> None:
    """Without special tokens for them, a token may contain the line break after a marker."""
    folder = folder_with(tmp_path, special_tokens=[])
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_tokens([">\n"])
    tokenizer.save(str(folder / "tokenizer.json"))
    codec = TextCodec.load(folder)
    async with running_stack("x", folder=folder, reasoning_parser="mistral") as stack:
        (found,) = await sent(stack, CHAT, thinking_token_budget=3)
    assert found is not None
    assert {*texts(codec, found.ends)} == {"[/THINK]", "</think>", "</think>\n"}
    assert {*texts(codec, found.starts)} == {"[THINK]", "<think>", "<think>\n"}
    assert codec.decode(found.close_ids) == "[/THINK]"


@pytest.mark.parametrize("value", [-2, 2**32, "7", 1.5])
async def test_a_budget_is_a_number_of_tokens(stack: Stack, value: Any) -> None:
    response = await stack.http.post(CHAT, json={**BASES[CHAT], "thinking_token_budget": value})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "thinking_token_budget")


async def test_a_model_without_thinking_refuses_only_explicit_budgets() -> None:
    """Agents send efforts and Anthropic's budgets to any model."""
    async with running_stack("x", reasoning_effort_budgets=BUDGETS) as stack:
        for path in (CHAT, COMPLETIONS, RESPONSES):
            response = await stack.http.post(path, json={**BASES[path], "thinking_token_budget": 5})
            assert (response.status_code, response.json()["error"]["param"]) == (400, "thinking_token_budget")
        assert await sent(stack, CHAT, reasoning_effort="low") == [None]
        assert await sent(stack, RESPONSES, reasoning={"effort": "low"}) == [None]
        assert await sent(stack, MESSAGES, thinking={"type": "enabled", "budget_tokens": 7}) == [None]
        assert await sent(stack, CHAT, thinking_token_budget=-1) == [None]
