"""Strict validation of answers against the types of Anthropic's own client."""

import json
from typing import Any, TypeVar

from anthropic.types import Message, RawMessageStreamEvent
from anthropic.types.shared import ErrorResponse
from pydantic import BaseModel, TypeAdapter

from gateway.messages_api.schemas import MessageAnswer
from tests.support.gateway.documented import check_answer, check_extras
from tests.support.gateway.serving import Stack

M = TypeVar("M", bound=BaseModel)

PATH = "/v1/messages"
_EVENTS: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)


def strict(kind: type[M], data: Any) -> M:
    """Returns ``data`` as the client's type; fails if a field is missing, unknown or of another type."""
    found = kind.model_validate_json(json.dumps(data), strict=True)
    check_extras(found)
    return found


def strict_event(data: dict[str, Any]) -> Any:
    """Returns an event of a stream as the client's type."""
    found = _EVENTS.validate_json(json.dumps(data), strict=True)
    check_extras(found)
    return found


def strict_error(data: dict[str, Any]) -> ErrorResponse:
    """Returns an error as the client's type."""
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
            strict_event(event)
        events.append(event)
    return events
