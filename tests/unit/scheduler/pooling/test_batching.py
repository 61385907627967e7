"""The queue of a pooling deployment: choice and contents of the next batch."""

import pytest

from protos.steps import PoolShape
from scheduler_svc.policy.order import PriorityFairOrder
from scheduler_svc.pooling.batching import PoolQueue, choose_batch
from scheduler_svc.shapes.shape_config import default_shapes
from tests.support.scheduler.factories import make_request


def shape(batch: int, prompt_len: int) -> PoolShape:
    return PoolShape(prompt_len, batch)


def queue_of(*shapes: PoolShape) -> PoolQueue:
    return PoolQueue(shapes, PriorityFairOrder)


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


def test_a_batch_has_one_prompt_length() -> None:
    """A longer request between shorter ones waits for its own batch."""
    queue = queue_of(shape(4, 4), shape(1, 8))
    requests = [make_request(range(3, 3 + length)) for length in (4, 5, 1, 3)]
    for request in requests:
        queue.add(request)
    assert queue.backlog.num_tokens == 13
    assert queue.take(0) == (shape(4, 4), [requests[0], requests[2], requests[3]])
    assert queue.take(0) == (shape(1, 8), [requests[1]])
    assert queue.take(0) is None
    assert (len(queue), queue.backlog.num_tokens) == (0, 0)


def test_priority_then_arrival() -> None:
    """Batches follow priority, then arrival."""
    queue = queue_of(shape(2, 4))
    late, urgent, early = make_request(), make_request(priority=-1), make_request()
    late, early = early, late
    for request in (late, urgent, early):
        queue.add(request)
    assert queue.take(0) == (shape(2, 4), [urgent, early])
    assert queue.take(0) == (shape(2, 4), [late])


def test_tenants_alternate() -> None:
    """One tenant's flood does not hold up another tenant's single request."""
    queue = queue_of(shape(1, 4))
    flood = [make_request(tenant="a") for _ in range(5)]
    single = make_request(tenant="b")
    for request in (*flood, single):
        queue.add(request)
    order = [taken[1][0] for _ in range(6) if (taken := queue.take(0)) is not None]
    assert order.index(single) <= 1


def test_a_removed_request_is_in_no_batch() -> None:
    """Removal succeeds once."""
    queue = queue_of(shape(4, 4))
    staying, leaving = make_request(), make_request()
    queue.add(staying)
    queue.add(leaving)
    assert queue.remove(leaving)
    assert not queue.remove(leaving)
    assert len(queue) == queue.backlog.num_requests == 1
    assert queue.take(0) == (shape(4, 4), [staying])


def test_draining_returns_requests_in_order() -> None:
    """No request is left in any queue."""
    queue = queue_of(shape(1, 4), shape(1, 8))
    requests = [make_request(range(3, 3 + length)) for length in (8, 2, 7)]
    for request in requests:
        queue.add(request)
    assert queue.drain() == requests
    assert queue.take(0) is None


def test_packed_shapes_mix_lengths() -> None:
    """A batch takes requests in turn until one does not fit, in the smallest shape that holds them."""
    small, middle, large = (PoolShape(size, texts, packed=True) for size, texts in ((4, 1), (8, 3), (12, 3)))
    queue = queue_of(small, middle, large)
    requests = [make_request(range(3, 3 + length)) for length in (5, 2, 6, 1, 1, 1, 3)]
    for request in requests:
        queue.add(request)
    assert queue.take(0) == (middle, requests[:2])  # 6 more tokens would be 13
    assert queue.take(0) == (middle, requests[2:5])  # a fourth text is too many
    assert queue.take(0) == (middle, requests[5:])  # the smallest has room for one text only
    assert queue.take(0) is None
    assert (len(queue), queue.backlog.num_tokens) == (0, 0)


def test_short_texts_do_not_fill_the_context() -> None:
    """A batch holds at most 512 tokens, unless its first request needs a longer shape."""
    queue = queue_of(*default_shapes(2048, 4096, packs_texts=True))
    requests = [make_request([3] * length) for length in (300, 200, 20, 600, 400, 30, 2000)]
    for request in requests:
        queue.add(request)
    taken = [queue.take(0) for _ in range(5)]
    # The second batch starts because 20 more tokens would be 520. 600 tokens need the shape of 1024.
    batches = [requests[:2], requests[2:3], requests[3:5], requests[5:6], requests[6:]]
    assert [one[1] for one in taken if one] == batches
    assert [one[0].prompt_len for one in taken if one] == [512, 24, 1024, 32, 2048]


def test_a_suspect_is_alone_in_a_packed_batch() -> None:
    """It neither joins a batch nor takes others along."""
    queue = queue_of(PoolShape(8, 4, packed=True))
    requests = [make_request(range(3, 5)) for _ in range(3)]
    requests[1].worker_losses = 1
    for request in requests:
        queue.add(request)
    taken = [queue.take(0), queue.take(0)]
    assert [batch[1] for batch in taken if batch] == [[requests[0], requests[2]], [requests[1]]]
