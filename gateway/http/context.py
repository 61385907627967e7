"""What the routes share, handed to them through the application's state."""

import time
import uuid
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass
from typing import Any, TypeVar

from starlette.requests import Request

from gateway.metrics import Metrics
from gateway.scheduler_link.client import InferenceClient
from gateway.scheduler_link.served_model import ServedModelWatcher
from gateway.schemas.base import RequestModel, parse
from gateway.settings import Settings
from gateway.text.tokenization import TextWorker

M = TypeVar("M", bound=RequestModel)


def random_id() -> str:
    """32 hexadecimal digits."""
    return uuid.uuid4().hex


@dataclass(frozen=True, slots=True)
class Context:
    """One gateway's parts."""

    settings: Settings
    client: InferenceClient
    watcher: ServedModelWatcher
    metrics: Metrics
    text_worker: TextWorker
    new_id: Callable[[], str] = random_id
    clock: Callable[[], float] = time.monotonic
    wall_clock: Callable[[], float] = time.time


def context_of(request: Request) -> Context:
    """The gateway that serves ``request``."""
    context: Context = request.app.state.context
    return context


async def read_body(request: Request, model: type[M]) -> M:
    """The request's body; see :func:`gateway.schemas.base.parse` for what it raises."""
    body = parse(model, await request.body())
    note(request.scope, model=getattr(body, "model", None), user=getattr(body, "user", None))
    return body


def note(scope: MutableMapping[str, Any], **fields: Any) -> None:
    """Adds fields to the request's line in the access log; ``None`` values are left out."""
    noted = scope.setdefault("triptych.access", {})
    noted.update({name: value for name, value in fields.items() if value is not None})


def body_schema(model: type[RequestModel]) -> dict[str, Any]:
    """``openapi_extra`` of a route that reads its body with :func:`read_body`."""
    schema = model.model_json_schema(ref_template="#/components/schemas/{model}")
    # Inlined definitions: the routes read their bodies themselves, so FastAPI knows no components of them.
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
    return {key: _inline(value, definitions) for key, value in node.items()}
