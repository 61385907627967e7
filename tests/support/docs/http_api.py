"""Makes docs/api-http.md, with the gateway's routes, bodies and errors, from its OpenAPI document."""

import inspect
import json
import math
import re
from collections.abc import Iterator
from typing import Any

from gateway.app import create_app
from gateway.http.errors import TABLE
from gateway.scheduler_link.client import InferenceClient
from gateway.schemas.base import RequestModel
from gateway.settings import Settings
from protos.errors import Internal, TriptychError
from tests.support.docs.configuration import number
from tests.support.docs.grpc_api import descriptors
from tests.support.docs.pages import NOTICE, anchor, page, table

INTRODUCTION = """\
# HTTP API

The gateway speaks OpenAI's interface; names that OpenAI does not have are vLLM's. Bodies are JSON, and types are strict. `null` means the
default. `GET /openapi.json` has the same as an OpenAPI document.

A field that would change the output and is not served is refused by name. A field that cannot change it (`metadata`, `service_tier`,
`cache_control`, an unknown one) is accepted, and one debug line of the gateway's log names all such fields of a request: look there if a
mistyped parameter seems to do nothing.

The chat template reads `reasoning_effort` (as `reasoning_effort`, and as `enable_thinking`, off with "none"), `documents` and
`chat_template_kwargs`; what it does not read changes nothing.

Where a table has no text for a sampling parameter, [sampling.md](sampling.md) says what it does.
"""

HEADERS = (
    ("`X-Request-Id`", "Names the request in answers and logs. Without it, the gateway makes an id."),
    (
        "`X-Tenant`",
        "The tenant to charge under fair scheduling: one printable value of at most 256 bytes. Without it: the common tenant.",
    ),
)

# Messages whose comments describe body fields of the same name that have no text of their own.
DESCRIBING_MESSAGES = ("GenerateRequest", "SamplingParams", "PoolRequest")


def http_api() -> str:
    """Returns the whole page."""
    app = create_app(Settings(), InferenceClient("127.0.0.1:1"))
    document: dict[str, Any] = app.openapi()
    document = _resolved(document, document.get("components", {}).get("schemas", {}))
    comments = _comments()
    routes = [
        (path, verb, route) for path, verbs in document["paths"].items() for verb, route in verbs.items()
    ]
    index = [
        (f"[`{verb.upper()} {path}`](#{anchor(f'{verb} {path}')})", route["description"].partition("\n\n")[0])
        for path, verb, route in routes
    ]
    sections = [line for path, verb, route in routes for line in _section(path, verb, route, comments)]
    return page(
        [NOTICE, "", *INTRODUCTION.splitlines(), ""],
        table(("route", "what it does"), index),
        ["## Headers", ""],
        table(("header", "meaning"), HEADERS),
        sections,
        _errors(),
    )


def _comments() -> dict[tuple[str, bool], str]:
    """Returns comments on the fields of a body's messages, by name and whether they are boolean."""
    found: dict[tuple[str, bool], str] = {}
    for file in descriptors():
        for index, message in enumerate(file.descriptor.message_type):
            if message.name not in DESCRIBING_MESSAGES:
                continue
            for row, field in enumerate(message.field):
                found.setdefault((field.name, field.type == field.TYPE_BOOL), file.comment(4, index, 2, row))
    return found


def _section(path: str, verb: str, route: dict[str, Any], comments: dict[tuple[str, bool], str]) -> list[str]:
    lines = [f"## {verb.upper()} {path}", "", route["description"], ""]
    body = route.get("requestBody")
    if body is not None:
        schema = body["content"]["application/json"]["schema"]
        rows = [
            _row(name, field, comments, required=required) for name, field, required in _fields(schema, "")
        ]
        lines += table(("field", "type", "default", "meaning"), rows)
        if unserved := _unserved(schema["title"]):
            lines += [
                "These parameters of OpenAI and vLLM are accepted only with a value that changes nothing:",
                "",
            ]
            lines += table(("parameter", "accepted", "instead"), unserved)
    return lines + _answer(route["responses"]["200"])


def _answer(response: dict[str, Any]) -> list[str]:
    """Returns the fields of a route's JSON answer, and of the events that it streams."""
    content = response.get("content", {})
    lines = []
    schema = content.get("application/json", {}).get("schema", {})
    if "properties" in schema:
        rows = [
            (f"`{name}`", _type(field), field.get("description", ""))
            for name, field, _ in _fields(schema, "")
        ]
        lines += ["The answer:", "", *table(("field", "type", "meaning"), rows)]
    if "text/event-stream" in content:
        lines += [f"With `stream`: {content['text/event-stream']['schema']['description']}", ""]
    return lines


def _resolved(node: Any, definitions: dict[str, Any]) -> Any:
    """Returns a part of the document with its references resolved."""
    if isinstance(node, list):
        return [_resolved(item, definitions) for item in node]
    if not isinstance(node, dict):
        return node
    if "$ref" in node:
        target = definitions[node["$ref"].rpartition("/")[2]]
        beside = {key: value for key, value in node.items() if key != "$ref"}
        return {**_resolved(target, definitions), **beside}
    return {key: _resolved(value, definitions) for key, value in node.items()}


def _fields(schema: dict[str, Any], prefix: str) -> Iterator[tuple[str, dict[str, Any], bool]]:
    """Returns every field of an object, each followed by the fields of its own objects: `messages[].role`."""
    required = set(schema.get("required", ()))
    for name, field in schema.get("properties", {}).items():
        yield f"{prefix}{name}", field, name in required
        for inner, mark in _objects(field):
            yield from _fields(inner, f"{prefix}{name}{mark}.")


def _objects(field: dict[str, Any]) -> Iterator[tuple[dict[str, Any], str]]:
    """Returns the objects that a field may hold, each with the suffix of its path."""
    for choice in field.get("anyOf", field.get("oneOf", [field])):
        if choice.get("type") == "array":
            for inner, mark in _objects(choice.get("items", {})):
                yield inner, f"[]{mark}"
        elif "properties" in choice:
            yield choice, ""
        elif "oneOf" in choice:
            yield from _objects(choice)


def _row(
    name: str, field: dict[str, Any], comments: dict[tuple[str, bool], str], *, required: bool
) -> tuple[str, str, str, str]:
    default = json.dumps(field["default"]) if field.get("default") is not None else ""
    meaning = field.get("description") or comments.get((name, field.get("type") == "boolean"), "")
    return f"`{name}`", _type(field), "required" if required else f"`{default}`" if default else "", meaning


def _type(field: dict[str, Any]) -> str:
    choices = field.get("anyOf") or field.get("oneOf")
    if choices:
        texts = [_type(choice) for choice in choices if choice.get("type") != "null"]
        return " or ".join(dict.fromkeys(texts))
    if "enum" in field or "const" in field:
        return ", ".join(f"`{json.dumps(value)}`" for value in field.get("enum", [field.get("const")]))
    match field.get("type"):
        case "array":
            return _with_bounds(f"list of {_plural(_type(field.get('items', {})))}", field)
        case "object":
            values = field.get("additionalProperties")
            inner = _type(values) if isinstance(values, dict) and values else ""
            return f"object of {inner}" if inner else "object"
        case None:
            return "any"
        case kind:
            return _with_bounds(str(kind), field)


def _plural(text: str) -> str:
    return re.sub(r"^(string|integer|number|object|boolean)\b", r"\1s", text)


def _with_bounds(kind: str, field: dict[str, Any]) -> str:
    low, high = field.get("minimum", field.get("ge")), field.get("maximum", field.get("le"))
    above = field.get("exclusiveMinimum")
    parts = [kind]
    if low is not None and high is not None:
        parts.append(f"{_bound(low)} to {_bound(high)}")
    elif low is not None:
        parts.append(f"at least {_bound(low)}")
    elif high is not None and above is None:
        parts.append(f"at most {_bound(high)}")
    if above is not None:
        parts.append(f"above {_bound(above)}" + ("" if high is None else f", at most {_bound(high)}"))
    unit = "items" if field.get("type") == "array" else "characters"
    least, most = (field.get(f"{end}{'Items' if unit == 'items' else 'Length'}") for end in ("min", "max"))
    if least is not None and most is not None:
        parts.append(f"{least:,} to {most:,} {unit}")
    elif most is not None:
        parts.append(f"at most {most:,} {unit}")
    elif least is not None:
        parts.append("not empty" if least == 1 else f"at least {least} {unit}")
    return ", ".join(parts)


def _bound(value: float) -> str:
    # JSON Schema writes whole bounds as floats; the largest are limits of 32 and 64 bits.
    exponent = math.log2(abs(value) + 1) if abs(value) >= 2**20 else 0
    if exponent and round(exponent) in (31, 32, 63, 64):
        return f"-2^{round(exponent)}" if value < 0 else f"2^{round(exponent)} - 1"
    return number(int(value) if value == int(value) else value)


def _unserved(title: str) -> list[tuple[str, str, str]]:
    model = _models()[title]
    return [
        (f"`{name}`", ", ".join(f"`{json.dumps(value)}`" for value in (*row.neutral, None)), row.hint)
        for name, row in model.unserved.items()
    ]


def _models() -> dict[str, type[RequestModel]]:
    """Returns every request model by its name."""
    found: dict[str, type[RequestModel]] = {}
    queue: list[type[RequestModel]] = [RequestModel]
    while queue:
        for cls in queue.pop().__subclasses__():
            found[cls.__name__] = cls
            queue.append(cls)
    return found


def _errors() -> list[str]:
    rows = sorted(
        (
            str(cls.http_status),
            f"`{row.type}`",
            f"`{row.code}`",
            # The row of the base class is for internal errors.
            str(inspect.getdoc(Internal if cls is TriptychError else cls)).splitlines()[0],
        )
        for cls, row in TABLE.items()
    )
    text = (
        'An error has OpenAI\'s shape: `{"error": {"message": …, "type": …, "param": …, "code": …}}`. The message is one line that says'
        " what was wrong and what to change; `param` names the field. Statuses 429 and 503 come with `Retry-After`. An error in the middle"
        " of a stream is an event with the same body."
    )
    return ["## Errors", "", text, "", *table(("status", "type", "code", "when"), rows)]
