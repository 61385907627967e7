"""Clients that write every field they know send null for those that they leave unset."""

from typing import Any

import orjson
import pytest
from pydantic.fields import FieldInfo

from gateway.messages_api.schemas import CountTokensRequest, MessagesRequest
from gateway.openai.completions import CompletionRequest
from gateway.operations.tokenize import DetokenizeRequest, TokenizeRequest
from gateway.pooling import schemas as pooling
from gateway.responses_api.schemas import ResponsesRequest
from gateway.schemas.base import RequestModel, parse
from gateway.schemas.chat import ChatCompletionRequest
from tests.support.gateway.tool_templates import TIME

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
LEAST: list[tuple[type[RequestModel], dict[str, Any]]] = [
    (ChatCompletionRequest, CHAT),
    (ChatCompletionRequest, {**CHAT, "tools": [TIME]}),
    (CompletionRequest, {"prompt": "hi"}),
    (ResponsesRequest, {"input": "hi"}),
    (MessagesRequest, {**CHAT, "model": "m", "max_tokens": 5}),
    (CountTokensRequest, {**CHAT, "model": "m"}),
    (TokenizeRequest, CHAT),
    (TokenizeRequest, {"prompt": "hi"}),
    (DetokenizeRequest, {"tokens": [5]}),
    (pooling.EmbeddingRequest, {"input": "hi"}),
]


def _name(name: str, field: FieldInfo) -> str:
    return field.validation_alias if isinstance(field.validation_alias, str) else name


@pytest.mark.parametrize(("model", "body"), LEAST, ids=[model.__name__ for model, _ in LEAST])
def test_null_means_unset(model: type[RequestModel], body: dict[str, Any]) -> None:
    """Each optional field and each known parameter out of habit may be null, alone and together."""
    optional = [_name(name, field) for name, field in model.model_fields.items() if not field.is_required()]
    names = [name for name in (*optional, *model.unserved) if name not in body]
    plain = parse(model, orjson.dumps(body))
    for nulls in ([name] for name in names):
        assert parse(model, orjson.dumps({**body, **dict.fromkeys(nulls)})) == plain, nulls
    assert parse(model, orjson.dumps({**body, **dict.fromkeys(names)})) == plain


CALL: dict[str, Any] = {"id": "c", "type": None, "function": {"name": "get_time", "arguments": None}}


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": [*CHAT["messages"], {"role": "assistant", "content": None, "tool_calls": [CALL]}]},
        {"tools": [{**TIME, "type": None}]},
        {
            "tools": [TIME],
            "tool_choice": {"type": "function", "function": {"name": "get_time"}, "custom": None},
        },
        {"tools": [{"type": "custom", "function": None, "custom": {"name": "f", "format": None}}]},
        {"structured_outputs": {"regex": "a", "json": None, "choice": None, "json_object": None}},
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"schema": {}, "name": None},
                "format": None,
            }
        },
        {"stream": True, "stream_options": {"include_usage": None}},
    ],
    ids=",".join,
)
def test_null_within_an_object_means_unset(fields: dict[str, Any]) -> None:
    """So it is with the fields of messages, tools, choices and constraints."""
    parse(ChatCompletionRequest, orjson.dumps({**CHAT, **fields}))
