"""A pooling replica: choice and contents of the next batch, and the spans of its requests."""

from typing import Any

import pytest

from protos.steps import Pool as PoolWork
from protos.steps import PoolShape, SlotOutput, StepResult
from scheduler_svc.engine.engine import Engine
from scheduler_svc.engine.placement import AttachedReplica
from scheduler_svc.policy.order import PriorityFairOrder
from scheduler_svc.replica.pooling import PoolScheduler, choose_batch
from scheduler_svc.requests.trace import TraceContext
from scheduler_svc.shapes.shape_config import default_shapes
from tests.support.scheduler.factories import ListSink, make_pool_submission, make_pooled_model
from tests.support.tracing.fake_tracer import FakeTracer

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def shape(batch: int, prompt_len: int) -> PoolShape:
    return PoolShape(prompt_len, batch)


class Pool:
    """An engine with one replica, driven by hand. Requests are numbered in the order of submission."""

    def __init__(self, *shapes: PoolShape) -> None:
        self.now = 0.0
        self.engine = Engine(
            max_waiting=99, max_waiting_tokens=99_999, clock=lambda: self.now, order=PriorityFairOrder()
        )
        self.engine.model = make_pooled_model(*shapes)
        self.scheduler = PoolScheduler(shapes, 2, self.engine, clock=lambda: self.now)
        self.count = 0

    def add(self, *lengths: int, **fields: Any) -> None:
        """Submits requests of these lengths."""
        for length in lengths:
            name = str(self.count)
            self.engine.submit(make_pool_submission([5] * length, request_id=name, **fields), ListSink())
            self.count += 1

    def attach(self) -> None:
        """Adds the replica; one request becomes the first of its next batch."""
        self.engine.attach("r0", AttachedReplica(self.scheduler, lambda: None))

    def batches(self) -> list[tuple[PoolShape, list[int]]]:
        """Runs the replica until nothing waits, and returns shape and requests of each step."""
        if not self.engine.replicas:
            self.attach()
        found = []
        while (plan := self.scheduler.next_plan()) is not None:
            assert isinstance(plan.work, PoolWork)
            found.append((plan.work.shape, [int(one.request_id) for one in plan.admit]))
            outputs = tuple(SlotOutput(one.slot, pooled=(0.5, 0.5)) for one in plan.admit)
            self.scheduler.update(StepResult(plan.step, outputs=outputs))
            self.engine.dispatch()
        assert not self.engine.live()
        return found


@pytest.mark.parametrize(
    ("waiting", "batches", "chosen"),
    [
        (1, [1, 4, 16], 1),
        (2, [1, 4, 16], 4),
        (4, [1, 4, 16], 4),
        (5, [1, 4, 16], 4),  # 11 of 16 rows would stay empty
        (8, [1, 4, 16], 16),
        (17, [1, 4, 16], 16),
        (1, [4, 8], 4),  # nothing smaller
        (1, [8], 8),
        (99, [8], 8),
        (3, [1], 1),
    ],
)
def test_the_best_filled_batch_is_chosen(waiting: int, batches: list[int], chosen: int) -> None:
    """The smallest batch that all fit into, unless more than half of it would be padding."""
    assert choose_batch(waiting, batches) == chosen


@pytest.mark.parametrize(
    ("waiting", "batches", "chosen"),
    [
        (7, [1, 2, 4, 8], 8),  # an eighth is padding
        (6, [1, 2, 4, 8], 4),
        (3, [1, 2, 4], 2),
        (12, [4, 8, 16], 8),
        (6, [1, 8], 8),  # six steps of one row would take longer
        (3, [1, 8], 1),
    ],
)
def test_costly_padding_is_avoided(waiting: int, batches: list[int], chosen: int) -> None:
    """Where rows of padding cost as much as others, several full batches are better."""
    assert choose_batch(waiting, batches, padding_costs=True) == chosen


def test_priority_then_arrival() -> None:
    """Batches follow priority, then arrival."""
    pool = Pool(shape(2, 4))
    pool.add(3)
    pool.add(3, priority=-1)
    pool.add(3)
    assert pool.batches() == [(shape(2, 4), [1, 0]), (shape(2, 4), [2])]


def test_tenants_alternate() -> None:
    """One tenant's flood does not hold up another tenant's request, within a batch and between batches."""
    pool = Pool(shape(1, 4), shape(2, 8))
    pool.add(*[3] * 5, tenant="a")
    pool.add(3, tenant="b")
    pool.add(*[8] * 5, tenant="c")
    pool.add(8, tenant="d")
    order = [requests for _, requests in pool.batches()]
    assert [5] in order[:3]
    assert [6, 11] in order


def test_packed_shapes_mix_lengths() -> None:
    """A batch takes requests in turn until one does not fit, in the smallest shape that holds them."""
    small, middle, large = (PoolShape(size, texts, packed=True) for size, texts in ((4, 1), (8, 3), (12, 3)))
    pool = Pool(small, middle, large)
    pool.add(5, 2, 6, 1, 1, 1, 3)
    # 6 more tokens would be 13; a fourth text is too many; the smallest has room for one text only.
    assert pool.batches() == [(middle, [0, 1]), (middle, [2, 3, 4]), (middle, [5, 6])]


def test_short_texts_do_not_fill_the_context() -> None:
    """A batch holds at most 512 tokens, unless its first request needs a longer shape."""
    pool = Pool(*default_shapes(2048, 4096, packs_texts=True))
    pool.add(300, 200, 20, 600, 400, 30, 2000)
    batches = pool.batches()
    # The second batch starts because 20 more tokens would be 520. 600 tokens need the shape of 1024.
    assert [requests for _, requests in batches] == [[0, 1], [2], [3, 4], [5], [6]]
    assert [one.prompt_len for one, _ in batches] == [512, 24, 1024, 32, 2048]


def test_a_pooling_request_has_a_span_and_names_its_replica() -> None:
    """Its time in the queue lies below it, and the worker hears of it; an aborted one has a span, too."""
    pool, tracer, sink = Pool(PoolShape(8, 1)), FakeTracer(), ListSink()
    tracing = TraceContext(PARENT, tracer=tracer)
    pool.engine.submit_all([make_pool_submission(request_id=name, tracing=tracing) for name in "ab"], sink)
    pool.now = 2.0
    pool.attach()
    plan = pool.scheduler.next_plan()
    assert plan is not None
    assert [each.traceparent for each in plan.admit] == [PARENT]
    pool.now = 3.0
    pool.scheduler.update(StepResult(1, outputs=(SlotOutput(0, pooled=(0.5, 0.5)),), execute_us=500))
    pool.engine.abort("b")
    done, aborted = tracer.spans
    assert [
        (each.name, each.start_ns - done.start_ns, each.end_ns - done.start_ns) for each in done.children
    ] == [("queue", 0, 2_000_000_000)]
    assert (done.end_ns - done.start_ns, done.attributes["triptych.replica_id"]) == (3_000_000_000, "r0")
    assert aborted.attributes["triptych.finish_reason"] == "abort"
    assert [event.replica_id for event in sink.events] == ["r0", ""]
    counts = pool.engine.totals()["r0"]
    assert counts.counts["vllm:prompt_tokens",] == 2
    assert sum(counts.distributions["triptych:step_seconds", "pool", "1x8"].counts) == 1
