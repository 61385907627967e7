"""The worker's part of traces: spans of the steps that sampled requests are in.

They are written on the event loop, from plans and results, so the model thread knows nothing of them.
"""

import time
from dataclasses import dataclass

from protos.service.tracing import Attributes, Tracer
from protos.steps import Decode, Pool, Prefill, StepPlan, StepResult


@dataclass(slots=True)
class _Traced:
    """A slot with a sampled request."""

    traceparent: str
    """The span that the request's spans belong to."""
    num_steps: int = 0
    """Its decode steps."""
    busy_us: int = 0
    """Time that they took, microseconds."""
    begun_ns: int = 0
    """When the first one began."""
    ended_ns: int = 0
    """When the last one ended."""


class StepTraces:
    """Writes a span for each prefill chunk and each pooling batch, and one for all decode steps of a request.

    Without sampled requests, a step costs a few comparisons.
    """

    def __init__(self, tracer: Tracer) -> None:
        """Starts without requests."""
        self._tracer = tracer
        self._slots: dict[int, _Traced] = {}

    def note(self, plan: StepPlan, result: StepResult) -> None:
        """Notes a result, just after the step has ended."""
        if result.lease_index == 0:
            self._apply(plan)
        if self._slots and plan.work is not None and not result.void:
            self._note_work(plan, result)

    def close(self) -> None:
        """Writes the spans of requests that still have a slot: the stream has ended."""
        for slot in list(self._slots):
            self._leave(slot)

    def _apply(self, plan: StepPlan) -> None:
        """Follows the requests that leave slots, and those that get one."""
        if self._slots:
            for slot in plan.release:
                self._leave(slot)
        for admission in plan.admit:
            if admission.traceparent:
                self._slots[admission.slot] = _Traced(admission.traceparent)

    def _note_work(self, plan: StepPlan, result: StepResult) -> None:
        end_ns = time.time_ns()
        start_ns = end_ns - result.execute_us * 1000
        match plan.work:
            case Prefill(slot, start, num_tokens):
                attributes = {"triptych.first_position": start, "triptych.tokens": num_tokens}
                self._write(slot, "prefill_step", start_ns, end_ns, attributes)
            case Pool(slots, shape):
                for slot in slots:
                    self._write(slot, "pool_step", start_ns, end_ns, {"triptych.shape": str(shape)})
            case Decode(slots):
                for slot in self._slots.keys() & set(slots):
                    traced = self._slots[slot]
                    traced.begun_ns = traced.begun_ns or start_ns
                    traced.num_steps, traced.ended_ns = traced.num_steps + 1, end_ns
                    traced.busy_us += result.execute_us

    def _write(self, slot: int, name: str, start_ns: int, end_ns: int, attributes: Attributes) -> None:
        if (traced := self._slots.get(slot)) is None:
            return
        span = self._tracer.begin(name, traced.traceparent, start_ns=start_ns)
        if span is not None:
            span.end(end_ns, attributes)

    def _leave(self, slot: int) -> None:
        traced = self._slots.get(slot)
        if traced is not None and traced.num_steps:
            attributes = {"triptych.steps": traced.num_steps, "triptych.busy_s": traced.busy_us * 1e-6}
            self._write(slot, "decode_steps", traced.begun_ns, traced.ended_ns, attributes)
        self._slots.pop(slot, None)
