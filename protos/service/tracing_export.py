"""Spans with OpenTelemetry's SDK, exported over OTLP. Only `open_tracer` imports this module.

The SDK's own variables apply, such as OTEL_TRACES_SAMPLER, OTEL_BSP_SCHEDULE_DELAY and
OTEL_RESOURCE_ATTRIBUTES.
"""

import logging
import os
import threading
from typing import Final

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter
from opentelemetry.sdk.environment_variables import OTEL_EXPORTER_OTLP_TRACES_PROTOCOL
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import Attributes

from protos.errors import ConfigurationRefused

_W3C: Final = TraceContextTextMapPropagator()

# Where collectors take spans over HTTP.
_HTTP_PATH: Final = "v1/traces"

# A collector that hangs must not hold up a service that ends.
_CLOSE_S: Final = 1.0


class OtlpSpan:
    """Implements `protos.service.tracing.Span`."""

    def __init__(self, tracer: trace.Tracer, span: trace.Span) -> None:
        """Wraps a sampled span."""
        self._tracer = tracer
        self._span = span
        self._context = trace.set_span_in_context(span, Context())
        carrier: dict[str, str] = {}
        _W3C.inject(carrier, self._context)
        self.traceparent = carrier["traceparent"]
        self.tracestate = carrier.get("tracestate", "")

    def child(self, name: str, start_ns: int, end_ns: int, attributes: Attributes) -> None:
        """Writes a whole child span."""
        span = self._tracer.start_span(name, self._context, attributes=attributes, start_time=start_ns)
        span.end(end_ns)

    def event(self, name: str, time_ns: int) -> None:
        """Adds an event."""
        self._span.add_event(name, timestamp=time_ns)

    def rename(self, name: str) -> None:
        """Gives the span another name."""
        self._span.update_name(name)

    def end(self, end_ns: int, attributes: Attributes, error: str = "") -> None:
        """Writes the span."""
        self._span.set_attributes(attributes or {})
        if error:
            self._span.set_status(trace.StatusCode.ERROR, error)
        self._span.end(end_ns)


def _exporter(endpoint: str) -> GrpcExporter | HttpExporter:
    # As in vLLM, OTEL_EXPORTER_OTLP_PROTOCOL does not count: the endpoint is for traces alone.
    protocol = os.environ.get(OTEL_EXPORTER_OTLP_TRACES_PROTOCOL)
    scheme, _, address = endpoint.rpartition("://")
    address, _, path = address.partition("/")
    match protocol or "grpc":
        case "grpc" if path:
            raise ConfigurationRefused(
                f"--otlp-traces-endpoint={endpoint} has a path, and gRPC has none; omit it, or set"
                f" {OTEL_EXPORTER_OTLP_TRACES_PROTOCOL}=http/protobuf"
            )
        case "grpc":
            return GrpcExporter(endpoint=address, insecure=scheme != "https")
        case "http/protobuf" if scheme not in ("http", "https"):
            raise ConfigurationRefused(
                f"--otlp-traces-endpoint={endpoint} has no http:// or https://, which the protocol http/protobuf"
                " needs; add it"
            )
        case "http/protobuf":
            return HttpExporter(endpoint=f"{scheme}://{address}/{path or _HTTP_PATH}")
        case _:
            raise ConfigurationRefused(
                f"OpenTelemetry's protocol {protocol!r} is not supported; set {OTEL_EXPORTER_OTLP_TRACES_PROTOCOL}"
                " to grpc or http/protobuf"
            )


class OtlpTracer:
    """Implements `protos.service.tracing.Tracer`."""

    def __init__(self, endpoint: str, service: str) -> None:
        """Exports to `endpoint`; needs no collector to be there.

        Raises:
            ConfigurationRefused: the endpoint does not fit the protocol in OpenTelemetry's variables.
        """
        resource = Resource.create()
        if str(resource.attributes.get(SERVICE_NAME, "")).startswith("unknown_service"):
            resource = resource.merge(Resource({SERVICE_NAME: f"triptych-{service}"}))
        exporter = _exporter(endpoint)
        # One line for each batch that is lost, and none for each attempt.
        logging.getLogger(type(exporter).__module__.rpartition(".")[0]).setLevel(logging.ERROR)
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("triptych")

    def begin(
        self, name: str, traceparent: str, tracestate: str = "", *, start_ns: int, serves_http: bool = False
    ) -> OtlpSpan | None:
        """See `protos.service.tracing.Tracer`."""
        carrier = {"traceparent": traceparent, "tracestate": tracestate} if traceparent else {}
        kind = trace.SpanKind.SERVER if serves_http else trace.SpanKind.INTERNAL
        span = self._tracer.start_span(name, _W3C.extract(carrier, Context()), kind, start_time=start_ns)
        return OtlpSpan(self._tracer, span) if span.is_recording() else None

    def close(self) -> None:
        """Exports the rest, for a moment at most."""
        closing = threading.Thread(target=self._provider.shutdown, name="close-tracer", daemon=True)
        closing.start()
        closing.join(_CLOSE_S)
