"""The OpenAPI document: complete, and true to the answers."""

from typing import Any

import pytest

from gateway.http.errors import ErrorAnswer
from gateway.openai import answers
from gateway.openai.models import ModelCard, ModelList
from gateway.operations.routes import Version
from gateway.operations.tokenize import Detokenized, Tokenized
from tests.support.gateway.documented import check_answer, resolved
from tests.support.gateway.serving import CHAT, Stack

pytestmark = [pytest.mark.contract, pytest.mark.asyncio(loop_scope="module")]

PROMPT = {"prompt": "The capital", "max_tokens": 3}
BODILESS = {"/ping", "/reset_prefix_cache", "/reset_mm_cache", "/reset_encoder_cache"}
LOGPROBS = {"logprobs": True, "top_logprobs": 2, "prompt_logprobs": 1}


def described(document: dict[str, Any], answer: dict[str, Any]) -> bool:
    """Returns whether the answer has a schema with fields, or is a text."""
    content = answer.get("content", {})
    for schema in (one.get("schema", {}) for one in content.values()):
        found = schema
        if "$ref" in found:
            found = document["components"]["schemas"][found["$ref"].rpartition("/")[2]]
        if not ({"properties", "anyOf", "oneOf"} & found.keys() or found.get("type") == "string"):
            return False
    return bool(content)


async def test_every_route_is_described(stack: Stack) -> None:
    """Each route has a summary, a description, its answer, and the shape of errors.

    Each POST has its body. Pages and unknown ids are not part of the API.
    """
    listed = {
        route.path.replace(":path}", "}")
        for route in stack.gateway.app.routes
        if getattr(route, "include_in_schema", False)
    }
    assert listed == stack.gateway.app.openapi()["paths"].keys()
    document = (await stack.http.get("/openapi.json")).json()
    assert document == stack.gateway.app.openapi()
    assert {
        "/v1/chat/completions",
        "/v1/embeddings",
        "/score",
        "/rerank",
        "/classify",
        "/pooling",
    } <= document["paths"].keys()
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
    """The bodies list what is served."""
    document = (await stack.http.get("/openapi.json")).json()

    def properties(path: str) -> dict[str, Any]:
        schema = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        return dict(resolved(schema, document)["properties"])

    assert {"messages", "temperature", "stream"} <= properties("/v1/chat/completions").keys()
    responses = properties("/v1/responses")
    assert {"input", "temperature", "stream"} <= responses.keys()
    assert not {"n", "max_tokens"} & responses.keys(), "inherited parameters that are refused"


@pytest.mark.parametrize(
    ("path", "body", "model"),
    [
        ("/v1/chat/completions", {**CHAT, "logprobs": True, "top_logprobs": 2}, answers.ChatChunk),
        ("/v1/completions", {**PROMPT, "logprobs": 2}, answers.CompletionChunk),
    ],
)
async def test_events_match_the_document(stack: Stack, path: str, body: dict[str, Any], model: Any) -> None:
    """The events of a stream have the documented fields and no others."""
    options = {"return_token_ids": True, "stream_options": {"include_usage": True}}
    *chunks, _ = await stack.stream(path, {**body, **options})
    for chunk in chunks:
        check_answer(model, chunk)
    document = (await stack.http.get("/openapi.json")).json()
    schema = document["paths"][path]["post"]["responses"]["200"]["content"]["text/event-stream"]["schema"]
    assert schema["contentSchema"]["properties"].keys() == model.__annotations__.keys()


@pytest.mark.parametrize(
    ("path", "body", "model"),
    [
        ("/v1/chat/completions", CHAT, answers.ChatCompletion),
        ("/v1/chat/completions", {**CHAT, **LOGPROBS}, answers.ChatCompletion),
        ("/v1/completions", PROMPT, answers.Completion),
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
    """Real answers have the documented fields and no others."""
    response = await (stack.http.get(path) if body is None else stack.http.post(path, json=body))
    check_answer(model, response.json())
