"""Tool calls and thinking over real HTTP and real gRPC: a fake scheduler plays exact token streams."""

import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from gateway.openai.answers import ChatCompletion
from protos.triptych.v1 import common_pb2 as pb
from tests.support.gateway.documented import check_answer
from tests.support.gateway.serving import Stack, running_stack
from tests.support.gateway.tool_requests import accepts
from tests.support.gateway.tool_templates import TIME, WEATHER

# The grammar of the tool's arguments: listed properties only.
CLOSED = {**WEATHER["function"]["parameters"], "additionalProperties": False}

pytestmark = [pytest.mark.contract, pytest.mark.asyncio(loop_scope="module")]

PATH = "/v1/chat/completions"
ASK: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Weather in Paris?"}],
    "tools": [WEATHER, TIME],
}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running(qwen_folder: Path) -> AsyncIterator[Stack]:
    async with running_stack(CALL, folder=qwen_folder) as stack:
        yield stack


@pytest.fixture
def stack(running: Stack) -> Stack:
    running.scheduler.reset()
    running.reply_with(CALL)
    return running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def plain() -> AsyncIterator[Stack]:
    """SmolLM2 itself: its template knows neither tools nor thinking."""
    async with running_stack("x") as stack:
        yield stack


async def collected(stack: Stack, **body: Any) -> dict[str, Any]:
    answer = await stack.post(PATH, **{**ASK, **body})
    check_answer(ChatCompletion, answer)
    choice: dict[str, Any] = answer["choices"][0]
    return choice


async def streamed(stack: Stack, **body: Any) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Returns the choice that a client collects from the stream, and its deltas."""
    events = await stack.stream(PATH, {**ASK, **body})
    assert events.pop() == "[DONE]"
    deltas = [event["choices"][0]["delta"] for event in events]
    message: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": []}
    for delta in deltas:
        message["content"] += delta.get("content") or ""
        message["reasoning_content"] += delta.get("reasoning_content") or ""
        assert delta.get("reasoning") == delta.get("reasoning_content")
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                assert call["index"] == len(message["tool_calls"])
                message["tool_calls"].append({**call, "function": dict(call["function"])})
            else:
                assert call.keys() == {"index", "function"}
                message["tool_calls"][call["index"]]["function"]["arguments"] += call["function"]["arguments"]
    return {**events[-1]["choices"][0], "message": message}, deltas


def functions(choice: dict[str, Any]) -> list[tuple[str, str]]:
    calls = choice["message"].get("tool_calls") or []
    return [(call["function"]["name"], call["function"]["arguments"]) for call in calls]


def constraint_of(stack: Stack) -> pb.StructuredOutput:
    return stack.scheduler.requests[-1].sampling.structured_output


def structural_tag(stack: Stack) -> dict[str, Any]:
    tag: dict[str, Any] = json.loads(constraint_of(stack).structural_tag)
    return tag


async def test_a_call(stack: Stack) -> None:
    """OpenAI's message has no content and one call, although the markers are special tokens."""
    choice = await collected(stack)
    (call,) = choice["message"]["tool_calls"]
    assert call.pop("id").startswith("call_")
    assert call == {"type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'}}
    assert choice["message"]["content"] is None
    assert (choice["finish_reason"], choice["stop_reason"]) == ("tool_calls", None)
    assert not stack.scheduler.requests[-1].sampling.HasField("structured_output")


@pytest.mark.parametrize("tokens_per_event", [1, 2, 7, 100])
async def test_a_streamed_call(stack: Stack, tokens_per_event: int) -> None:
    """A stream has the role, the call's id, type and name, pieces of its arguments, and the reason."""
    stack.reply_with(f"Let me look.\n{CALL}\n{CALL.replace('Paris', 'Oslo')}")
    stack.scheduler.tokens_per_event = tokens_per_event
    choice, deltas = await streamed(stack)
    assert deltas[0] == {"role": "assistant", "content": "", "refusal": None}
    starts = [call for delta in deltas for call in delta.get("tool_calls", ()) if "id" in call]
    assert [(call["index"], call["type"], call["function"]["name"]) for call in starts] == [
        (0, "function", "get_weather"), (1, "function", "get_weather"),
    ]  # fmt: skip
    assert all(call["function"]["arguments"] == "" for call in starts)
    assert len({call["id"] for call in starts}) == 2
    assert choice["message"]["content"] == "Let me look."
    assert functions(choice) == [("get_weather", '{"city": "Paris"}'), ("get_weather", '{"city": "Oslo"}')]
    assert (choice["delta"], choice["finish_reason"]) == ({}, "tool_calls")
    if tokens_per_event == 1:
        assert len(deltas) > 12


async def test_one_call_at_a_time(stack: Stack) -> None:
    stack.reply_with(f"{CALL}\n{CALL}")
    assert len(functions(await collected(stack))) == 2
    assert len(functions(await collected(stack, parallel_tool_calls=False))) == 1
    assert len(functions((await streamed(stack, parallel_tool_calls=False))[0])) == 1


@pytest.mark.parametrize("choice", ["none", "auto"])
async def test_text_stays_text(stack: Stack, choice: str) -> None:
    """An answer without calls is the same with and without tools, to the last line break."""
    stack.reply_with("It is < 5 degrees.\n\nTake a <tool>.\n")
    answer = await collected(stack, tool_choice=choice)
    assert answer["message"]["content"] == "It is < 5 degrees.\n\nTake a <tool>.\n"
    assert (answer["finish_reason"], "tool_calls" in answer["message"]) == ("stop", False)
    assert (await streamed(stack, tool_choice=choice))[0]["message"]["content"] == answer["message"][
        "content"
    ]


async def test_choice_none_parses_no_calls(stack: Stack) -> None:
    """With tool_choice none, a call is text, and its special tokens are skipped as usual."""
    answer = await collected(stack, tool_choice="none")
    assert answer["message"]["content"] == '\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n'
    assert answer["finish_reason"] == "stop"


async def test_a_stop_string_within_a_call(stack: Stack) -> None:
    """A stop string ends the text even inside a call, as in vLLM."""
    answer = await collected(stack, stop=["Paris"])
    assert functions(answer) == [("get_weather", '{"city": "')]
    assert answer["stop_reason"] == "Paris"


async def test_required_calls_are_constrained(stack: Stack) -> None:
    """The grammar is that of the format which the parser reads, behind optional thinking."""
    answer = await collected(stack, tool_choice="required")
    assert (functions(answer)[0][0], answer["finish_reason"]) == ("get_weather", "tool_calls")
    form = structural_tag(stack)["format"]
    assert form["elements"][0]["content"]["begin"] == "<think>"
    assert accepts(constraint_of(stack), f"{CALL}\n{CALL}")
    await collected(stack, tool_choice="required", parallel_tool_calls=False)
    assert accepts(constraint_of(stack), CALL)
    assert not accepts(constraint_of(stack), f"{CALL}\n{CALL}")


async def test_a_named_tool(stack: Stack) -> None:
    """One call of one tool, with OpenAI's finish_reason for it: stop."""
    choice = {"type": "function", "function": {"name": "get_weather"}}
    whole, (streaming, _) = (
        await collected(stack, tool_choice=choice),
        await streamed(stack, tool_choice=choice),
    )
    for answer in (whole, streaming):
        assert functions(answer) == [("get_weather", '{"city": "Paris"}')]
        assert answer["finish_reason"] == "stop"
    assert accepts(constraint_of(stack), CALL)
    assert not accepts(constraint_of(stack), CALL.replace("get_weather", "get_time"))


@pytest.mark.parametrize("stream", [False, True])
async def test_models_without_a_format_of_their_own(plain: Stack, stream: bool) -> None:
    """Required calls are a JSON list, a named call its arguments alone."""
    written = (
        '[{"name": "get_weather", "parameters": {"city": "Paris"}}, {"name": "get_time", "parameters": {}}]'
    )
    plain.reply_with(written)

    async def ask(**body: Any) -> dict[str, Any]:
        return (await streamed(plain, **body))[0] if stream else await collected(plain, **body)

    answer = await ask(tool_choice="required")
    assert functions(answer) == [("get_weather", '{"city": "Paris"}'), ("get_time", "{}")]
    assert answer["finish_reason"] == "tool_calls"
    elements = structural_tag(plain)["format"]["elements"]
    assert (elements[0]["value"], elements[-1]["value"]) == ("[", "]")
    assert '"description": "The weather of a city."' in plain.prompt
    plain.reply_with('{"city": "Paris"}')
    answer = await ask(tool_choice={"type": "function", "function": {"name": "get_weather"}})
    assert functions(answer) == [("get_weather", '{"city": "Paris"}')]
    assert structural_tag(plain)["format"] == {
        "type": "json_schema", "json_schema": CLOSED,
    }  # fmt: skip


async def test_allowed_tools(stack: Stack) -> None:
    """Only the allowed tools are shown and callable, by choice or by need."""
    for mode in ("auto", "required"):
        tools = [{"type": "function", "function": {"name": "get_time"}}]
        choice = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}
        await collected(stack, tool_choice=choice)
        assert "get_time" in stack.prompt
        assert "get_weather" not in stack.prompt
    assert "get_weather" not in stack.scheduler.requests[-1].sampling.structured_output.structural_tag
    tools = [{"type": "function", "function": {"name": "other"}}]
    status, error = await stack.refusal(
        PATH, **ASK, tool_choice={"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": tools}}
    )
    assert (status, "'other'" in error["message"]) == (400, True)


async def test_optional_calls_need_a_parser(plain: Stack) -> None:
    """A model whose calls could not be found is not asked for any: the request is refused."""
    status, error = await plain.refusal(PATH, **ASK)
    assert (status, error["param"], error["code"]) == (400, "tool_choice", "unsupported_parameter")
    assert "--tool-call-parser" in error["message"]
    await plain.post(PATH, messages=ASK["messages"])
    await plain.post(PATH, **ASK, tool_choice="none")
    # Nor does the prompt describe tools that may not be called.
    assert len({tuple(request.prompt_token_ids) for request in plain.scheduler.requests[-2:]}) == 1


async def test_a_conversation_with_calls(stack: Stack) -> None:
    """Calls, their results and thinking that a client sends back go through the template."""
    messages = [
        *ASK["messages"],
        {
            "role": "assistant", "content": None, "refusal": None, "reasoning_content": "Look it up.",
            "tool_calls": [{"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city":"Paris"}'}}],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": "12 degrees"},
    ]  # fmt: skip
    body = {**ASK, "messages": messages}
    await collected(stack, **body)
    prompt = stack.prompt
    assert '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>' in prompt
    assert "<think>\nLook it up.\n</think>" in prompt
    assert "<|im_start|>tool\n12 degrees<|im_end|>" in prompt
    assert '"description": "The weather of a city."' in prompt
    counted = await stack.post("/tokenize", **body)
    assert counted["tokens"] == list(stack.scheduler.requests[-1].prompt_token_ids)


@pytest.mark.parametrize("tokens_per_event", [1, 3, 100])
async def test_thinking(stack: Stack, tokens_per_event: int) -> None:
    """Thinking, answer and calls are separated; thinking appears under both names that clients know."""
    stack.scheduler.tokens_per_event = tokens_per_event
    stack.reply_with(f"<think>\nHm, <tool_call> is\na marker.\n</think>\n\nYes.\n{CALL}")
    for answer in (await collected(stack), (await streamed(stack))[0]):
        assert answer["message"]["reasoning_content"] == "Hm, <tool_call> is\na marker."
        assert answer["message"]["content"] == "Yes."
        assert functions(answer) == [("get_weather", '{"city": "Paris"}')]
    assert (await collected(stack))["message"]["reasoning"] == "Hm, <tool_call> is\na marker."
    hidden = (await collected(stack, include_reasoning=False))["message"]
    assert (hidden["reasoning"], hidden["content"]) == (None, "Yes.")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("limit", "reason"), [({"max_tokens": 5}, "length"), ({"stop": ["marker"]}, "stop")])
async def test_an_end_within_the_thinking(
    stack: Stack, stream: bool, limit: dict[str, Any], reason: str
) -> None:
    stack.reply_with("<think>\nI see a marker here and there.\n</think>\n\nYes.")
    answer = (await streamed(stack, **limit))[0] if stream else await collected(stack, **limit)
    assert answer["message"]["reasoning_content"]
    assert "I see a marker here and there.".startswith(answer["message"]["reasoning_content"])
    assert not answer["message"]["content"]
    assert answer["finish_reason"] == reason


def _deep(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "object"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"tools": [TIME] * 10_000}, "at most 128 tools"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": _deep(400)}}]}, "nested deeper"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "enum": [0] * 100_000}}}]},
            "more than 16384 values",
        ),
        ({"tools": [{"type": "function", "function": {"name": "f", "description": "x" * 1_000_000}}]}, "characters"),
        (
            {
                "messages": [
                    *ASK["messages"],
                    {"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": "[" * 7_000_000}}]},
                ]
            },
            "at most 1048576 characters",
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": "f"}}] * 10_000}]},
            "at most 128 calls",
        ),
    ],
)  # fmt: skip
async def test_hostile_requests_are_refused_fast(stack: Stack, body: dict[str, Any], words: str) -> None:
    """Sizes are checked before contents, so a refusal costs little CPU time."""
    content = json.dumps({**ASK, **body})
    began = time.process_time()
    response = await stack.http.post(PATH, content=content)
    assert time.process_time() - began < 2
    assert response.status_code == 400
    assert words in response.json()["error"]["message"]
    assert not stack.scheduler.requests


async def test_arguments_deeper_than_a_template_can_write(stack: Stack, plain: Stack) -> None:
    """A failing template is the client's error, whatever it does with the arguments."""
    call = {"id": "a", "function": {"name": "f", "arguments": '{"a":' * 1000 + "1" + "}" * 1000}}
    turns = [*ASK["messages"], {"role": "assistant", "tool_calls": [call]}, *ASK["messages"]]
    for one in (stack, plain):
        status, error = await one.refusal(PATH, messages=turns)
        assert (status, error["param"]) == (400, "messages")


async def test_a_parser_by_name(tmp_path: Path) -> None:
    """--tool-call-parser applies if a template shows no format."""
    text = 'Hm.</think>[TOOL_CALLS]get_weather{"city": "Paris"}'
    async with running_stack(text, tool_call_parser="mistral", reasoning_parser="deepseek_r1") as stack:
        answer = await collected(stack)
        assert answer["message"]["reasoning"] == "Hm."
        assert functions(answer) == [("get_weather", '{"city": "Paris"}')]


@pytest.mark.parametrize("tokens_per_event", [1, 3, 100])
@pytest.mark.parametrize(
    ("text", "content"),
    [
        (f"Let me look. {CALL} Done.", "Let me look.  Done."),
        (f"First.\n\n{CALL}\n\nThen.\n", "First.\n\n\n\nThen.\n"),
        (f"One {CALL}\n{CALL} two", "One \n two"),
        (f"One{CALL}two", "Onetwo"),
        (f"Look:\n{CALL}\n", "Look:"),
        (f"\n{CALL}\nDone.", "Done."),
        (f"<think>\nHm.\n</think>\n\nSo {CALL} yes.", "So  yes."),
        (f"<think>\nHm.\n</think>\n\n{CALL}\nyes.", "yes."),
        ('So <tool_call>\n{"name": 5} no', 'So <tool_call>\n{"name": 5} no'),
    ],
)
async def test_text_on_both_sides_of_a_call(
    stack: Stack, tokens_per_event: int, text: str, content: str
) -> None:
    """White space between two pieces of text stays as the model wrote it, streamed and collected alike."""
    stack.scheduler.tokens_per_event = tokens_per_event
    stack.reply_with(text)
    for answer in (await collected(stack), (await streamed(stack))[0]):
        assert answer["message"]["content"] == content


EMPTY: Any = {"type": "object", "properties": {}}


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "now"}}])
@pytest.mark.parametrize(
    "parameters",
    [
        ..., None, {}, {"type": "object", "properties": None}, {**EMPTY, "required": None, "additionalProperties": None},
        {**EMPTY, "additionalProperties": False, "$schema": "http://json-schema.org/draft-07/schema#"},
    ],
)  # fmt: skip
async def test_a_function_without_parameters_gets_an_empty_object(
    stack: Stack, plain: Stack, parameters: Any, choice: Any
) -> None:
    """The grammar leaves the model nothing else to write, in the model's own format and in the list."""
    function = {"name": "now", **({} if parameters is ... else {"parameters": parameters})}
    body = {"tools": [{"type": "function", "function": function}], "tool_choice": choice}
    own = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    general = "{}" if isinstance(choice, dict) else '[{"name": "now", "parameters": {}}]'
    for one, text in ((stack, own), (plain, general)):
        one.reply_with(text)
        assert functions(await collected(one, **body)) == [("now", "{}")]
        assert accepts(constraint_of(one), text)
        assert not accepts(constraint_of(one), text.replace("{}", '{"a": 1}'))


NULLS: Any = {
    "type": "object", "description": None, "required": None, "additionalProperties": None, "$defs": None,
    "properties": {
        "city": {"type": "string", "enum": None, "default": None, "properties": None, "items": None, "title": None},
        "any": None,
        "list": {"type": "array", "items": {"type": "object", "properties": None, "required": None}},
        "nothing": {"const": None},
    },
}  # fmt: skip


@pytest.mark.parametrize("choice", ["auto", "required"])
async def test_nulls_in_a_tool_count_as_absent(stack: Stack, choice: str) -> None:
    """MCP servers write null for keywords that they do not set; templates do not see them either."""
    clean = {
        "type": "object",
        "properties": {
            "city": {"type": "string", "default": None},
            "any": {},
            "list": {"type": "array", "items": {"type": "object"}},
            "nothing": {"const": None},
        },
    }
    stack.reply_with(CALL)
    for description in (None, ...):
        absent = {} if description is ... else {"description": None, "strict": None}
        given = {"name": "get_weather", "parameters": NULLS if absent else clean, **absent}
        answer = await collected(stack, tools=[{"type": "function", "function": given}], tool_choice=choice)
        assert functions(answer) == [("get_weather", '{"city": "Paris"}')]
    one, two = stack.scheduler.requests[-2:]
    assert one.prompt_token_ids == two.prompt_token_ids
    assert one.sampling.structured_output == two.sampling.structured_output


@pytest.mark.parametrize("choice", ["auto", "required", {"type": "custom", "custom": {"name": "run_sql"}}])
async def test_a_custom_tool_is_a_function_with_one_text(stack: Stack, choice: Any) -> None:
    """The model sees the tool's grammar and an earlier call; its call comes back as a function's."""
    grammar = {"type": "grammar", "grammar": {"syntax": "lark", "definition": "start: /SELECT .+/"}}
    tool = {
        "type": "custom", "custom": {"name": "run_sql", "description": "Runs SQL.", "format": grammar},
    }  # fmt: skip
    earlier = {"id": "c1", "type": "custom", "custom": {"name": "run_sql", "input": "SELECT 'é'"}}
    messages = [
        *ASK["messages"],
        {"role": "assistant", "content": None, "tool_calls": [earlier]},
        {"role": "tool", "tool_call_id": "c1", "content": "é"},
    ]
    arguments = '{"input": "SELECT 1"}'
    stack.reply_with(CALL.replace("get_weather", "run_sql").replace('{"city": "Paris"}', arguments))
    answer = await collected(stack, messages=messages, tools=[tool], tool_choice=choice)
    assert functions(answer) == [("run_sql", arguments)]
    assert all(words in stack.prompt for words in ("start: /SELECT .+/", "SELECT 'é'", "Runs SQL."))
