"""The gateway's spans: one for each HTTP request, the ancestor of the scheduler's and the workers' spans."""

import time
from collections.abc import Iterable, Mapping, MutableMapping
from typing import Any, Final, Protocol

from starlette.datastructures import Headers

from gateway.http.errors import sent_method
from protos.tracing.tracer import Span, Tracer

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
        """Begins the span of a request, a child of the one that its headers name."""
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
        """Writes the span of a request, if it has one.

        Args:
            scope: the request.
            route: its route's pattern.
            status: the HTTP status; 0 if the client left first.
            error: the code of its error, if it has one.
            noted: what the access log says of it.
        """
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
