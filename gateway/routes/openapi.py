"""Additions to the OpenAPI document: request bodies, answers and errors.

The routes parse bodies and write answers themselves, so FastAPI cannot find these schemas in their
signatures.
"""

from typing import Any

from pydantic import BaseModel

from gateway.schemas.answers import ErrorAnswer
from gateway.schemas.base import RequestModel


def body_schema(model: type[RequestModel]) -> dict[str, Any]:
    """Returns ``openapi_extra`` for a route that reads its body as ``model``."""
    schema = model.model_json_schema(ref_template="#/components/schemas/{model}")
    # Definitions are inlined: FastAPI adds no components for bodies that it does not read.
    definitions = schema.pop("$defs", {})
    return {
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": _inline(schema, definitions)}},
        }
    }


def _inline(node: Any, definitions: dict[str, Any]) -> Any:
    if isinstance(node, list):
        return [_inline(item, definitions) for item in node]
    if not isinstance(node, dict):
        return node
    if "$ref" in node:
        return _inline(definitions[node["$ref"].rpartition("/")[2]], definitions)
    # Unknown fields are dropped, not refused, unless the gateway is strict.
    return {
        key: _inline(value, definitions)
        for key, value in node.items()
        if (key, value) != ("additionalProperties", False)
    }


def documented(
    answer: type[BaseModel] | None = None,
    description: str = "The answer.",
    content: dict[str, Any] | None = None,
    *,
    error: type[BaseModel] = ErrorAnswer,
    api: str = "OpenAI",
) -> dict[int | str, dict[str, Any]]:
    """Returns ``responses`` for a route: its answer, and the one shape of all errors.

    Args:
        answer: the JSON of a 200; ``None``: the route answers with something else.
        description: of the 200.
        content: further media types of the 200.
        error: the JSON of any other status.
        api: whose error object that is.
    """
    success: dict[str, Any] = {"description": description}
    if answer is not None:
        success["model"] = answer
    if content is not None:
        success["content"] = content
    failure = {"model": error, "description": f"Any other status: {api}'s error object."}
    return {200: success, "default": failure}


def event_stream(event: type[BaseModel]) -> dict[str, Any]:
    """Returns the media type of a streamed answer.

    Args:
        event: the JSON of its events, whose field ``object`` names them.
    """
    schema = event.model_json_schema(mode="serialization")
    definitions = schema.pop("$defs", {})
    name = schema["properties"]["object"]["const"]
    description = f'Server-sent events with `{name}` objects; the last event is "data: [DONE]".'
    content = {"contentMediaType": "application/json", "contentSchema": _inline(schema, definitions)}
    return {"text/event-stream": {"schema": {"type": "string", "description": description, **content}}}
