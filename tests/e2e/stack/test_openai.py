"""The official openai client against the real stack: supported requests, and refusals."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import openai
import pytest

from protos.triptych.v1 import inference_pb2 as inference
from protos.triptych.v1.inference_pb2_grpc import InferenceStub
from tests.support.stack import Stack

pytestmark = [pytest.mark.e2e, pytest.mark.stack, pytest.mark.timeout(240)]

QUESTION: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]
MODEL = "smollm2"


@pytest.fixture
def client(stack: Stack) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{stack.base_url}/v1", api_key="unused", max_retries=0, timeout=120) as made:
        yield made


@pytest.fixture
async def client_async(stack: Stack) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=f"{stack.base_url}/v1", api_key="unused", max_retries=0, timeout=120
    ) as made:
        yield made


async def until_idle(stack: Stack) -> None:
    """Waits until the scheduler has no requests."""
    async with stack.open_channel() as channel, asyncio.timeout(30):
        async for load in InferenceStub(channel).WatchLoad(inference.WatchLoadRequest()):
            if load.num_running == load.num_waiting == 0:
                return


def test_models(client: openai.OpenAI) -> None:
    """The served model is listed and can be fetched."""
    (model,) = client.models.list().data
    assert model.id == MODEL
    assert client.models.retrieve(MODEL).id == MODEL


def test_chat(client: openai.OpenAI) -> None:
    """A greedy chat names France's capital and counts its tokens."""
    answer = client.chat.completions.create(model=MODEL, messages=QUESTION, temperature=0, max_tokens=32)
    choice = answer.choices[0]
    assert "Paris" in (choice.message.content or "")
    assert choice.message.role == "assistant"
    assert choice.finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_streamed_deltas_add_up(client: openai.OpenAI) -> None:
    """Deltas add up to the collected answer, and so does the usage."""
    whole = client.chat.completions.create(model=MODEL, messages=QUESTION, temperature=0, max_tokens=32)
    chunks = list(
        client.chat.completions.create(
            model=MODEL,
            messages=QUESTION,
            temperature=0,
            max_tokens=32,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert whole.usage is not None
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert len(chunks) > 5


def test_completions(client: openai.OpenAI) -> None:
    """A greedy continuation is the same alone and among several prompts, from text and from token ids."""
    prompt = "The capital of France is"
    alone = client.completions.create(model=MODEL, prompt=prompt, temperature=0, max_tokens=8)
    assert alone.choices[0].text.startswith(" Paris")
    both = client.completions.create(
        model=MODEL, prompt=["Water boils at", prompt], temperature=0, max_tokens=8
    )
    assert [choice.index for choice in both.choices] == [0, 1]
    assert both.choices[1].text == alone.choices[0].text
    ids = httpx.post(str(client.base_url.join("/tokenize")), json={"prompt": prompt}).json()["tokens"]
    assert (
        client.completions.create(model=MODEL, prompt=ids, temperature=0, max_tokens=8).choices[0].text
        == alone.choices[0].text
    )


async def test_many_at_once(client_async: openai.AsyncOpenAI) -> None:
    """Sixteen streams of different lengths each get exactly their own tokens."""

    async def one(count: int) -> tuple[int, str]:
        stream = await client_async.completions.create(
            model=MODEL, prompt=f"Number {count} is", max_tokens=count, temperature=0, stream=True,
            stream_options={"include_usage": True}, extra_body={"ignore_eos": True},
        )  # fmt: skip
        used, text = 0, ""
        async for chunk in stream:
            text += chunk.choices[0].text if chunk.choices else ""
            used = chunk.usage.completion_tokens if chunk.usage else used
        return used, text

    results = await asyncio.gather(*(one(count) for count in range(1, 17)))
    assert [used for used, _ in results] == list(range(1, 17))
    assert all(text for _, text in results)


async def test_a_closed_stream_cancels_the_request(client_async: openai.AsyncOpenAI, stack: Stack) -> None:
    """A client that closes a stream ends its request at the scheduler."""
    stream = await client_async.completions.create(
        model=MODEL, prompt="Once", max_tokens=1500, stream=True, extra_body={"ignore_eos": True}
    )
    await anext(aiter(stream))
    await stream.close()
    await until_idle(stack)


def test_an_answer_follows_its_schema(client: openai.OpenAI) -> None:
    """Answers match OpenAI's response_format, streamed or not, and vLLM's structured_outputs."""
    schema = {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}, "population": {"type": "integer", "minimum": 0,
              "maximum": 99}}, "required": ["city", "population"]}  # fmt: skip
    wanted: Any = {"type": "json_schema", "json_schema": {"name": "city", "schema": schema, "strict": True}}
    answer = client.chat.completions.create(
        model=MODEL, messages=QUESTION, max_tokens=200, response_format=wanted, temperature=0.5, seed=1
    )
    assert answer.choices[0].finish_reason == "stop", answer.choices[0].message.content
    value = json.loads(answer.choices[0].message.content or "")
    assert value["city"] in {"Paris", "Rome"}
    assert 0 <= value["population"] <= 99
    stream = client.completions.create(
        model=MODEL,
        prompt="Well, ",
        max_tokens=20,
        stream=True,
        extra_body={"structured_outputs": {"choice": ["yes", "no"]}},
    )
    assert "".join(chunk.choices[0].text for chunk in stream) in {"yes", "no"}
    # No value of this schema fits into four tokens, whatever is sampled.
    cut = client.chat.completions.create(model=MODEL, messages=QUESTION, max_tokens=4, response_format=wanted)
    assert cut.choices[0].finish_reason == "length"


def test_a_call_that_must_be_made_fits_its_schema(client: openai.OpenAI) -> None:
    """A model that was never trained on calls still writes valid arguments, streamed or not."""
    parameters = {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"type": "integer", "minimum": 1,
                  "maximum": 9}}, "required": ["city", "days"], "additionalProperties": False}  # fmt: skip
    tools: Any = [{"type": "function", "function": {"name": "forecast", "parameters": parameters}}]
    chosen: Any = {
        "model": MODEL,
        "messages": QUESTION,
        "max_tokens": 200,
        "tools": tools,
        "temperature": 0.5,
        "seed": 1,
    }
    choices: Any = ("required", {"type": "function", "function": {"name": "forecast"}})
    for choice in choices:
        answer: Any = client.chat.completions.create(**chosen, tool_choice=choice, parallel_tool_calls=False)
        (call,) = answer.choices[0].message.tool_calls
        assert call.type == "function"
        arguments = json.loads(call.function.arguments)
        assert call.function.name == "forecast"
        assert arguments["city"] in {"Paris", "Rome"}
        assert 1 <= arguments["days"] <= 9
        stream: Any = client.chat.completions.create(
            **chosen, tool_choice=choice, parallel_tool_calls=False, stream=True
        )
        streamed = "".join(
            call.function.arguments or ""
            for chunk in stream
            for call in chunk.choices[0].delta.tool_calls or ()
            if call.function is not None
        )
        assert json.loads(streamed) == arguments


def test_a_schema_elsewhere_is_refused_and_never_fetched(stack: Stack) -> None:
    """Every field that takes a schema answers 400 with the reference, and nobody connects to its host."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        host = f"127.0.0.1:{listener.getsockname()[1]}"
        for reference in (f"http://{host}/s.json", "file:///etc/hostname"):
            schema = {"type": "object", "properties": {"a": {"$ref": reference}}}
            function = {"name": "f", "parameters": schema}
            tool = {"type": "function", "function": function}
            formats = {"type": "json_schema", "name": "n", "schema": schema}
            bodies: list[tuple[str, dict[str, Any]]] = [
                ("chat/completions", {"response_format": {"type": "json_schema", "json_schema": formats}}),
                ("chat/completions", {"structured_outputs": {"json": schema}}),
                ("chat/completions", {"structured_outputs": {"json": json.dumps({"$defs": {"x": schema}})}}),
                ("chat/completions", {"tools": [tool]}),
                ("chat/completions", {"tools": [tool], "tool_choice": "required"}),
                ("responses", {"text": {"format": formats}}),
                ("responses", {"tools": [{"type": "function", **function}]}),
                ("messages", {"tools": [{"name": "f", "input_schema": schema}]}),
            ]
            for path, fields in bodies:
                text = {"input": "Hi", "max_output_tokens": 4}
                if path != "responses":
                    text = {"messages": QUESTION, "max_tokens": 4}
                answer = httpx.post(f"{stack.base_url}/v1/{path}", json={"model": MODEL, **text, **fields})
                assert answer.status_code == 400, (path, fields, answer.text)
                assert "never fetched" in answer.text
        listener.setblocking(False)
        with pytest.raises(BlockingIOError):
            listener.accept()
