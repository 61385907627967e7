"""The spans of sequences: what is written, and when nothing is."""

from dataclasses import replace

import pytest

from protos.errors import InvalidArgument
from protos.triptych.v1 import common_pb2
from scheduler_svc.requests.admission import Submission
from scheduler_svc.requests.sampling import Grammar
from scheduler_svc.requests.trace import TraceContext
from tests.support.scheduler.factories import Rig, make_rig, make_submission
from tests.support.tracing.fake_tracer import FakeSpan, FakeTracer

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
STRUCTURED = common_pb2.StructuredOutput(regex="a+")
GRAMMAR = Grammar(STRUCTURED.SerializeToString(deterministic=True))


def traced(submission: Submission, tracer: FakeTracer | None) -> Submission:
    return replace(submission, tracing=TraceContext(PARENT, tracer=tracer))


def parts(span: FakeSpan) -> list[tuple[str, float, float]]:
    """Returns the spans below a span: names, and times in seconds after its beginning."""
    return [
        (each.name, (each.start_ns - span.start_ns) / 1e9, (each.end_ns - span.start_ns) / 1e9)
        for each in span.children
    ]


def timed_run(rig: Rig) -> None:
    """Runs to the end; each step takes a second."""
    while rig.step():
        rig.now += 1.0


def test_a_sequence_has_a_span_for_each_part_of_its_life() -> None:
    """It waits, its prompt is computed in chunks, its first token comes, and it decodes."""
    rig, tracer = make_rig(), FakeTracer()
    rig.submit(traced(make_submission(list(range(3, 13)), request_id="a", max_tokens=3), tracer))
    rig.submit(make_submission(list(range(30, 38)), request_id="b"))
    timed_run(rig)
    (span,) = tracer.spans
    assert (span.name, span.traceparent) == ("llm_request", PARENT)
    names = [name for name, _, _ in parts(span)]
    assert names == ["prefill_chunk", "prefill_chunk", "prefill_chunk", "first_token", "decode"]
    chunks = [each.attributes["triptych.tokens"] for each in span.children[:3]]
    assert chunks == [4, 4, 2]
    assert span.attributes["gen_ai.usage.prompt_tokens"] == 10
    assert span.attributes["gen_ai.usage.completion_tokens"] == 3
    assert span.attributes["triptych.finish_reason"] == "length"
    assert span.attributes["gen_ai.latency.e2e"] == pytest.approx((span.end_ns - span.start_ns) / 1e9)
    assert not span.error


def test_a_sequence_waits_for_its_grammar_and_then_for_a_slot() -> None:
    """Both waits are spans, each as long as it took."""
    rig, tracer = make_rig(), FakeTracer()
    submission = make_submission(request_id="a", max_tokens=1)
    params = common_pb2.SamplingParams(max_tokens=1)
    params.structured_output.CopyFrom(STRUCTURED)
    rig.submit(traced(replace(submission, sampling=type(submission.sampling)(params)), tracer))
    rig.now += 2.0
    rig.engine.grammar_compiled("replica-0", GRAMMAR)
    rig.run()
    assert parts(tracer.spans[0])[0] == ("grammar", 0.0, 2.0)


def test_a_preempted_sequence_waits_again() -> None:
    """Each time in the queue is a span of its own."""
    rig, tracer = make_rig(num_blocks=9), FakeTracer()
    for name in "ab":
        rig.submit(traced(make_submission([3, 4, 5, 6], request_id=name, max_tokens=20), tracer))
    timed_run(rig)
    preempted = [span for span in tracer.spans if span.attributes["triptych.preemptions"]]
    assert preempted
    assert all("queue" in [name for name, _, _ in parts(span)] for span in preempted)


@pytest.mark.parametrize("waits", [True, False])
def test_sequences_that_fail_or_are_aborted_have_spans_too(waits: bool) -> None:
    """In the queue or with a slot, the span says why it ended."""
    rig, tracer = make_rig(), FakeTracer()
    for name in "ab":
        rig.submit(traced(make_submission(request_id=name, max_tokens=20), tracer))
    if not waits:
        rig.step()
        rig.step()
    request = rig.engine.find("a")
    assert request is not None
    rig.engine.fail(request, InvalidArgument("on purpose"))
    rig.engine.abort("b")
    assert [span.error for span in tracer.spans] == ["InvalidArgument", ""]
    assert [span.attributes["triptych.finish_reason"] for span in tracer.spans] == ["error", "abort"]


@pytest.mark.parametrize(
    ("tracer", "told"), [(None, PARENT), (FakeTracer(samples=False), "")], ids=["off", "not sampled"]
)
def test_workers_hear_of_sampled_traces_alone(tracer: FakeTracer | None, told: str) -> None:
    """A scheduler that writes no spans passes the client's context on."""
    rig = make_rig()
    rig.submit(traced(make_submission(request_id="a"), tracer))
    (plan,) = rig.step()
    assert [admission.traceparent for admission in plan.admit] == [told]
    request = rig.engine.find("a")
    assert request is not None
    assert request.trace is None
