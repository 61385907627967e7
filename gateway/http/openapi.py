"""Routes whose signatures FastAPI documents: a body by its model, an answer by its type."""

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import orjson
from fastapi import APIRouter
from fastapi.routing import APIRoute
from pydantic import TypeAdapter
from starlette.requests import Request
from starlette.responses import Response

from gateway.http.errors import ErrorAnswer
from gateway.http.middleware import note
from gateway.schemas.base import IgnoredFields, RequestModel, parse
from protos.service.logs import get_logger


class BodyRoute(APIRoute):
    """Reads the body of a request as its endpoint's model, and writes a returned value as JSON.

    FastAPI itself reads bodies with the standard library and validates every answer, which costs more than
    the rest of a short request, and it drops unknown fields without a word.
    """

    def get_route_handler(self) -> Callable[[Request], Awaitable[Response]]:  # type: ignore[override]
        """Returns the handler of a request."""
        if self.body_field is None:
            return super().get_route_handler()
        model: Any = self.body_field.field_info.annotation
        checks: Any = [each.dependency for each in self.dependencies]

        async def handle(request: Request) -> Response:
            for check in checks:
                check(request)
            answer = await self.endpoint(request, await read_body(request, model))
            return answer if isinstance(answer, Response) else json_response(answer)

        return handle


def json_response(answer: Any) -> Response:
    """Returns an answer as JSON."""
    return Response(orjson.dumps(answer), media_type="application/json")


def api_router(tag: str, *, error: Any = ErrorAnswer, api: str = "OpenAI") -> APIRouter:
    """Returns a router whose errors all have the shape ``error``, the error object of ``api``."""
    failure = {"model": error, "description": f"Any other status: {api}'s error object."}
    return APIRouter(tags=[tag], route_class=BodyRoute, responses={"default": failure})


def documented(
    answer: Any = None, description: str = "The answer.", content: dict[str, Any] | None = None
) -> dict[int | str, dict[str, Any]]:
    """Returns ``responses`` for a route whose endpoint returns a :class:`Response`.

    ``answer`` is the type of the JSON of a 200, ``content`` its further media types.
    """
    success: dict[str, Any] = {"description": description}
    if answer is not None:
        success["model"] = answer
    if content is not None:
        success["content"] = content
    return {200: success}


def media(kind: str, description: str, **schema: Any) -> dict[str, Any]:
    """Returns the description of an answer of the media type ``kind``."""
    return {kind: {"schema": {"type": "string", "description": description, **schema}}}


def event_stream(event: Any) -> dict[str, Any]:
    """Returns the media type of a streamed answer with events of the type ``event``."""
    schema = TypeAdapter(event).json_schema(mode="serialization")
    definitions = schema.pop("$defs", {})
    name = schema["properties"]["object"]["const"]
    description = f'Server-sent events with `{name}` objects; the last event is "data: [DONE]".'
    content = {"contentMediaType": "application/json", "contentSchema": _inline(schema, definitions)}
    return media("text/event-stream", description, **content)


def _inline(node: Any, definitions: dict[str, Any]) -> Any:
    if isinstance(node, list):
        return [_inline(item, definitions) for item in node]
    if not isinstance(node, dict):
        return node
    if "$ref" in node:
        return _inline(definitions[node["$ref"].rpartition("/")[2]], definitions)
    return {key: _inline(value, definitions) for key, value in node.items()}


M = TypeVar("M", bound=RequestModel)


async def read_body(request: Request, model: type[M]) -> M:
    """Parses the request's body as ``model``; a debug line names the fields without effect."""
    ignored, data = IgnoredFields(), await request.body()
    worker: Any = request.app.state.context.text_worker
    body: M = await worker.run_light(len(data), lambda: parse(model, data, ignored))
    if ignored.names:
        get_logger().debug("the request has fields without effect", fields=ignored.names)
    note(request.scope, model=getattr(body, "model", None), user=getattr(body, "user", None))
    return body
