"""The spans of pooling requests."""

from protos.steps import PoolShape, SlotOutput, StepResult
from scheduler_svc.dispatch.engine import Engine
from scheduler_svc.dispatch.placement import AttachedReplica
from scheduler_svc.policy.order import PriorityFairOrder
from scheduler_svc.replica.pooling import PoolScheduler
from scheduler_svc.replica.suspects import Loss
from scheduler_svc.requests.admission import Submission
from scheduler_svc.requests.trace import TraceContext
from tests.support.scheduler.factories import ListSink, make_pool_submission, make_pooled_model
from tests.support.tracing.fake_tracer import FakeTracer

SHAPE = PoolShape(8, 1)
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


class Pools:
    """An engine with a clock, and replicas that run one text at a time."""

    def __init__(self) -> None:
        self.now = 0.0
        self.engine = Engine(
            max_waiting=9, max_waiting_tokens=99, clock=lambda: self.now, order=PriorityFairOrder()
        )
        self.engine.model = make_pooled_model(SHAPE)

    def attach(self, name: str) -> PoolScheduler:
        scheduler = PoolScheduler([SHAPE], 2, self.engine, clock=lambda: self.now)
        self.engine.attach(name, AttachedReplica(scheduler, lambda: None))
        return scheduler


def submission(name: str, tracer: FakeTracer) -> Submission:
    return make_pool_submission(request_id=name, tracing=TraceContext(PARENT, tracer=tracer))


def test_a_pooling_request_has_a_span_and_names_its_replica() -> None:
    """Its time in the queue lies below it, and the worker hears of it; an aborted one has a span, too."""
    pools, tracer, sink = Pools(), FakeTracer(), ListSink()
    pools.engine.submit_all([submission(name, tracer) for name in "ab"], sink)
    pools.now = 2.0
    scheduler = pools.attach("r0")
    plan = scheduler.next_plan()
    assert plan is not None
    assert [each.traceparent for each in plan.admit] == [PARENT]
    pools.now = 3.0
    scheduler.update(StepResult(1, outputs=(SlotOutput(0, pooled=(0.5, 0.5)),), execute_us=500))
    pools.engine.abort("b")
    done, aborted = tracer.spans
    assert [
        (each.name, each.start_ns - done.start_ns, each.end_ns - done.start_ns) for each in done.children
    ] == [("queue", 0, 2_000_000_000)]
    assert (done.end_ns - done.start_ns, done.attributes["triptych.replica_id"]) == (3_000_000_000, "r0")
    assert aborted.attributes["triptych.finish_reason"] == "abort"
    assert [event.replica_id for event in sink.events] == ["r0", ""]
    counts = pools.engine.totals()["r0"]
    assert counts.counts["vllm:prompt_tokens",] == 2
    assert sum(counts.distributions["triptych:step_seconds", "pool", "1x8"].counts) == 1


def test_a_request_of_a_lost_replica_waits_again() -> None:
    """Each time in the queue is a span of its own."""
    pools, tracer = Pools(), FakeTracer()
    pools.engine.submit(submission("a", tracer), ListSink())
    for name, second in ("r0", 2.0), ("r1", 5.0):
        pools.now = second
        assert pools.attach(name).next_plan() is not None
        pools.now = second + 1
        pools.engine.detach(name, Loss.LEFT)
    pools.engine.abort("a")
    (span,) = tracer.spans
    waits = [(child.start_ns - span.start_ns, child.end_ns - span.start_ns) for child in span.children]
    assert waits == [(0, 2 * 10**9), (3 * 10**9, 5 * 10**9)]
