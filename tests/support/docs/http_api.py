"""Makes docs/api-http.md, with the gateway's routes and errors, from its OpenAPI document."""

import inspect
import json
from typing import Any

from gateway.app import create_app
from gateway.http.errors import TABLE
from gateway.scheduler_client.client import InferenceClient
from gateway.schemas.base import RequestModel
from gateway.settings import Settings
from protos.errors import Internal, TriptychError
from tests.support.docs.pages import NOTICE, page, table

INTRODUCTION = """\
# HTTP API

The gateway speaks OpenAI's interface; names that OpenAI does not have are vLLM's. A running gateway describes every field of its bodies and
answers at `/docs`, and as an OpenAPI document at `/openapi.json`. Types are strict, and `null` means the default. [Sampling](sampling.md)
explains the sampling parameters.

A field without effect (`metadata`, `service_tier`, `cache_control`, an unknown one) is accepted, and one debug line of the gateway's log
names all such fields of a request: look there if a mistyped parameter seems to do nothing. A field that would change the output and is not
served is [refused by name](#parameters-that-are-not-served).

A path may end with a slash, every GET route answers HEAD, and an empty `model` means the served model. Bodies may be compressed
(`Content-Encoding: gzip` or `deflate`; `--max-body-bytes` bounds them before and after), and a byte-order mark is skipped.
The gateway buffers 64 KiB of a connection, so a body takes a round trip for each 64 KiB, 25 s for 8 MB at 200 ms: put a proxy that buffers
bodies near far clients that send large ones.
A body has at most 500,000 values, 100,000 of them texts and 100,000 lists and objects; a text has at most 500,000 tokens and 2.5 MB.

The chat template reads `reasoning_effort` (as `reasoning_effort`, and as `enable_thinking` and `thinking`, off with "none"), `documents` and
`chat_template_kwargs`; what it does not read changes nothing.
"""

HEADERS = (
    ("`X-Request-Id`", "Names the request in answers and logs. Without it, the gateway makes an id."),
    (
        "`X-Tenant`",
        "The tenant to charge under fair scheduling: one printable value of at most 256 bytes. Without it: the common tenant.",
    ),
)


def http_api() -> str:
    """Returns the whole page."""
    document: dict[str, Any] = create_app(Settings(), InferenceClient("127.0.0.1:1")).openapi()
    routes = [
        (f"`{verb.upper()} {path}`", route["description"].partition("\n\n")[0].replace("\n", " "))
        for path, verbs in document["paths"].items()
        for verb, route in verbs.items()
    ]
    return page(
        [NOTICE, "", *INTRODUCTION.splitlines(), ""],
        ["## Routes", ""],
        table(("route", "what it does"), routes),
        ["## Headers", ""],
        table(("header", "meaning"), HEADERS),
        ["## Parameters that are not served", ""],
        ["They are accepted only with `null` or a value that changes nothing.", ""],
        table(("parameter", "accepted", "instead"), _unserved()),
        _errors(),
    )


def _unserved() -> list[tuple[str, str, str]]:
    """Returns the parameters of all bodies, each pair of name and advice once."""
    rows: dict[tuple[str, str], tuple[str, str, str]] = {}
    queue: list[type[RequestModel]] = [RequestModel]
    while queue:
        cls = queue.pop(0)
        queue += cls.__subclasses__()
        for name, row in cls.unserved.items():
            accepted = ", ".join(f"`{json.dumps(value)}`" for value in row.neutral)
            rows.setdefault((name, row.hint), (f"`{name}`", accepted, row.hint))
    return [rows[key] for key in sorted(rows)]


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
