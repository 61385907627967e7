"""``/v1/messages`` with Anthropic's own client and its types: answers, streams, and errors in its form."""

import json
from typing import Any, TypeVar

import anthropic
import pytest
from anthropic.types import Message, MessageTokensCount, ModelInfo, RawMessageStreamEvent, ToolParam
from anthropic.types.shared import ErrorResponse
from pydantic import BaseModel, SecretStr, TypeAdapter

from gateway.messages_api.schemas import AnthropicErrorAnswer, MessageAnswer
from protos.errors import Internal, Overloaded, TimedOut, TriptychError, Unavailable
from tests.support.gateway.documented import check_answer, check_extras
from tests.support.gateway.serving import Stack, running_stack

pytestmark = [pytest.mark.contract, pytest.mark.asyncio(loop_scope="module")]

CITY: dict[str, object] = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER: ToolParam = {"name": "get_weather", "description": "The weather.", "input_schema": CITY}
ASK: dict[str, Any] = {
    "model": "smollm2",
    "max_tokens": 200,
    "messages": [{"role": "user", "content": "Weather in Paris?"}],
}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
PATH = "/v1/messages"
EVENTS: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
M = TypeVar("M", bound=BaseModel)
THOUGHT = "<think>\nLook it up.\n</think>\n\n"


def strict(kind: type[M], data: Any) -> M:
    """Returns ``data`` as the client's type; fails if a field is missing, unknown or of another type."""
    found = kind.model_validate_json(json.dumps(data), strict=True)
    check_extras(found)
    return found


def strict_error(data: dict[str, Any]) -> ErrorResponse:
    return strict(ErrorResponse, data)


async def collected(stack: Stack, **body: Any) -> dict[str, Any]:
    """Posts ``body`` and returns the message, which is as documented, too."""
    response = await stack.http.post(PATH, json=body)
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    strict(Message, found)
    check_answer(MessageAnswer, found)
    return found


async def streamed(stack: Stack, **body: Any) -> list[dict[str, Any]]:
    """Posts ``body`` and returns the events of the stream, each valid and under its own name."""
    events = []
    async with stack.http.stream("POST", PATH, json={**body, "stream": True}) as response:
        assert response.status_code == 200, await response.aread()
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        text = (await response.aread()).decode()
    for chunk in text.split("\n\n")[:-1]:
        name, _, data = chunk.partition("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        if event["type"] == "error":
            strict_error(event)
        elif event["type"] != "ping":
            check_extras(EVENTS.validate_json(json.dumps(event), strict=True))
        events.append(event)
    return events


def blocks_of(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the blocks that a stream adds up to; checks their order: one is open at a time."""
    blocks: list[dict[str, Any]] = []
    is_open = False
    for event in events:
        match event["type"]:
            case "content_block_start":
                assert (event["index"], is_open) == (len(blocks), False)
                blocks.append(dict(event["content_block"]))
                is_open = True
            case "content_block_delta":
                assert (event["index"], is_open) == (len(blocks) - 1, True)
                kind, block = event["delta"].pop("type"), blocks[-1]
                assert kind in ("text_delta", "thinking_delta", "signature_delta", "input_json_delta")
                ((name, piece),) = event["delta"].items()
                block[name] = block.get(name, "") + piece
            case "content_block_stop":
                assert (event["index"], is_open) == (len(blocks) - 1, True)
                is_open = False
    for block in blocks:
        if block["type"] == "tool_use":
            block["input"] = json.loads(block.pop("partial_json"))
    return blocks


async def test_a_message(stack: Stack) -> None:
    """A whole answer has its text, its end and its token counts; cached tokens are not input tokens."""
    stack.reply_with("It rains.")
    message = await collected(stack, **ASK)
    assert message.pop("id").startswith("msg_")
    prompt = len(stack.scheduler.requests[-1].prompt_token_ids)
    usage = message.pop("usage")
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == prompt
    assert (usage["cache_read_input_tokens"], usage["output_tokens"]) == (3, 4)
    assert message == {
        "type": "message", "role": "assistant", "model": "smollm2", "content": [{"type": "text", "text": "It rains."}],
        "stop_reason": "end_turn", "stop_sequence": None,
    }  # fmt: skip


@pytest.mark.parametrize("tokens_per_event", [1, 3, 100])
async def test_a_stream_adds_up_to_the_message(stack: Stack, tokens_per_event: int) -> None:
    """Thinking, text and calls are blocks one after another, the same as in a whole answer."""
    stack.reply_with(f"{THOUGHT}I ask.\n{CALL}\n{CALL.replace('Paris', 'Oslo')}")
    stack.scheduler.tokens_per_event = tokens_per_event
    message = await collected(stack, **ASK, tools=[WEATHER])
    events = await streamed(stack, **ASK, tools=[WEATHER])
    blocks = blocks_of(events)
    assert [block["type"] for block in blocks] == ["thinking", "text", "tool_use", "tool_use"]
    assert [event["type"] for event in events[:2]] == ["message_start", "ping"]
    assert [event["type"] for event in events[-3:]] == ["content_block_stop", "message_delta", "message_stop"]
    start, delta = events[0]["message"], events[-2]
    assert (start["content"], start["stop_reason"], start["usage"]["output_tokens"]) == ([], None, 0)
    assert (
        start["usage"]["input_tokens"] == delta["usage"]["input_tokens"] == message["usage"]["input_tokens"]
    )
    assert delta["usage"]["output_tokens"] == message["usage"]["output_tokens"]
    assert delta["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert message["stop_reason"] == "tool_use"
    for block in (*blocks, *message["content"]):
        block.pop("id", None)
        assert block.pop("signature", "signed")
    assert blocks == message["content"]
    assert blocks[0]["thinking"] == "Look it up."
    assert [block["input"] for block in blocks[2:]] == [{"city": "Paris"}, {"city": "Oslo"}]


async def test_a_last_turn_of_the_assistant_is_continued(stack: Stack) -> None:
    """The prompt ends where that turn ends, and the answer is what follows."""
    stack.reply_with(" Seine.")
    begun = [*ASK["messages"], {"role": "assistant", "content": "Paris lies on the"}]
    message = await collected(stack, **{**ASK, "messages": begun})
    assert message["content"] == [{"type": "text", "text": " Seine."}]
    assert stack.prompt.endswith("<|im_start|>assistant\nParis lies on the")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("text", "fields", "stop"),
    [
        ("It rains.", {}, ("end_turn", None)),
        ("It rains. Then", {"max_tokens": 3}, ("max_tokens", None)),
        ("One two three", {"stop_sequences": ["two", "six"]}, ("stop_sequence", "two")),
        (CALL, {"tools": [WEATHER]}, ("tool_use", None)),
        (
            CALL,
            {"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "get_weather"}},
            ("tool_use", None),
        ),
        (CALL, {"tools": [WEATHER], "stop_sequences": ["Paris"]}, ("stop_sequence", "Paris")),
        (CALL, {"tools": [WEATHER], "max_tokens": 20}, ("max_tokens", None)),
        ("", {}, ("end_turn", None)),
    ],
)
async def test_stop_reasons(
    stack: Stack, text: str, fields: dict[str, Any], stop: tuple[str, str | None], stream: bool
) -> None:
    """Each end has Anthropic's reason, streamed or not; a call that was cut short is none to run."""
    stack.reply_with(text)
    if stream:
        events = await streamed(stack, **{**ASK, **fields})
        end = events[-2]["delta"]
        assert sum(event["type"] == "content_block_stop" for event in events) == 1
    else:
        end = await collected(stack, **{**ASK, **fields})
        assert len(end["content"]) == 1
    assert (end["stop_reason"], end["stop_sequence"]) == stop


async def test_parameters_reach_the_scheduler(stack: Stack) -> None:
    await collected(
        stack, **ASK, temperature=0.5, top_p=0.9, top_k=7, priority=3, cache_salt="s",
        metadata={"user_id": "u"}, service_tier="auto",
    )  # fmt: skip
    request = stack.scheduler.requests[-1]
    sampling = request.sampling
    assert (sampling.max_tokens, sampling.top_k, request.priority, request.cache_salt) == (200, 7, 3, "s")
    assert (round(sampling.temperature, 3), round(sampling.top_p, 3)) == (0.5, 0.9)
    assert not sampling.HasField("structured_output")


class City(BaseModel):
    name: str


async def test_structured_outputs(stack: Stack, client: anthropic.AsyncAnthropic) -> None:
    """The client's ``parse`` and both forms of the schema constrain the text behind the thinking."""
    stack.reply_with('{"name": "Paris"}')
    parsed = await client.messages.parse(**ASK, output_format=City)
    assert parsed.parsed_output == City(name="Paris")
    form = {"type": "json_schema", "schema": City.model_json_schema()}
    await collected(stack, **ASK, output_config={"format": form, "effort": "low"})
    await collected(stack, **ASK, output_format=form)
    for request in stack.scheduler.requests[-2:]:
        assert '"name"' in request.sampling.structured_output.structural_tag


async def test_thinking_is_switched(stack: Stack) -> None:
    """``disabled`` tells the template and hides what the model thinks anyway; ``omitted`` hides the text."""
    stack.reply_with(f"{THOUGHT}It rains.")
    off = await collected(stack, **ASK, thinking={"type": "disabled"})
    without = stack.prompt
    on = await collected(stack, **ASK, thinking={"type": "enabled", "budget_tokens": 1024})
    assert without == f"{stack.prompt}<think>\n\n</think>\n\n"
    assert [block["type"] for block in off["content"]] == ["text"]
    assert [block["type"] for block in on["content"]] == ["thinking", "text"]
    hidden = {"type": "adaptive", "display": "omitted"}
    message = await collected(stack, **ASK, thinking=hidden)
    events = await streamed(stack, **ASK, thinking=hidden)
    for block in (message["content"][0], blocks_of(events)[0]):
        assert (block["type"], block["thinking"], len(block["signature"])) == ("thinking", "", 64)


async def test_server_tools_are_skipped(stack: Stack, client: anthropic.AsyncAnthropic) -> None:
    search: Any = {"type": "web_search_20250305", "name": "web_search", "max_uses": 3}
    stack.reply_with(CALL)
    answer = await client.messages.with_raw_response.create(**ASK, tools=[search, WEATHER, search])
    assert answer.headers["x-skipped-tools"] == "web_search_20250305"
    message: Message = await answer.parse()
    assert message.stop_reason == "tool_use"
    with pytest.raises(anthropic.BadRequestError, match="nothing to call"):
        await client.messages.create(**ASK, tools=[search], tool_choice={"type": "any"})


async def test_count_tokens(stack: Stack, client: anthropic.AsyncAnthropic) -> None:
    """The count is that of the prompt which the same request is."""
    fields = {"system": "Be brief.", "tools": [WEATHER], "thinking": {"type": "disabled"}}
    await collected(stack, **ASK, **fields)
    prompt = {name: value for name, value in ASK.items() if name != "max_tokens"}
    response = await stack.http.post(f"{PATH}/count_tokens", json={**prompt, **fields})
    counted = strict(MessageTokensCount, response.json()).input_tokens
    assert counted == len(stack.scheduler.requests[-1].prompt_token_ids)
    assert (await client.messages.count_tokens(**prompt, **fields)).input_tokens == counted  # type: ignore[arg-type]


async def test_models(stack: Stack, client: anthropic.AsyncAnthropic) -> None:
    """The client lists the model and its adapters, and finds each by name; others get OpenAI's list."""
    stack.scheduler.loras["sql"] = "/adapters/sql"
    headers = {"anthropic-version": "2023-06-01"}
    found = (await stack.http.get("/v1/models", headers=headers)).json()
    assert [strict(ModelInfo, model).id for model in found["data"]] == ["smollm2", "sql"]
    assert [model.id async for model in client.models.list()] == ["smollm2", "sql"]
    for name in ("smollm2", "sql"):
        model = await client.models.retrieve(name)
        assert (model.id, model.max_input_tokens, model.created_at.year) == (name, 512, 2023)
    assert (await stack.http.get("/v1/models")).json()["object"] == "list"


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "kind"),
    [
        ("POST", PATH, b"{", 400, "invalid_request_error"),
        ("POST", PATH, b'{"max_tokens": 5}', 400, "invalid_request_error"),
        ("POST", PATH, json.dumps({**ASK, "model": "other"}).encode(), 404, "not_found_error"),
        ("POST", PATH, json.dumps({**ASK, "max_tokens": 5000}).encode(), 400, "invalid_request_error"),
        ("POST", f"{PATH}/batches", b"{}", 404, "not_found_error"),
        ("GET", PATH, b"", 405, "not_found_error"),
        ("POST", f"{PATH}/count_tokens", b"{}", 400, "invalid_request_error"),
        ("POST", PATH, b"x" * 100_001, 413, "request_too_large"),
    ],
)
async def test_refusals(stack: Stack, method: str, path: str, body: bytes, status: int, kind: str) -> None:
    """The gateway's own refusals have a type, one line and the request's id."""
    stack.scheduler.loras.clear()
    response = await stack.http.request(method, path, content=body, headers={"x-request-id": "mine"})
    found = response.json()
    check_answer(AnthropicErrorAnswer, found)
    assert (response.status_code, found["error"].pop("type")) == (status, kind)
    assert found.pop("error").keys() == {"message"}
    assert found == {"type": "error", "request_id": "mine"}
    assert (response.headers["request-id"], response.headers["x-request-id"]) == ("mine", "mine")
    assert response.headers["x-should-retry"] == "false"


@pytest.mark.parametrize(
    ("error", "status", "kind", "raised"),
    [
        (Overloaded("full", retry_after_ms=3000), 429, "rate_limit_error", anthropic.RateLimitError),
        (Unavailable("no replica"), 529, "overloaded_error", anthropic.InternalServerError),
        (TimedOut("too slow"), 529, "overloaded_error", anthropic.InternalServerError),
        (Internal("a bug"), 500, "api_error", anthropic.InternalServerError),
    ],
)
async def test_failures_of_the_scheduler(
    stack: Stack,
    client: anthropic.AsyncAnthropic,
    error: TriptychError,
    status: int,
    kind: str,
    raised: type[anthropic.APIStatusError],
) -> None:
    """The client raises its own exception, and knows whether and when to retry."""
    stack.scheduler.refuse = lambda _: error
    for stream in (False, True):
        with pytest.raises(raised) as caught:
            await client.messages.create(**ASK, stream=stream)
        response = caught.value.response
        assert (response.status_code, caught.value.type) == (status, kind)
        assert (caught.value.api_message, caught.value.request_id) == (
            error.message,
            response.headers["x-request-id"],
        )
        strict_error(json.loads(response.text))
        assert ("retry-after" in response.headers) == error.retryable


async def test_a_stream_that_fails(stack: Stack, client: anthropic.AsyncAnthropic) -> None:
    """The last event is the error; the client raises it."""
    stack.reply_with("It rains. " * 20)
    stack.scheduler.pause_after = 3
    stream = await client.messages.create(**ASK, stream=True)
    seen = [await anext(stream), await anext(stream)]
    stack.gateway.client.fail_all(Unavailable("gone"))
    with pytest.raises(anthropic.APIStatusError) as caught:
        seen += [event async for event in stream]
    assert [event.type for event in seen[:2]] == ["message_start", "content_block_start"]
    assert "message_stop" not in {event.type for event in seen}
    body: Any = caught.value.body
    assert body["error"] == {"type": "overloaded_error", "message": "gone"}
    strict_error(body)


async def test_batches_are_not_served(client: anthropic.AsyncAnthropic) -> None:
    """Every call of the client about them is answered in one clear line."""
    batches = client.messages.batches
    for call in (
        batches.create(requests=[]), batches.retrieve("b"), batches.cancel("b"), batches.delete("b"),
        batches.list(),
    ):  # fmt: skip
        with pytest.raises(anthropic.NotFoundError, match="nothing is stored here; send each request"):
            await call


async def test_keys() -> None:
    """The client's key travels as X-Api-Key; without a right one, the refusal has Anthropic's form."""
    async with running_stack("x", api_key=(SecretStr("sk-a"),)) as stack:
        for key, kind in (("sk-a", None), ("sk-b", "authentication_error")):
            response = await stack.http.post(PATH, json=ASK, headers={"x-api-key": key})
            if kind is None:
                assert response.status_code == 200
            else:
                assert (response.status_code, strict_error(response.json()).error.type) == (401, kind)
