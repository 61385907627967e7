"""The spans of a sequence: waiting, prefill chunks, first token and decoding.

Only sampled requests are traced. A trace is a few numbers until the sequence ends and the spans are written.
Spans and attributes are named as in vLLM where vLLM names them.
"""

import time
from dataclasses import dataclass, field
from typing import Literal

from protos.service.tracing import Attributes, Span, Tracer

Wait = Literal["queue", "grammar", "adapter"]
"""The cause of a wait: a slot, a grammar or a LoRA adapter."""


@dataclass(frozen=True, slots=True)
class TraceContext:
    """Where the spans of a client's request belong."""

    traceparent: str
    tracestate: str = ""
    tracer: Tracer | None = None
    """Writes them; None: this service writes none, and workers' spans are children of the client's."""

    def begin(self, now_s: float) -> "tuple[RequestTrace | None, str]":
        """Begins the trace of a sequence at a clock reading.

        Returns the trace, None unless sampled here, and the parent of the worker's spans.
        """
        if self.tracer is None:
            return None, self.traceparent
        now_ns = time.time_ns()
        span = self.tracer.begin("llm_request", self.traceparent, self.tracestate, start_ns=now_ns)
        return (None, "") if span is None else (RequestTrace(span, now_s, now_ns), span.traceparent)


@dataclass(slots=True)
class RequestTrace:
    """The trace of a sequence. Times are readings of the scheduler's clock, seconds."""

    span: Span
    _begun_s: float
    _begun_ns: int
    _spans: list[tuple[str, float, float, Attributes]] = field(default_factory=list)
    _wait: Wait | None = None
    _waits_since_s: float = 0.0
    _first_token_s: float | None = None

    def waits(self, what: Wait, now_s: float) -> None:
        """Notes that the request waits from now on."""
        if self._wait != what:
            self.runs(now_s)
            self._wait, self._waits_since_s = what, now_s

    def runs(self, now_s: float) -> None:
        """Notes that the request no longer waits."""
        if self._wait is not None and now_s > self._waits_since_s:
            self._spans.append((self._wait, self._waits_since_s, now_s, {}))
        self._wait = None

    def chunk(self, start_s: float, end_s: float, *, first: int, count: int) -> None:
        """Notes a prefill chunk of `count` tokens from position `first` on."""
        attributes = {"triptych.first_position": first, "triptych.tokens": count}
        self._spans.append(("prefill_chunk", start_s, end_s, attributes))

    def first_token(self, now_s: float) -> None:
        """Notes the first token."""
        self._first_token_s = now_s
        self._spans.append(("first_token", self._begun_s, now_s, {}))

    def end(self, now_s: float, attributes: Attributes, error: str = "") -> None:
        """Writes all spans; `error` says why the request failed, if it did."""
        self.runs(now_s)
        if self._first_token_s is not None:
            self._spans.append(("decode", self._first_token_s, now_s, {}))
        for name, start_s, end_s, own in self._spans:
            self.span.child(name, self._ns(start_s), self._ns(end_s), own)
        self.span.end(self._ns(now_s), attributes, error)

    def _ns(self, clock_s: float) -> int:
        return self._begun_ns + round((clock_s - self._begun_s) * 1e9)
