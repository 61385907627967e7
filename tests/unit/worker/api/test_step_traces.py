"""The worker's spans of steps."""

from protos.steps import Admission, Decode, Prefill, StepPlan, StepResult
from protos.triptych.v1 import common_pb2
from tests.support.tracing.fake_tracer import FakeTracer
from worker_svc.api.step_traces import StepTraces


def admission(slot: int, traceparent: str) -> Admission:
    return Admission(slot, (3, 4), 0, common_pb2.SamplingParams(), {}, traceparent=traceparent)


def test_only_sampled_requests_have_spans() -> None:
    """Void and idle plans have none either. The end of a stream writes what is left."""
    tracer = FakeTracer()
    traces = StepTraces(tracer)
    traces.note(StepPlan(1, Prefill(0, 0, 2, sample=True), admit=(admission(0, ""),)), StepResult(1))
    traces.note(
        StepPlan(2, Prefill(1, 0, 2, sample=True), admit=(admission(1, "p"),)), StepResult(2, execute_us=7000)
    )
    lease = StepPlan(3, Decode((0, 1), (2, 2), 2, 4))
    for index in range(3):
        traces.note(lease, StepResult(3, (5, 6), lease_index=index, execute_us=1000))
    traces.note(lease, StepResult(3, void=True, lease_index=3))
    traces.note(StepPlan(4), StepResult(4))
    assert [span.name for span in tracer.spans] == ["prefill_step"]
    assert tracer.spans[0].end_ns - tracer.spans[0].start_ns == 7_000_000
    traces.close()
    decoded = tracer.spans[1]
    assert (decoded.name, decoded.traceparent) == ("decode_steps", "p")
    assert decoded.attributes == {"triptych.steps": 3, "triptych.busy_s": 0.003}


def test_a_slot_belongs_to_its_last_request() -> None:
    """A slot that is released and given away in one plan has two requests, each with its own steps."""
    tracer = FakeTracer()
    traces = StepTraces(tracer)
    traces.note(StepPlan(1, Decode((1,), (2,), 1), admit=(admission(1, "a"),)), StepResult(1, (5,)))
    traces.note(
        StepPlan(2, Decode((1,), (2,), 1), release=(1,), admit=(admission(1, "b"),)), StepResult(2, (5,))
    )
    traces.note(StepPlan(3, release=(1,)), StepResult(3))
    assert [(span.name, span.traceparent) for span in tracer.spans] == [
        ("decode_steps", "a"),
        ("decode_steps", "b"),
    ]
