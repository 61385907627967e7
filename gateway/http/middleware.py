"""Middleware around every HTTP request: request id, access log, metrics, spans, and the body's limits."""

import functools
import re
import time
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from typing import Any, Final, NamedTuple, Protocol

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.http.bodies import BodyLimits, BoundedBody
from gateway.http.errors import METHOD, error_code, error_response, internal, sent_method
from gateway.metrics import Metrics
from protos.service.logs import bind_request, get_logger
from protos.service.tracing import Span, Tracer

_SPAN: Final = "triptych.span"

# Names in spans of what the access log notes. vLLM's and OpenTelemetry's names, where they have one.
_NAMES: Final = {
    "model": "gen_ai.request.model",
    "prompt_tokens": "gen_ai.usage.prompt_tokens",
    "completion_tokens": "gen_ai.usage.completion_tokens",
    "finish_reason": "gen_ai.response.finish_reasons",
    "key": "triptych.key",
    "tenant": "triptych.tenant",
    "client_gone": "triptych.client_gone",
}


class Traced(Protocol):
    """A request to the scheduler."""

    traceparent: str
    tracestate: str


class HttpTraces:
    """Writes the spans of HTTP requests, unless their trace is not sampled."""

    def __init__(self, tracer: Tracer) -> None:
        """Writes with `tracer`."""
        self._tracer = tracer

    def begin(self, scope: MutableMapping[str, Any], headers: Headers) -> None:
        """Begins the span of a request, a child of the span in its headers."""
        span = self._tracer.begin(
            sent_method(scope),
            headers.get("traceparent", ""),
            headers.get("tracestate", ""),
            start_ns=time.time_ns(),
            serves_http=True,
        )
        if span is not None:
            scope[_SPAN] = (span, time.time_ns())

    def end(
        self,
        scope: MutableMapping[str, Any],
        *,
        route: str,
        status: int,
        error: str | None,
        noted: Mapping[str, Any],
    ) -> None:
        """Writes the span of a sampled request."""
        begun = scope.pop(_SPAN, None)
        if begun is None:
            return
        span, start_ns = begun
        attributes: dict[str, Any] = {
            "http.request.method": sent_method(scope),
            "http.route": route,
            "url.path": scope["path"],
            "gen_ai.request.id": scope["triptych.request_id"],
            **{_NAMES[name]: value for name, value in noted.items() if name in _NAMES},
        }
        if status:
            attributes["http.response.status_code"] = status
        if error is not None:
            attributes["error.type"] = error
        if (first_ms := noted.get("ttft_ms")) is not None:
            attributes["gen_ai.latency.time_to_first_token"] = first_ms / 1000
            span.event("first_token", start_ns + round(first_ms * 1e6))
        span.rename(f"{scope['method']} {route}")
        # A refusal is the client's error, not the server's.
        failed = error is not None and (status >= 500 or status == 200)
        span.end(time.time_ns(), attributes, error or "" if failed else "")


def pass_on(scope: Mapping[str, Any], requests: Iterable[Traced]) -> None:
    """Puts the trace of an HTTP request into its requests to the scheduler, if it is sampled."""
    begun: tuple[Span, int] | None = scope.get(_SPAN)
    if begun is not None:
        for request in requests:
            request.traceparent, request.tracestate = begun[0].traceparent, begun[0].tracestate


_ACCESS_FIELDS: Final = "triptych.access"
_HEADERS: Final = "triptych.headers"
_STATUS: Final = "triptych.status"

REQUEST_ID_HEADER: Final = "x-request-id"
# Machines poll these every few seconds, so they are logged at debug level only.
_QUIET: Final = frozenset({"/health", "/live", "/load", "/metrics", "/ping", "/ready"})

RawHeaders = Sequence[tuple[bytes, bytes]]

_ALWAYS: Final = (
    # A browser must not read JSON with a prompt in it as a page.
    (b"x-content-type-options", b"nosniff"),
)

# Pages load what this gateway serves and nothing else, and no other site shows them in a frame. Pages of API
# documentation have a script and styles of their own in them.
_PAGES: Final = (
    (
        b"content-security-policy",
        (
            b"default-src 'self'; script-src 'self' 'unsafe-inline'; style-src 'self' 'unsafe-inline';"
            b" img-src 'self' data:; worker-src 'self' blob:; object-src 'none'; base-uri 'none';"
            b" form-action 'none'; frame-ancestors 'none'"
        ),
    ),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
)

_REQUEST_ID: Final = re.compile(r"[\x21-\x7e]{1,128}")


def note(scope: MutableMapping[str, Any], **fields: Any) -> None:
    """Adds ``fields`` to the request's line in the access log; skips ``None`` values."""
    noted = scope.setdefault(_ACCESS_FIELDS, {})
    noted.update({name: value for name, value in fields.items() if value is not None})


def request_id_of(headers: Headers, new_id: Callable[[], str]) -> str:
    """Returns the client's request id if it fits into a header and a log, otherwise a new id."""
    given = headers.get(REQUEST_ID_HEADER, "")
    return given if _REQUEST_ID.fullmatch(given) else new_id()


def add_headers(scope: MutableMapping[str, Any], make: Callable[[], list[tuple[bytes, bytes]]]) -> None:
    """Adds headers to the request's answer; ``make`` is called when the answer begins."""
    scope[_HEADERS] = make


class Outcome(NamedTuple):
    """The end of a request."""

    status: int
    """0 if there was no answer."""
    prompt_tokens: int
    completion_tokens: int


def outcome_of(scope: MutableMapping[str, Any]) -> Outcome:
    """Returns status and token counts of the request, as noted so far."""
    noted = scope.get(_ACCESS_FIELDS, {})
    return Outcome(scope.get(_STATUS, 0), noted.get("prompt_tokens", 0), noted.get("completion_tokens", 0))


def security_headers(given: RawHeaders) -> RawHeaders:
    """Returns the headers to add to an answer with the headers ``given``. A page's own policy stays."""
    found = dict(given)
    if not found.get(b"content-type", b"").startswith(b"text/html"):
        return _ALWAYS
    return (*_ALWAYS, *(header for header in _PAGES if header[0] not in found))


PAGE_FOLDER: Final = "/docs/files"
"""The scripts and styles of the pages about the API."""


def _for_routes(scope: Scope) -> Scope:
    """Returns the request as routes see it: without trailing slashes, and HEAD as GET.

    The server still has the original, and sends no body with an answer to HEAD. A mounted folder needs the
    prefix that a proxy may have dropped.
    """
    path = scope["path"].rstrip("/") or "/"
    if path.startswith(f"{PAGE_FOLDER}/"):
        path = scope.get("root_path", "") + path
    method = "GET" if scope["method"] == "HEAD" else scope["method"]
    return {**scope, "path": path, "method": method, METHOD: scope["method"]}


class RequestMiddleware:
    """Wraps the application in plain ASGI: a streamed chunk costs one extra call."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        metrics: Metrics,
        bodies: BodyLimits,
        tenant_of: Callable[[Scope], str],
        new_id: Callable[[], str],
        clock: Callable[[], float],
        tracer: Tracer | None = None,
    ) -> None:
        """Wraps ``app``; ``tracer`` writes the spans of requests, if anything does.

        ``bodies`` counts the bytes of bodies by ``tenant_of`` a request.
        """
        self._traces = HttpTraces(tracer) if tracer is not None else None
        self._app = app
        self._metrics = metrics
        self._bodies = bodies
        self._tenant_of = tenant_of
        self._new_id = new_id
        self._clock = clock
        self._log = get_logger()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope = _for_routes(scope)
        began = self._clock()
        headers = Headers(scope=scope)
        request_id = request_id_of(headers, self._new_id)
        scope["triptych.request_id"], scope["triptych.arrived"] = request_id, began
        if self._traces is not None and scope["path"] not in _QUIET:
            self._traces.begin(scope, headers)
        status = 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = scope[_STATUS] = message["status"]
                given = [*message.get("headers", ()), (b"x-request-id", request_id.encode())]
                more = scope[_HEADERS]() if _HEADERS in scope else ()
                message["headers"] = [*given, *more, *security_headers(given)]
            await send(message)

        body = BoundedBody(receive, headers, self._bodies, functools.partial(self._tenant_of, scope))
        with bind_request(request_id), self._metrics.in_flight():
            try:
                await self._app(scope, body, send_with_id)
            except Exception as error:
                self._log.exception("unexpected exception")
                if status:
                    raise  # the response has begun: only the server can end it now
                await error_response(internal(error), path=scope["path"])(scope, receive, send_with_id)
            finally:
                body.close()
                self._record(scope, status, began)

    def _record(self, scope: MutableMapping[str, Any], status: int, began: float) -> None:
        route = getattr(scope.get("route"), "path", None) or "other"
        seconds, error = self._clock() - began, error_code(scope)
        self._metrics.answered(route, sent_method(scope), status, seconds, error)
        noted = scope.get(_ACCESS_FIELDS, {})
        if self._traces is not None:
            self._traces.end(scope, route=route, status=status, error=error, noted=noted)
        write = self._log.debug if scope["path"] in _QUIET else self._log.info
        write(
            "request",
            method=sent_method(scope),
            path=scope["path"],
            # 0: the client disconnected before there was a status.
            status=status,
            ms=round(seconds * 1000, 1),
            **({} if error is None else {"error": error}),
            **noted,
        )
