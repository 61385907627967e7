"""Decode buckets follow the semantics of the VLLM_RBLN_DECODE_BATCH_BUCKET settings."""

import random
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler_svc.shapes.buckets import (
    BucketStrategy,
    BucketUsage,
    best_buckets,
    bucket_for,
    decode_buckets,
    plan_buckets,
    prefill_buckets,
    usage_of,
)


@pytest.mark.parametrize(
    ("strategy", "max_batch", "minimum", "step", "limit", "expected"),
    [
        ("exp", 32, 2, 2, 4, (4, 8, 16, 32)),  # the documented example
        ("exponential", 32, 1, 2, 16, (1, 2, 4, 8, 16, 32)),
        ("exp", 32, 1, 4, 16, (2, 8, 32)),
        ("exp", 12, 1, 2, 16, (1, 3, 6, 12)),
        ("exp", 1, 1, 2, 16, (1,)),
        ("linear", 8, 2, 2, 16, (2, 4, 6, 8)),
        ("linear", 8, 1, 3, 16, (2, 5, 8)),
        ("linear", 8, 1, 1, 3, (6, 7, 8)),
        ("linear", 32, 32, 1, 16, (32,)),
    ],
)
def test_buckets_go_down_from_the_largest_batch(
    strategy: BucketStrategy, max_batch: int, minimum: int, step: int, limit: int, expected: tuple[int, ...]
) -> None:
    """Each is divided or reduced by the step, down to the minimum or the limit of buckets."""
    assert decode_buckets(strategy, max_batch=max_batch, minimum=minimum, step=step, limit=limit) == expected


def test_manual_buckets_may_come_in_any_order() -> None:
    """They are neither rounded nor extended, and ascend."""
    assert decode_buckets("manual", max_batch=7, manual=(3, 1, 7, 3)) == (1, 3, 7)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"strategy": "exponential", "chunk": 512, "block_size": 16}, (64, 128, 256, 512)),
        ({"strategy": "exp", "chunk": 4096, "block_size": 1024}, (512, 1024, 2048, 4096)),
        ({"strategy": "exp", "chunk": 128, "block_size": 1024}, (64, 128)),
        ({"strategy": "exp", "chunk": 32, "block_size": 16}, (32,)),
        ({"strategy": "exp", "chunk": 192, "block_size": 64}, (192,)),  # 96 and 64 do not divide one another
        ({"strategy": "exp", "chunk": 512, "block_size": 16, "limit": 1}, (512,)),
        ({"strategy": "linear", "chunk": 256, "block_size": 16, "step": 80}, (96, 176, 256)),
        ({"strategy": "manual", "chunk": 512, "block_size": 16, "manual": (512, 48)}, (48, 512)),
    ],
)
def test_prefill_buckets_line_up_with_blocks(arguments: dict[str, Any], expected: tuple[int, ...]) -> None:
    """They end at the chunk; sizes off the grid of blocks are left out."""
    assert prefill_buckets(**arguments) == expected


@given(st.sampled_from(["exp", "linear"]), st.integers(1, 300), st.integers(2, 9), st.integers(1, 20))
def test_every_batch_maps_to_the_smallest_bucket_that_holds_it(
    strategy: BucketStrategy, max_batch: int, step: int, limit: int
) -> None:
    """This holds for all sizes from 1 to the largest batch."""
    buckets = decode_buckets(strategy, max_batch=max_batch, step=step, limit=limit)
    assert list(buckets) == sorted(set(buckets))
    assert buckets[-1] == max_batch
    assert len(buckets) <= limit
    for batch in range(1, max_batch + 1):
        chosen = bucket_for(batch, buckets)
        assert chosen == min(bucket for bucket in buckets if bucket >= batch)


def test_a_batch_beyond_the_largest_bucket_is_an_error() -> None:
    """It never silently runs at a smaller bucket."""
    with pytest.raises(ValueError, match="no bucket holds 9 rows"):
        bucket_for(9, (1, 8))


def test_work_counts_rows_and_padding() -> None:
    """Every step runs at the smallest bucket that holds it."""
    usage = usage_of({1: 3, 3: 2, 4: 1}, (2, 4))
    assert usage == BucketUsage((2, 4), num_steps=6, num_rows=13, padded_rows=5)
    assert usage.padding_share == 5 / 18
    assert usage_of({}, (2, 4)).padding_share == 0


def test_a_plan_compares_current_and_best_buckets() -> None:
    """The gain is the saved share of the rows."""
    plan = plan_buckets({3: 10}, (1, 2, 4), max_batch=4, graphs=3)
    assert (plan.current.padded_rows, plan.best.padded_rows, plan.gain) == (10, 0, 0.25)
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
