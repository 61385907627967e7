"""The spans of pooling requests."""

from collections.abc import Callable

from protos.steps import PoolShape, SlotOutput, StepResult
from protos.triptych.v1 import common_pb2
from scheduler_svc.policy.order import PriorityFairOrder
from scheduler_svc.pooling.engine import PoolEngine, PoolReplica, PoolSubmission
from scheduler_svc.pooling.tasks import PooledModel
from scheduler_svc.replica.suspects import Loss
from scheduler_svc.requests.request import Event
from scheduler_svc.requests.trace import TraceContext
from tests.support.tracing.fake_tracer import FakeTracer

MODEL = PooledModel(97, frozenset({common_pb2.POOL_TASK_EMBED}), 2, common_pb2.PoolingInfo())
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


class Events:
    """A sink."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def push(self, event: Event) -> None:
        self.events.append(event)

    def push_tokens(self, *_: object) -> None:
        raise AssertionError


def make_engine(clock: Callable[[], float]) -> PoolEngine:
    engine = PoolEngine(max_waiting=9, max_waiting_tokens=99, clock=clock, make_order=PriorityFairOrder)
    engine.serve(MODEL, (PoolShape(8, 1),))
    return engine


def submission(name: str, tracer: FakeTracer) -> PoolSubmission:
    pooling = common_pb2.PoolingParams(task=common_pb2.POOL_TASK_EMBED)
    return PoolSubmission(name, (5, 6), pooling, tracing=TraceContext(PARENT, tracer=tracer))


def test_a_pooling_request_has_a_span_and_names_its_replica() -> None:
    """Its time in the queue lies below it, and the worker hears of it; an aborted one has a span, too."""
    now, tracer, sink = 0.0, FakeTracer(), Events()
    engine = make_engine(lambda: now)
    engine.submit_pooling([submission(name, tracer) for name in "ab"], sink)
    scheduler = engine.make_scheduler("r0", MODEL)
    now = 2.0
    engine.attach("r0", PoolReplica(scheduler, lambda: None))
    plan = scheduler.step()
    assert plan is not None
    assert [each.traceparent for each in plan.admit] == [PARENT]
    now = 3.0
    scheduler.update(StepResult(1, outputs=(SlotOutput(0, pooled=(0.5, 0.5)),), execute_us=500))
    engine.abort("b")
    done, aborted = tracer.spans
    assert [
        (each.name, each.start_ns - done.start_ns, each.end_ns - done.start_ns) for each in done.children
    ] == [("queue", 0, 2_000_000_000)]
    assert (done.end_ns - done.start_ns, done.attributes["triptych.replica_id"]) == (3_000_000_000, "r0")
    assert aborted.attributes["triptych.finish_reason"] == "abort"
    assert [event.replica_id for event in sink.events] == ["r0", ""]
    counts = engine.totals()["r0"]
    assert counts.counts["vllm:prompt_tokens",] == 2
    assert sum(counts.distributions["triptych:step_seconds", "pool", "1x8"].counts) == 1


def test_a_request_of_a_lost_replica_waits_again() -> None:
    """Each time in the queue is a span of its own."""
    now, tracer = 0.0, FakeTracer()
    engine = make_engine(lambda: now)
    engine.submit_pooling([submission("a", tracer)], Events())
    for name, second in ("r0", 2.0), ("r1", 5.0):
        now = second
        scheduler = engine.make_scheduler(name, MODEL)
        engine.attach(name, PoolReplica(scheduler, lambda: None))
        assert scheduler.step() is not None
        now = second + 1
        engine.detach(name, Loss.LEFT)
    engine.abort("a")
    (span,) = tracer.spans
    waits = [(child.start_ns - span.start_ns, child.end_ns - span.start_ns) for child in span.children]
    assert waits == [(0, 2 * 10**9), (3 * 10**9, 5 * 10**9)]
