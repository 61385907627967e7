"""Static pooling batches: shapes from settings, which batch is chosen, who is in it."""

import pytest

from protos.steps import PoolShape
from scheduler_svc.policy.order import PriorityFairOrder
from scheduler_svc.pooling.batching import PoolQueue, choose_batch
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
def test_the_batch_that_is_filled_best(waiting: int, batches: list[int], chosen: int) -> None:
    """All who wait if at least half of the rows are theirs, else the largest batch that they fill."""
    assert choose_batch(waiting, batches) == chosen


def test_a_batch_is_of_one_prompt_length() -> None:
    """That of whoever's turn it is; a longer one in between waits for its own batch."""
    queue = queue_of(shape(4, 4), shape(1, 8))
    requests = [make_request(range(3, 3 + length)) for length in (4, 5, 1, 3)]
    for request in requests:
        queue.add(request)
    assert queue.num_tokens == 13
    assert queue.take(0) == (shape(4, 4), [requests[0], requests[2], requests[3]])
    assert queue.take(0) == (shape(1, 8), [requests[1]])
    assert queue.take(0) is None
    assert (len(queue), queue.num_tokens) == (0, 0)


def test_priority_then_arrival() -> None:
    """As in the queue of a generating deployment."""
    queue = queue_of(shape(2, 4))
    late, urgent, early = make_request(), make_request(priority=-1), make_request()
    late, early = early, late
    for request in (late, urgent, early):
        queue.add(request)
    assert queue.take(0) == (shape(2, 4), [urgent, early])
    assert queue.take(0) == (shape(2, 4), [late])


def test_tenants_take_turns() -> None:
    """One tenant's flood does not hold up another's single request."""
    queue = queue_of(shape(1, 4))
    flood = [make_request(tenant="a") for _ in range(5)]
    single = make_request(tenant="b")
    for request in (*flood, single):
        queue.add(request)
    order = [taken[1][0] for _ in range(6) if (taken := queue.take(0)) is not None]
    assert order.index(single) <= 1


def test_who_leaves_is_in_no_batch() -> None:
    """Removal is exact and happens once."""
    queue = queue_of(shape(4, 4))
    staying, leaving = make_request(), make_request()
    queue.add(staying)
    queue.add(leaving)
    assert queue.remove(leaving)
    assert not queue.remove(leaving)
    assert list(queue) == [staying]
    assert queue.take(0) == (shape(4, 4), [staying])


def test_drained_in_order() -> None:
    """Nobody is left in any of the queues."""
    queue = queue_of(shape(1, 4), shape(1, 8))
    requests = [make_request(range(3, 3 + length)) for length in (8, 2, 7)]
    for request in requests:
        queue.add(request)
    assert queue.drain() == requests
    assert queue.take(0) is None
