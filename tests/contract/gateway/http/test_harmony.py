"""gpt-oss over real HTTP and real gRPC: its messages are thinking, content and calls, without settings."""

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from gateway.parsers.harmony import MARKERS
from gateway.text.tokenization import TextCodec
from protos.triptych.v1 import common_pb2 as pb
from tests.support.gateway.serving import Stack, running_stack
from tests.support.gateway.tool_requests import accepts
from tests.support.gateway.tool_templates import HARMONY, TIME, WEATHER, folder_with

pytestmark = [pytest.mark.contract, pytest.mark.asyncio(loop_scope="module")]

CHAT = "/v1/chat/completions"
USER = [{"role": "user", "content": "Weather in Paris?"}]
TOOLS = [WEATHER, TIME]
PARIS = '{"city": "Paris"}'
THOUGHT = "<|channel|>analysis<|message|>Need it.<|end|><|start|>assistant"
CALL = f"<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{PARIS}"
ANSWER = f"{THOUGHT}<|channel|>commentary<|message|>I look.<|end|><|start|>assistant{CALL}"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    folder = folder_with(tmp_path_factory.mktemp("gpt-oss"), HARMONY, sorted(MARKERS))
    async with running_stack(ANSWER, folder=folder) as stack:
        yield stack


@pytest.fixture(params=[1, 3, 100])
def stack(running: Stack, request: pytest.FixtureRequest) -> Stack:
    running.scheduler.reset()
    running.scheduler.tokens_per_event = request.param
    running.reply_with(ANSWER)
    return running


async def test_chats(stack: Stack) -> None:
    """A collected and a streamed chat have the thinking, the content and the call."""
    body = {"messages": USER, "tools": TOOLS}
    (choice,) = (await stack.post(CHAT, **body))["choices"]
    message = choice["message"]
    assert (message["reasoning"], message["content"]) == ("Need it.", "I look.")
    assert [call["function"] for call in message["tool_calls"]] == [
        {"name": "get_weather", "arguments": PARIS}
    ]
    assert choice["finish_reason"] == "tool_calls"
    *events, done = await stack.stream(CHAT, body)
    assert done == "[DONE]"
    deltas = [event["choices"][0]["delta"] for event in events]
    for field, text in (("reasoning", "Need it."), ("content", "I look.")):
        assert "".join(delta.get(field) or "" for delta in deltas) == text
    functions = [call["function"] for delta in deltas for call in delta.get("tool_calls", ())]
    assert functions[0]["name"] == "get_weather"
    assert "".join(function["arguments"] for function in functions) == PARIS


async def test_messages_and_responses(stack: Stack) -> None:
    tool = {"name": "get_weather", "input_schema": WEATHER["function"]["parameters"]}
    answer = await stack.post("/v1/messages", max_tokens=100, messages=USER, tools=[tool])
    thought, text, call = answer["content"]
    assert (thought["thinking"], text["text"], call["input"]) == ("Need it.", "I look.", {"city": "Paris"})
    answer = await stack.post(
        "/v1/responses", input="Weather?", tools=[{"type": "function", **WEATHER["function"]}]
    )
    kinds = {item["type"]: item for item in answer["output"]}
    assert kinds["reasoning"]["content"][0]["text"] == "Need it."
    assert kinds["message"]["content"][0]["text"] == "I look."
    assert kinds["function_call"]["arguments"] == PARIS


async def test_without_tools_no_marker_is_shown(stack: Stack) -> None:
    (choice,) = (await stack.post(CHAT, messages=USER))["choices"]
    assert choice["message"]["reasoning"] == "Need it."
    assert choice["message"]["content"] == f"I look.\n{PARIS}"
    assert choice["finish_reason"] == "stop"


async def test_text_on_both_sides_of_a_thought(stack: Stack) -> None:
    stack.reply_with(
        f"<|channel|>commentary<|message|>I look.<|end|><|start|>assistant{THOUGHT}<|channel|>final<|message|>Done."
    )
    (choice,) = (await stack.post(CHAT, messages=USER))["choices"]
    assert choice["message"]["content"] == "I look.\nDone."
    *events, _ = await stack.stream(CHAT, {"messages": USER})
    assert "".join(event["choices"][0]["delta"].get("content") or "" for event in events) == "I look.\nDone."


async def test_tokens_of_thinking_are_counted(running: Stack) -> None:
    running.scheduler.reset()
    running.reply_with(ANSWER)
    usage = (await running.post(CHAT, messages=USER, tools=TOOLS))["usage"]
    assert 0 < usage["completion_tokens_details"]["reasoning_tokens"] < usage["completion_tokens"] / 2


async def test_a_budget_ends_a_thought(running: Stack) -> None:
    running.scheduler.reset()
    codec = TextCodec.load(running.scheduler.folder)
    start, end = (
        codec.encode(text, add_special_tokens=False) for text in ("<|channel|>analysis<|message|>", "<|end|>")
    )
    for api, body in ((CHAT, {"thinking_token_budget": 7}), ("/v1/responses", {"thinking_token_budget": 7})):
        await running.post(api, **({"messages": USER} if api == CHAT else {"input": "hi"}), **body)
        budget = running.scheduler.requests[-1].sampling.thinking_budget
        assert (budget.tokens, budget.open, list(budget.close_ids)) == (7, False, end)
        assert pb.TokenSequence(token_ids=start) in budget.starts
        assert pb.TokenSequence(token_ids=end) in budget.ends


async def test_an_answer_goes_on_where_the_prompt_ends(running: Stack) -> None:
    running.scheduler.reset()
    running.reply_with("lo.<|end|>")
    turns = [*USER, {"role": "assistant", "content": "Hel"}]
    body = {"messages": turns, "continue_final_message": True, "add_generation_prompt": False}
    (choice,) = (await running.post(CHAT, **body, structured_outputs={"choice": ["lo."]}))["choices"]
    assert (choice["message"]["content"], choice["message"].get("reasoning")) == ("lo.", None)
    assert accepts(running.scheduler.requests[-1].sampling.structured_output, "lo.")


@pytest.mark.parametrize(
    ("body", "good", "bad"),
    [
        ({"tool_choice": "required"}, [CALL], ["<|channel|>final<|message|>No."]),
        (
            {"tool_choice": {"type": "function", "function": {"name": "get_time"}}},
            ["<|channel|>commentary to=functions.get_time <|constrain|>json<|message|>{}"],
            [CALL],
        ),
        (
            {"tools": [{**WEATHER, "function": {**WEATHER["function"], "strict": True}}]},
            [CALL, "<|channel|>final<|message|>No."],
            [CALL.replace("city", "town"), "No."],
        ),
        (
            {"response_format": {"type": "json_object"}},
            [CALL, '<|channel|>final <|constrain|>json<|message|>{"a": 1}'],
            ["<|channel|>final<|message|>No.", "{}"],
        ),
        (
            {"tools": [], "structured_outputs": {"choice": ["yes"]}},
            ["<|channel|>final<|message|>yes"],
            [CALL, "yes", "<|channel|>final<|message|>no"],
        ),
    ],
)
async def test_grammars(running: Stack, body: dict[str, Any], good: list[str], bad: list[str]) -> None:
    """Required, named and strict calls, and answers in a format, come after any thinking."""
    running.scheduler.reset()
    running.reply_with(ANSWER)
    await running.post(CHAT, **{"messages": USER, "tools": TOOLS, **body})
    constraint = running.scheduler.requests[-1].sampling.structured_output
    assert json.loads(constraint.structural_tag)
    for before in ("", THOUGHT, THOUGHT * 2):
        assert all(accepts(constraint, before + text) for text in good)
        assert not any(accepts(constraint, before + text) for text in bad)
    assert not accepts(constraint, THOUGHT)


@pytest.mark.parametrize("setting", ["tool_call_parser", "reasoning_parser"])
async def test_by_name(setting: str) -> None:
    """A template that shows no format leaves the choice to the settings."""
    changes: dict[str, Any] = {setting: "openai"}
    async with running_stack(ANSWER, **changes) as stack:
        (choice,) = (await stack.post(CHAT, messages=USER, tools=TOOLS))["choices"]
        assert choice["message"]["reasoning"] == "Need it."
        assert choice["finish_reason"] == "tool_calls"
