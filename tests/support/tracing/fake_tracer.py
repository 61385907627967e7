"""A fake of `protos.service.tracing.Tracer`, which keeps the spans."""

from dataclasses import dataclass, field

from protos.service.tracing import Attributes


@dataclass
class FakeSpan:
    """A span, and those below it."""

    name: str
    traceparent: str
    start_ns: int
    end_ns: int = 0
    attributes: Attributes = field(default_factory=dict)
    error: str = ""
    children: list["FakeSpan"] = field(default_factory=list)
    tracestate: str = ""

    def child(self, name: str, start_ns: int, end_ns: int, attributes: Attributes) -> None:
        self.children.append(FakeSpan(name, self.traceparent, start_ns, end_ns, attributes))

    def event(self, name: str, time_ns: int) -> None:
        self.child(name, time_ns, time_ns, {})

    def rename(self, name: str) -> None:
        self.name = name

    def end(self, end_ns: int, attributes: Attributes, error: str = "") -> None:
        self.end_ns, self.attributes, self.error = end_ns, attributes, error


@dataclass
class FakeTracer:
    """Samples the traces with `samples` set."""

    samples: bool = True
    spans: list[FakeSpan] = field(default_factory=list)

    def begin(
        self, name: str, traceparent: str, tracestate: str = "", *, start_ns: int, serves_http: bool = False
    ) -> FakeSpan | None:
        if not self.samples:
            return None
        span = FakeSpan(name, traceparent, start_ns)
        self.spans.append(span)
        return span

    def close(self) -> None:
        """Keeps everything."""
