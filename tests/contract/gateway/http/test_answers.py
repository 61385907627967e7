"""Answers as OpenAI's types and the OpenAPI document describe them, no field more or less."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.completion import Completion
from openai.types.model import Model
from pydantic import BaseModel

from gateway.http.errors import ErrorAnswer
from gateway.openai import answers
from gateway.openai.answers import ChatChunk
from gateway.openai.models import ModelCard, ModelList
from gateway.operations.routes import Version
from gateway.operations.tokenize import Detokenized, Tokenized
from tests.support.gateway.documented import check_answer, resolved
from tests.support.gateway.serving import CHAT, TEXT, Stack, running_stack
from tests.support.gateway.tool_templates import WEATHER

pytestmark = [pytest.mark.contract, pytest.mark.asyncio(loop_scope="module")]


async def test_chat(stack: Stack) -> None:
    """A chat answer has OpenAI's shape, and the prompt went through the model's template."""
    response = await stack.http.post("/v1/chat/completions", json={**CHAT, "model": "smollm2"})
    assert response.status_code == 200
    body = response.json()
    assert body.pop("id").startswith("chatcmpl-")
    assert body.pop("created") > 1_700_000_000
    assert body.pop("system_fingerprint").startswith("fp_")
    prompt_tokens = len(stack.scheduler.requests[0].prompt_token_ids)
    assert body == {
        "object": "chat.completion",
        "model": "smollm2",
        "choices": [{
            "index": 0, "message": {"role": "assistant", "content": TEXT, "refusal": None},
            "logprobs": None, "finish_reason": "stop", "stop_reason": None,
        }],
        "usage": {
            "prompt_tokens": prompt_tokens, "completion_tokens": len(stack.scheduler.reply),
            "total_tokens": prompt_tokens + len(stack.scheduler.reply), "prompt_tokens_details": {"cached_tokens": 3},
            "completion_tokens_details": {"reasoning_tokens": 0},
        },
        "service_tier": "default",
    }  # fmt: skip
    assert list(stack.scheduler.requests[0].prompt_token_ids)[:1] == [1]
    assert not stack.scheduler.requests[0].sampling.HasField("max_tokens")


async def test_completion(stack: Stack) -> None:
    """A plain completion stops after 16 tokens by default."""
    body = (await stack.http.post("/v1/completions", json={"prompt": "The capital"})).json()
    assert body["object"] == "text_completion"
    assert body["id"].startswith("cmpl-")
    (choice,) = body["choices"]
    assert TEXT.startswith(choice["text"])
    assert (choice["finish_reason"], body["usage"]["completion_tokens"]) == (
        "stop" if len(stack.scheduler.reply) <= 16 else "length",
        min(16, len(stack.scheduler.reply)),
    )


async def test_chat_stream(stack: Stack) -> None:
    """A stream has role, deltas, reason, usage and end, as OpenAI sends them."""
    events = await stack.stream("/v1/chat/completions", {**CHAT, "stream_options": {"include_usage": True}})
    assert events.pop() == "[DONE]"
    usage = events.pop()
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == len(stack.scheduler.reply)
    deltas = [event["choices"][0]["delta"] for event in events]
    assert deltas[0] == {"role": "assistant", "content": "", "refusal": None}
    assert "".join(delta["content"] for delta in deltas[1:-1]) == TEXT
    assert len(deltas) > 5
    assert deltas[-1] == {}
    assert [event["choices"][0]["finish_reason"] for event in events] == [None] * (len(events) - 1) + ["stop"]
    assert all(event["usage"] is None for event in events)
    assert len({(event["id"], event["created"], event["model"]) for event in [*events, usage]}) == 1


async def test_usage_in_chunks(stack: Stack) -> None:
    """By default no chunk has usage; with continuous_usage_stats, each counts the tokens so far."""
    events = await stack.stream("/v1/completions", {"prompt": "x"})
    assert all("usage" not in event for event in events[:-1])
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"prompt": "x", "max_tokens": 5, "stream_options": options}
    counts = [
        event["usage"]["completion_tokens"] for event in (await stack.stream("/v1/completions", body))[:-1]
    ]
    assert counts == sorted(counts)
    assert (counts[0] < 5, counts[-1]) == (True, 5)


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("tokens_per_event", [1, 3, 100])
@pytest.mark.parametrize(("stop", "include", "text"), [
    (" of Fr", False, "Paris is the capital"), (" of Fr", True, "Paris is the capital of Fr"),
    (["zzz", "."], False, "Paris is the capital of France"), ("Paris", False, ""),
])  # fmt: skip
async def test_stop_strings(
    stack: Stack, streamed: bool, tokens_per_event: int, stop: Any, include: bool, text: str
) -> None:
    """A stop string, even inside a token, ends the text, the count and the request."""
    stack.scheduler.tokens_per_event, stack.scheduler.pause_after = tokens_per_event, 12
    body = {"prompt": "x", "max_tokens": 100, "stop": stop, "include_stop_str_in_output": include}
    if streamed:
        events = await stack.stream("/v1/completions", {**body, "stream_options": {"include_usage": True}})
        found = "".join(event["choices"][0]["text"] for event in events[:-2])
        choice, usage = events[-3]["choices"][0], events[-2]["usage"]
    else:
        answer = (await stack.http.post("/v1/completions", json=body)).json()
        choice, usage = answer["choices"][0], answer["usage"]
        found = choice["text"]
    assert found == text
    assert choice["finish_reason"] == "stop"
    assert choice["stop_reason"] == (stop if isinstance(stop, str) else ".")
    assert usage["completion_tokens"] <= 7
    await stack.scheduler.until(lambda: bool(stack.scheduler.aborted) or tokens_per_event == 100)


CHATS = "/v1/chat/completions"
CALL = '\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
PROMPT = {"prompt": "The capital", "max_tokens": 3}
LOGPROBS = {"logprobs": True, "top_logprobs": 2}

# What vLLM adds, too.
VLLM = {
    "stop_reason", "prompt_logprobs", "reasoning", "reasoning_content", "root", "parent", "max_model_len",
    "token_ids", "prompt_token_ids",
}  # fmt: skip
# By the client's type of an answer: ours of the answer and of its chunks.
DOCUMENTED: dict[Any, tuple[Any, Any]] = {
    ChatCompletion: (answers.ChatCompletion, answers.ChatChunk),
    Completion: (answers.Completion, answers.CompletionChunk),
}


def checked(model: type[BaseModel], answer: Any) -> None:
    model.model_validate(without(answer, VLLM), strict=True, extra="forbid")


def without(value: Any, names: set[str]) -> Any:
    if isinstance(value, list):
        return [without(item, names) for item in value]
    if not isinstance(value, dict):
        return value
    return {name: without(item, names) for name, item in value.items() if name not in names}


@pytest.mark.parametrize(
    ("path", "body", "model", "chunk"),
    [
        ("/v1/chat/completions", CHAT, ChatCompletion, ChatCompletionChunk),
        ("/v1/chat/completions", {**CHAT, **LOGPROBS, "n": 2}, ChatCompletion, ChatCompletionChunk),
        ("/v1/completions", PROMPT, Completion, Completion),
        ("/v1/completions", {**PROMPT, "logprobs": 2}, Completion, Completion),
        ("/v1/completions", {**PROMPT, "prompt": ["a", "b c"], "n": 2}, Completion, Completion),
        ("/v1/completions", {**PROMPT, "prompt": [[5, 6], [7]], "logprobs": 1}, Completion, Completion),
    ],
)
async def test_answers_and_chunks_fit_the_clients_types(
    stack: Stack, path: str, body: dict[str, Any], model: type[BaseModel], chunk: type[BaseModel]
) -> None:
    """The last chunks and the collected answer name the same fingerprint and tier."""
    answer = await stack.post(path, **body)
    checked(model, answer)
    check_answer(DOCUMENTED[model][0], answer)
    assert answer["system_fingerprint"].startswith("fp_")
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}
    options = {"include_usage": True, "include_obfuscation": True}
    *chunks, done = await stack.stream(path, {**body, "stream_options": options, "return_token_ids": True})
    assert done == "[DONE]"
    for each in chunks:
        check_answer(DOCUMENTED[model][1], each)
        checked(chunk, as_declared(each) if chunk is Completion else each)
    ends = [each for each in chunks if any(one["finish_reason"] for one in each["choices"])] + chunks[-1:]
    assert {each["system_fingerprint"] for each in ends} == {answer["system_fingerprint"]}
    assert {each.get("service_tier") for each in ends} == {answer.get("service_tier")}
    assert chunks[-1]["usage"] == answer["usage"]


def as_declared(chunk: dict[str, Any]) -> dict[str, Any]:
    """Returns a completion's chunk as the client's type has it.

    OpenAI streams null before the reason is known, too, which its own type does not say.
    """
    choices = [{**one, "finish_reason": one["finish_reason"] or "stop"} for one in chunk["choices"]]
    return {**chunk, "choices": choices}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def thinking(qwen_folder: Path) -> AsyncIterator[Stack]:
    """A model that thinks, calls a tool twice, and says something."""
    text = f"<think>\nHm.\n</think>\n\nI look.{CALL}{CALL}"
    async with running_stack(text, folder=qwen_folder) as stack:
        yield stack


async def test_thinking_and_calls_fit_the_clients_types(thinking: Stack) -> None:
    body = {**CHAT, "tools": [WEATHER], **LOGPROBS}
    answer = (await thinking.http.post(CHATS, json=body)).json()
    checked(ChatCompletion, answer)
    (choice,) = answer["choices"]
    assert (choice["finish_reason"], len(choice["message"]["tool_calls"])) == ("tool_calls", 2)
    assert choice["message"]["reasoning"].strip() == "Hm."
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0
    *chunks, _ = await thinking.stream(CHATS, {**body, "stream_options": {"include_usage": True}})
    for each in chunks:
        checked(ChatCompletionChunk, each)
        check_answer(ChatChunk, each)
    assert chunks[-1]["usage"] == answer["usage"]


async def test_models_fit_the_clients_type(stack: Stack) -> None:
    for card in (await stack.http.get("/v1/models")).json()["data"]:
        checked(Model, card)


WITH_FIELDS = {"properties", "additionalProperties", "anyOf", "oneOf"}
BODILESS = {"/ping", "/reset_prefix_cache", "/reset_mm_cache", "/reset_encoder_cache"}


def described(document: dict[str, Any], answer: dict[str, Any]) -> bool:
    """Returns whether the answer has a schema with fields, or is a text."""
    content = answer.get("content", {})
    for schema in (one.get("schema", {}) for one in content.values()):
        found = schema
        if "$ref" in found:
            found = document["components"]["schemas"][found["$ref"].rpartition("/")[2]]
        if not (WITH_FIELDS & found.keys() or found.get("type") == "string"):
            return False
    return bool(content)


async def test_every_route_is_described(stack: Stack) -> None:
    """Each route has a summary, a description, its answer, and the shape of errors."""
    listed = {
        route.path.replace(":path}", "}")
        for route in stack.gateway.app.routes
        if getattr(route, "include_in_schema", False)
    }
    assert listed == stack.gateway.app.openapi()["paths"].keys()
    document = (await stack.http.get("/openapi.json")).json()
    assert document == stack.gateway.app.openapi()
    for path, methods in document["paths"].items():
        for method, route in methods.items():
            assert route["summary"], path
            assert route["description"], path
            assert {"200", "default"} == route["responses"].keys(), path
            answer = route["responses"]["200"]
            assert described(document, answer) or "The body is empty." in answer["description"], path
            if method == "post" and path not in BODILESS:
                schema = resolved(route["requestBody"]["content"]["application/json"]["schema"], document)
                assert schema["properties"], path


async def test_the_document_names_the_parameters(stack: Stack) -> None:
    """The bodies list what is served, and the events of streams what they have."""
    document = (await stack.http.get("/openapi.json")).json()

    def properties(path: str) -> dict[str, Any]:
        schema = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        return dict(resolved(schema, document)["properties"])

    assert {"messages", "temperature", "stream"} <= properties("/v1/chat/completions").keys()
    responses = properties("/v1/responses")
    assert {"input", "temperature", "stream"} <= responses.keys()
    assert not {"n", "max_tokens"} & responses.keys(), "inherited parameters that are refused"
    for path, event in (
        ("/v1/chat/completions", answers.ChatChunk),
        ("/v1/completions", answers.CompletionChunk),
    ):
        schema = document["paths"][path]["post"]["responses"]["200"]["content"]["text/event-stream"]["schema"]
        assert schema["contentSchema"]["properties"].keys() == event.__annotations__.keys()


@pytest.mark.parametrize(
    ("path", "body", "model"),
    [
        ("/v1/chat/completions", {**CHAT, **LOGPROBS, "prompt_logprobs": 1}, answers.ChatCompletion),
        (
            "/v1/completions",
            {**PROMPT, "logprobs": 2, "prompt_logprobs": 1, "echo": True},
            answers.Completion,
        ),
        ("/tokenize", {"prompt": "hello"}, Tokenized),
        ("/tokenize", {**CHAT, "return_token_strs": True}, Tokenized),
        ("/detokenize", {"tokens": [5, 6]}, Detokenized),
        ("/v1/completions", {"prompt": 5}, ErrorAnswer),
        ("/v1/models", None, ModelList),
        ("/v1/models/smollm2", None, ModelCard),
        ("/version", None, Version),
    ],
)
async def test_answers_match_the_document(
    stack: Stack, path: str, body: dict[str, Any] | None, model: Any
) -> None:
    response = await (stack.http.get(path) if body is None else stack.http.post(path, json=body))
    check_answer(model, response.json())
