"""The services' view of tracing: tracers and spans, without OpenTelemetry."""

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Final, Protocol, TypeAlias

from pydantic import AfterValidator

from protos.errors import ConfigurationRefused

Attributes: TypeAlias = Mapping[str, str | bool | int | float | Sequence[str]]

_ENDPOINT: Final = re.compile(r"((grpc|https?)://)?(\[[0-9a-fA-F:]+\]|[^:/\s]+):\d{1,5}(/[^\s?#]*)?")


def _check(value: str) -> str:
    if not _ENDPOINT.fullmatch(value):
        raise ValueError(
            "must be the endpoint of a collector, with its port, for example http://127.0.0.1:4317"
        )
    return value


OtlpEndpoint = Annotated[str, AfterValidator(_check)]
"""The type of the setting --otlp-traces-endpoint."""


class Span(Protocol):
    """A begun, sampled span. Times are nanoseconds since 1970."""

    @property
    def traceparent(self) -> str:
        """The span as W3C trace context, for its children in other services."""

    @property
    def tracestate(self) -> str:
        """The vendors' part of the trace context; often empty."""

    def child(self, name: str, start_ns: int, end_ns: int, attributes: Attributes) -> None:
        """Writes a whole child span."""

    def event(self, name: str, time_ns: int) -> None:
        """Adds an event."""

    def rename(self, name: str) -> None:
        """Gives the span another name, which was not known when it began."""

    def end(self, end_ns: int, attributes: Attributes, error: str = "") -> None:
        """Writes the span; `error` says why it failed, if it did."""


class Tracer(Protocol):
    """Writes the spans of a service. A thread exports them, and drops them when its queue is full."""

    def begin(
        self, name: str, traceparent: str, tracestate: str = "", *, start_ns: int, serves_http: bool = False
    ) -> Span | None:
        """Begins a span, or a trace without a parent; None if the trace is not sampled."""

    def close(self) -> None:
        """Exports the rest, for a moment at most."""


def open_tracer(endpoint: str | None, service: str) -> Tracer | None:
    """Returns the tracer of a service ("gateway"); None, and nothing is imported, without an endpoint.

    Raises:
        ConfigurationRefused: OpenTelemetry is not installed, or its variables do not fit the endpoint.
    """
    if endpoint is None:
        return None
    try:
        from protos.service.tracing_export import OtlpTracer
    except ImportError as error:
        raise ConfigurationRefused(
            f"--otlp-traces-endpoint needs OpenTelemetry ({error}); install triptych[otel]"
        ) from error
    return OtlpTracer(endpoint, service)
