"""The Responses API, as OpenAI's client sees it: its own types read every body and every event strictly."""

import json
from typing import Any

import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from openai.types.responses.input_token_count_response import InputTokenCountResponse
from pydantic import BaseModel, TypeAdapter

from gateway.responses_api.schemas import InputTokens, ResponseAnswer
from protos.errors import Unavailable
from tests.support.gateway.documented import check_answer, check_extras
from tests.support.gateway.serving import Stack, tokenizer_of
from tests.support.gateway.tool_templates import TIME, WEATHER

pytestmark = [pytest.mark.contract, pytest.mark.asyncio(loop_scope="module")]

PATH = "/v1/responses"
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
TOOLS: Any = [{"type": "function", **tool["function"]} for tool in (WEATHER, TIME)]
NAMESPACE: Any = {"type": "namespace", "name": "mcp", "description": "Weather.", "tools": TOOLS}
FULL = f"<think>\nLet me see.\n</think>\n\nI ask.\n{CALL}\n{CALL}"
EVENTS: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
MESSAGE = ["output_item.added", "content_part.added", "output_text.delta", "output_text.done"]
# OpenAI's answers have it, which the client's types do not know.
STORE = "store"
CLOSED = ["content_part.done", "output_item.done"]
CALLED = [
    "output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done",
]  # fmt: skip
THOUGHT = ["output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.done", *CLOSED]


async def create(stack: Stack, **body: Any) -> Any:
    """Returns a collected response, checked against the client's types and our own document."""
    answer = await stack.post(PATH, **{"input": "hi", **body})
    check_answer(ResponseAnswer, answer)
    response = Response.model_validate(answer, strict=True)
    check_extras(response, STORE)
    return response


async def stream(stack: Stack, **body: Any) -> list[Any]:
    """Returns the events of a stream; checks their types, their numbers and their framing."""
    events = []
    answer = await stack.http.post(PATH, json={"input": "hi", **body, "stream": True})
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    blocks = answer.text.split("\n\n")
    assert blocks.pop() == ""
    for number, block in enumerate(blocks):
        name, data = block.split("\n")
        fields = json.loads(data.removeprefix("data: "))
        event = EVENTS.validate_python(fields, strict=True)
        assert (name, event.sequence_number) == (f"event: {event.type}", number)
        check_extras(event, STORE)
        if response := fields.get("response"):
            check_answer(ResponseAnswer, response)
        events.append(event)
    return events


def kinds(events: list[Any]) -> list[str]:
    """Returns the types of events without their common prefix; neighbours that are equal count once."""
    names = [event.type.removeprefix("response.") for event in events]
    return [name for before, name in zip(["", *names], names, strict=False) if name != before]


def essence(items: list[Any]) -> list[tuple[str, str, str]]:
    """Returns the type, status and text of each item."""
    found = []
    for item in items:
        text = item.arguments if item.type == "function_call" else item.content[0].text
        found.append((item.type, item.status, text))
    return found


async def test_a_text_is_answered(stack: Stack, client: openai.AsyncOpenAI) -> None:
    """The client finds text, usage and what the request said; nothing is stored."""
    stack.reply_with("Paris is nice.")
    response = await client.responses.create(
        model="smollm2", input="Where?", instructions="Be brief.", metadata={"a": "b"}, store=True, user="u",
        prompt_cache_key="k", safety_identifier="s", service_tier="flex", temperature=0.5, top_p=0.9,
        max_output_tokens=50, truncation="auto", include=["reasoning.encrypted_content"],
        reasoning={"effort": "low", "summary": "auto"}, text={"verbosity": "low"},
    )  # fmt: skip
    assert response.output_text == "Paris is nice."
    assert (response.status, response.error, response.incomplete_details) == ("completed", None, None)
    assert (response.id[:5], response.object, response.metadata) == ("resp_", "response", {"a": "b"})
    assert (response.instructions, response.temperature, response.top_p) == ("Be brief.", 0.5, 0.9)
    assert response.model_extra == {"store": False}
    assert (response.service_tier, response.truncation, response.user) == ("default", "auto", "u")
    assert response.reasoning is not None
    assert response.reasoning.effort == "low"
    sent = stack.scheduler.requests[-1]
    assert sent.sampling.max_tokens == 50
    usage = response.usage
    assert usage is not None
    assert usage.input_tokens == len(sent.prompt_token_ids)
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens


async def test_a_stream_has_every_event_in_order(stack: Stack) -> None:
    """Thinking, text and two calls; each item opens, grows and closes before the next one."""
    stack.reply_with(FULL)
    events = await stream(stack, tools=TOOLS)
    assert kinds(events) == [
        "created", "in_progress", *THOUGHT, *MESSAGE, *CLOSED, *CALLED, *CALLED, "completed",
    ]  # fmt: skip
    last = events[-1].response
    assert essence(last.output) == [
        ("reasoning", "completed", "Let me see."),
        ("message", "completed", "I ask."),
        ("function_call", "completed", '{"city": "Paris"}'),
        ("function_call", "completed", '{"city": "Paris"}'),
    ]
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert done == last.output, "items end as the whole response shows them"
    added = [event.item for event in events if event.type == "response.output_item.added"]
    assert [(item.id, item.status) for item in added] == [(item.id, "in_progress") for item in done]
    for item in last.output:
        deltas = [e.delta for e in events if e.type.endswith(".delta") and e.item_id == item.id]
        assert "".join(deltas) == essence([item])[0][2]
    assert (last.usage.output_tokens, events[0].response.usage) == (len(stack.scheduler.reply), None)


async def test_a_collected_response_has_the_same_items(stack: Stack) -> None:
    stack.reply_with(FULL)
    whole = await create(stack, tools=TOOLS)
    streamed = (await stream(stack, tools=TOOLS))[-1].response
    assert essence(whole.output) == essence(streamed.output)
    assert whole.usage == streamed.usage
    thinking = (
        tokenizer_of(stack.scheduler.folder).encode(FULL.partition("\n\n")[0], add_special_tokens=False).ids
    )
    assert whole.usage.output_tokens_details.reasoning_tokens == len(thinking)
    assert [tool.name for tool in whole.tools] == ["get_weather", "get_time"]


async def test_an_answer_cut_at_its_limit_is_incomplete(stack: Stack) -> None:
    """The last item is, too; streamed and collected alike."""
    stack.reply_with("one two three four five six")
    whole = await create(stack, max_output_tokens=3)
    events = await stream(stack, max_output_tokens=3)
    assert kinds(events) == ["created", "in_progress", *MESSAGE, *CLOSED, "incomplete"]
    for response in (whole, events[-1].response):
        assert response.status == "incomplete"
        assert response.incomplete_details.reason == "max_output_tokens"
        assert response.output[-1].status == "incomplete"


async def test_an_empty_answer_has_an_empty_message(stack: Stack) -> None:
    stack.reply_with("")
    events = await stream(stack)
    assert kinds(events) == ["created", "in_progress", *MESSAGE[:2], MESSAGE[3], *CLOSED, "completed"]
    assert essence((await create(stack)).output) == [("message", "completed", "")]


async def test_log_probabilities_belong_to_the_message(stack: Stack) -> None:
    """Those of thinking are not reported; the deltas, the end and a collected answer agree."""
    stack.reply_with("<think>\na\n</think>\n\nParis is nice.")
    asked: dict[str, Any] = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    events = await stream(stack, **asked)
    deltas = [entry for e in events if e.type == "response.output_text.delta" for entry in e.logprobs]
    (done,) = [e for e in events if e.type == "response.output_text.done"]
    message = events[-1].response.output[1].content[0]
    whole = (await create(stack, **asked)).output[1].content[0]
    assert [entry.model_dump() for entry in deltas] == [entry.model_dump() for entry in done.logprobs]
    assert [entry.token for entry in deltas] == [entry.token for entry in message.logprobs]
    assert message.logprobs == whole.logprobs
    text = "".join(entry.token for entry in deltas)
    assert text.partition("</think>")[2].strip() == "Paris is nice.<|im_end|>"
    assert all(len(entry.top_logprobs) == 2 for entry in deltas)
    plain = (await create(stack)).output[1].content[0]
    assert plain.logprobs == []


async def test_a_conversation_goes_on_with_the_items_of_the_answer(
    stack: Stack, client: openai.AsyncOpenAI
) -> None:
    """Thinking, text and calls go back as the client has them, with the calls' results."""
    stack.reply_with(FULL)
    first = await client.responses.create(model="smollm2", input="Weather?", tools=TOOLS)
    stack.reply_with("Sunny.")
    results = [
        {"type": "function_call_output", "call_id": item.call_id, "output": "sunny"}
        for item in first.output
        if item.type == "function_call"
    ]
    for output in (first.output, [item.model_dump() for item in first.output]):
        items: Any = [{"role": "user", "content": "Weather?"}, *output, *results]
        second = await client.responses.create(model="smollm2", input=items, tools=TOOLS)
        assert second.output_text == "Sunny."
        assert f"assistant\n<think>\nLet me see.\n</think>\n\nI ask.{CALL}{CALL}<|im_end|>" in stack.prompt
        assert stack.prompt.count("<|im_start|>tool\nsunny<|im_end|>") == 2


@pytest.mark.parametrize(
    ("body", "end"),
    [
        ({"reasoning": {"effort": "none"}}, "<|im_start|>assistant\n<think>\n\n</think>\n\n"),
        ({"reasoning": {"effort": "high"}}, "<|im_start|>assistant\n"),
        ({"input": [{"role": "assistant", "content": "Par", "status": "incomplete"}]}, "assistant\nPar"),
    ],
)
async def test_the_prompt_ends_as_the_request_says(stack: Stack, body: dict[str, Any], end: str) -> None:
    """With thinking switched on or off, or within a message that was cut."""
    stack.reply_with("ok")
    await create(stack, **body)
    assert stack.prompt.endswith(end)


async def test_a_structured_answer(stack: Stack, client: openai.AsyncOpenAI) -> None:
    """The client's parser sends a schema, which the scheduler gets, and reads the answer."""

    class City(BaseModel):
        name: str

    stack.reply_with('{"name": "Paris"}')
    response = await client.responses.parse(model="smollm2", input="Where?", text_format=City)
    assert response.output_parsed == City(name="Paris")
    constraint = stack.scheduler.requests[-1].sampling.structured_output
    assert "Paris" not in constraint.structural_tag
    assert "json_schema" in constraint.structural_tag


async def test_tools_that_are_no_functions_are_skipped(stack: Stack) -> None:
    """A header names each type once; the model sees the functions, and the answer repeats only these."""
    stack.reply_with("ok")
    hosted = [{"type": "web_search"}, {"type": "mcp", "server_label": "x"}, {"type": "web_search"}]
    answer = await stack.http.post(PATH, json={"input": "hi", "tools": [*hosted, TOOLS[0]]})
    assert answer.headers["x-skipped-tools"] == "web_search, mcp"
    assert [tool["name"] for tool in answer.json()["tools"]] == ["get_weather"]
    many = [{"type": f"{'x' * 50}_{number}"} for number in range(128)]
    bounded = (await stack.http.post(PATH, json={"input": "hi", "tools": many})).headers["x-skipped-tools"]
    assert (len(bounded) < 1000, bounded.rpartition(", ")[2]) == (True, "and 112 more")
    assert "x-skipped-tools" not in (await stack.http.post(PATH, json={"input": "hi"})).headers


@pytest.mark.parametrize(
    ("choice", "shown"),
    [
        ("required", ["get_weather", "get_time"]),
        ({"type": "function", "name": "get_weather"}, ["get_weather"]),
        (
            {
                "type": "allowed_tools",
                "mode": "required",
                "tools": [{"type": "function", "name": "get_weather"}],
            },
            ["get_weather"],
        ),
    ],
)
async def test_a_required_call_is_constrained(stack: Stack, choice: Any, shown: list[str]) -> None:
    """The grammar has the functions that the choice allows; the answer repeats the choice."""
    stack.reply_with(CALL)
    response = await create(stack, tools=TOOLS, tool_choice=choice)
    assert [item.type for item in response.output] == ["function_call"]
    tag = stack.scheduler.requests[-1].sampling.structured_output.structural_tag
    assert [name for name in ("get_weather", "get_time") if name in tag] == shown
    found = response.tool_choice
    assert (found.model_dump() if isinstance(found, BaseModel) else found) == choice


async def test_an_error_in_mid_stream(stack: Stack) -> None:
    """The stream ends with the error and the response that failed, with what it had."""
    stack.reply_with("one two three four five")
    stack.scheduler.pause_after = 3
    async with stack.http.stream("POST", PATH, json={"input": "hi", "stream": True}) as response:
        lines = response.aiter_lines()
        async for line in lines:
            if "output_text.delta" in line:
                break
        stack.gateway.client.fail_all(Unavailable("lost for good"))
        rest = [json.loads(line[6:]) async for line in lines if line.startswith("data: ")]
    error, failed = (EVENTS.validate_python(event, strict=True) for event in rest[-2:])
    check_extras([error, failed], STORE)
    assert (error.type, error.code, error.message) == ("error", "service_unavailable", "lost for good")
    assert failed.response.status == "failed"
    assert (failed.response.error.code, failed.response.error.message) == ("server_error", "lost for good")
    assert failed.response.output[0].status == "incomplete"


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id", "send the earlier items in 'input'"),
        ({"conversation": "conv_1"}, "conversation", "nothing is stored"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt", "nothing is stored"),
        ({"background": True}, "background", "runs in the background"),
        ({"n": 2}, "n", "is not supported"),
        ({"max_tokens": 2}, "max_tokens", "max_output_tokens"),
        ({"messages": []}, "messages", "send 'input'"),
        ({"response_format": {"type": "json_object"}}, "response_format", "text.format"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]", "with store=false"),
        ({"input": [{"id": "msg_1"}]}, "input[0]", "send the item itself"),
        ({"input": [{"type": "made_up", "id": "x"}]}, "input[0]", "made_up"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input[0].content",
            '"input_image"',
        ),
        ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role", "'user'"),
        ({"input": []}, "input", "at least 1 item"),
        ({"input": 5}, "input", "a string or a list of items"),
        ({"tools": [{"type": "function"}]}, "tools[0].name", "required"),
        ({"tools": [TOOLS[0], TOOLS[0]]}, "tools", "two tools"),
        ({"tools": [{**NAMESPACE, "tools": [TOOLS[0], TOOLS[0]]}]}, "tools", "two tools"),
        ({"tools": [{**NAMESPACE, "tools": [{"type": "function"}]}]}, "tools[0].tools[0].name", "required"),
        ({"tools": [NAMESPACE, {**TOOLS[0], "name": "mcp__get_time"}]}, "tools", "two tools"),
        (
            {"tools": [{**NAMESPACE, "tools": [{**TOOLS[0], "name": f"f{i}"} for i in range(129)]}]},
            "tools",
            "at most 128 functions",
        ),
        ({"tool_choice": "required"}, "tool_choice", "no function"),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice", "skipped"),
        ({"tool_choice": {"type": "function", "name": "x"}}, "tool_choice", "not among"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format", "schema must be given"),
        ({"text": {"format": {"type": "json_schema", "schema": True}}}, "text.format.schema", "JSON object"),
        ({"input": "word " * 600}, "input", "context"),
        ({"metadata": {"a": "b" * 600}}, "metadata", "512"),
    ],
)
async def test_refusals_name_the_parameter(
    stack: Stack, body: dict[str, Any], param: str, words: str
) -> None:
    status, error = await stack.refusal(PATH, **{"input": "hi", **body})
    assert (status, error["param"]) == (400, param), error
    assert words in error["message"]


async def test_stored_responses_do_not_exist(client: openai.AsyncOpenAI) -> None:
    for call in (
        client.responses.retrieve("resp_1"),
        client.responses.delete("resp_1"),
        client.responses.cancel("resp_1"),
        client.responses.input_items.list("resp_1"),
    ):
        with pytest.raises(openai.NotFoundError, match="responses are not stored here"):
            await call
    with pytest.raises(openai.NotFoundError, match="compact is not served: a compacted conversation"):
        await client.responses.compact(model="smollm2", input="hi")


async def test_input_tokens_are_counted(stack: Stack, client: openai.AsyncOpenAI) -> None:
    """The count is that of the prompt which the same request is."""
    body: dict[str, Any] = {"model": "smollm2", "input": "hi", "instructions": "Be brief.", "tools": TOOLS}
    await client.responses.create(**body)
    answer = await stack.http.post(f"{PATH}/input_tokens", json={**body, "personality": "friendly"})
    check_answer(InputTokens, answer.json())
    counted = InputTokenCountResponse.model_validate(answer.json(), strict=True)
    assert counted.input_tokens == len(stack.scheduler.requests[-1].prompt_token_ids)
    assert (await client.responses.input_tokens.count(**body)).input_tokens == counted.input_tokens
