"""The bucket planner: the cost of buckets, and the cheapest ones."""

import random
import time

import pytest

from scheduler_svc.shapes.buckets import BucketUsage, StepCost, best_buckets, plan_buckets, usage_of


def test_work_counts_rows_and_padding() -> None:
    """Every step runs at the smallest bucket that holds it."""
    usage = usage_of({1: 3, 3: 2, 4: 1}, (2, 4))
    assert usage == BucketUsage((2, 4), num_steps=6, num_rows=13, padded_rows=5, cost=18)
    assert usage.padding_share == 5 / 18
    assert usage_of({}, (2, 4)).padding_share == 0


@pytest.mark.parametrize(
    ("counts", "max_batch", "graphs", "expected"),
    [
        ({}, 8, 4, (8,)),
        ({3: 7}, 8, 1, (8,)),
        ({3: 7}, 8, 2, (3, 8)),
        ({3: 7}, 8, 9, (3, 8)),
        ({8: 7}, 8, 3, (8,)),
        ({1: 100, 2: 10, 5: 50, 6: 50}, 8, 3, (1, 6, 8)),
        ({1: 100, 2: 10, 5: 50, 6: 50}, 6, 3, (1, 5, 6)),
    ],
)
def test_the_best_buckets(
    counts: dict[int, int], max_batch: int, graphs: int, expected: tuple[int, ...]
) -> None:
    """They are sizes that occur and the largest batch, with no more graphs than are useful."""
    assert best_buckets(counts, max_batch=max_batch, graphs=graphs) == expected


def test_a_plan_compares_current_and_best_buckets() -> None:
    """The gain is the saved share of the cost; a fixed cost per step dilutes it."""
    plan = plan_buckets({3: 10}, (1, 2, 4), max_batch=4, graphs=3)
    assert (plan.current.padded_rows, plan.best.padded_rows, plan.gain) == (10, 0, 0.25)
    diluted = plan_buckets({3: 10}, (1, 2, 4), max_batch=4, graphs=3, cost=StepCost(fixed=4, per_row=1))
    assert diluted.best.buckets == plan.best.buckets
    assert diluted.gain == 0.125
    assert plan_buckets({3: 10}, (3, 4), max_batch=4, graphs=1).gain < 0
    assert plan_buckets({}, (4,), max_batch=4, graphs=1).gain == 0


@pytest.mark.parametrize(
    ("counts", "max_batch", "graphs", "message"),
    [
        ({1: 1}, 0, 1, "largest decode batch must be at least 1"),
        ({1: 1}, 1, 0, "number of graphs must be at least 1"),
        ({9: 1}, 8, 1, "steps have 9 to 9 rows; only 1 to 8"),
        ({0: 1}, 8, 1, "steps have 0 to 0 rows"),
    ],
)
def test_a_bad_value_is_refused_with_its_rule(
    counts: dict[int, int], max_batch: int, graphs: int, message: str
) -> None:
    """The message names the broken rule."""
    with pytest.raises(ValueError, match=message):
        best_buckets(counts, max_batch=max_batch, graphs=graphs)


def test_thousands_of_sizes_are_planned_quickly() -> None:
    """4,096 sizes and 64 graphs take less than three seconds of CPU time."""
    numbers = random.Random(0)
    counts = {rows: numbers.randint(1, 10**9) for rows in range(1, 4097)}
    start = time.process_time()
    assert len(best_buckets(counts, max_batch=4096, graphs=64)) == 64
    assert time.process_time() - start < 3
