"""Real OTLP receivers, over gRPC and over HTTP, with the official messages. They keep what they get."""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.common.v1.common_pb2 import AnyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span


@dataclass(frozen=True)
class ReceivedSpan:
    """A span as a collector sees it."""

    service: str
    """The service.name of its resource."""
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    start_ns: int
    end_ns: int
    attributes: dict[str, Any]
    events: tuple[str, ...]
    error: str
    """The message of its status."""
    is_server: bool


def _value(value: AnyValue) -> object:
    return getattr(value, str(value.WhichOneof("value")))


def _received(service: str, span: Span) -> ReceivedSpan:
    return ReceivedSpan(
        service, span.name, span.trace_id.hex(), span.span_id.hex(), span.parent_span_id.hex(),
        span.start_time_unix_nano, span.end_time_unix_nano,
        {each.key: _value(each.value) for each in span.attributes},
        tuple(event.name for event in span.events), span.status.message, span.kind == Span.SPAN_KIND_SERVER,
    )  # fmt: skip


@dataclass
class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Receives spans."""

    endpoint: str = ""
    spans: list[ReceivedSpan] = field(default_factory=list)
    stop: Callable[[], object] = lambda: None
    _changed: threading.Condition = field(default_factory=threading.Condition)

    def Export(self, request: Any, context: grpc.ServicerContext | None) -> Any:
        with self._changed:
            for resource in request.resource_spans:
                names = {each.key: _value(each.value) for each in resource.resource.attributes}
                for scope in resource.scope_spans:
                    self.spans += [_received(str(names["service.name"]), span) for span in scope.spans]
            self._changed.notify_all()
        return trace_service_pb2.ExportTraceServiceResponse()

    def wait_for(
        self, enough: Callable[[list[ReceivedSpan]], bool], timeout_s: float = 20.0
    ) -> list[ReceivedSpan]:
        """Returns the spans once they are enough."""
        until = time.monotonic() + timeout_s
        with self._changed:
            while not enough(self.spans):
                assert self._changed.wait(until - time.monotonic()), [span.name for span in self.spans]
            return list(self.spans)


@contextmanager
def running_collector() -> Iterator[Collector]:
    """Runs a collector on a free port within the block."""
    collector = Collector()
    server = grpc.server(ThreadPoolExecutor(2))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)  # type: ignore[no-untyped-call]
    port = server.add_insecure_port("127.0.0.1:0")
    collector.endpoint = f"http://127.0.0.1:{port}"
    server.start()
    collector.stop = lambda: server.stop(None).wait()
    try:
        yield collector
    finally:
        collector.stop()


@contextmanager
def running_http_collector() -> Iterator[Collector]:
    """Runs a collector that takes OTLP over HTTP, at its usual path only."""
    collector = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            fits = (self.path, self.headers["content-type"]) == ("/v1/traces", "application/x-protobuf")
            if fits:
                collector.Export(trace_service_pb2.ExportTraceServiceRequest.FromString(body), None)
            self.send_response(200 if fits else 404)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Logs nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        collector.endpoint = f"http://127.0.0.1:{server.server_port}"
        serving = threading.Thread(target=server.serve_forever, args=(0.01,))
        serving.start()
        try:
            yield collector
        finally:
            server.shutdown()
            serving.join()
