"""Answers fit the types of OpenAI's own client strictly: no field is missing, of another type, or unknown."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.completion import Completion
from openai.types.create_embedding_response import CreateEmbeddingResponse
from openai.types.model import Model
from pydantic import BaseModel

from gateway.openai.answers import ChatChunk
from tests.support.gateway.documented import check_answer
from tests.support.gateway.serving import CHAT, Stack, running_stack
from tests.support.gateway.tool_templates import WEATHER

pytestmark = [pytest.mark.contract, pytest.mark.asyncio(loop_scope="module")]

CHATS = "/v1/chat/completions"
CALL = '\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
PROMPT = {"prompt": "The capital", "max_tokens": 3}
LOGPROBS = {"logprobs": True, "top_logprobs": 2}

# What vLLM adds, too.
VLLM = {"stop_reason", "prompt_logprobs", "reasoning", "reasoning_content", "root", "parent", "max_model_len"}


def checked(model: type[BaseModel], answer: Any) -> None:
    """Checks an answer."""
    model.model_validate(without(answer, VLLM), strict=True, extra="forbid")


def without(value: Any, names: set[str]) -> Any:
    """Returns a JSON value without some fields."""
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
    answer = (await stack.http.post(path, json=body)).json()
    checked(model, answer)
    assert answer["system_fingerprint"].startswith("fp_")
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}
    options = {"include_usage": True, "include_obfuscation": True}
    *chunks, done = await stack.stream(path, {**body, "stream_options": options})
    assert done == "[DONE]"
    for each in chunks:
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
    """The tokens of thinking are counted in both forms."""
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
    """A model's card has what OpenAI's has, and what vLLM adds."""
    for card in (await stack.http.get("/v1/models")).json()["data"]:
        checked(Model, card)


async def test_unknown_fields_are_found() -> None:
    """The check itself finds what does not belong, also within objects."""
    usage = {"prompt_tokens": 1, "total_tokens": 1}
    embedding = {"object": "embedding", "index": 0, "embedding": [0.5]}
    good = {"object": "list", "data": [embedding], "model": "m", "usage": usage}
    checked(CreateEmbeddingResponse, good)
    for bad in ({**good, "id": "x"}, {**good, "data": [{**embedding, "mood": 1}]}):
        with pytest.raises(ValueError, match="Extra inputs are not permitted"):
            checked(CreateEmbeddingResponse, bad)
