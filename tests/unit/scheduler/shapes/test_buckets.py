"""Decode buckets follow the semantics of the VLLM_RBLN_DECODE_BATCH_BUCKET settings."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler_svc.shapes.buckets import BucketStrategy, bucket_for, decode_buckets


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


def test_manual_buckets_are_used_as_given() -> None:
    """They are neither rounded nor extended."""
    assert decode_buckets("manual", max_batch=7, manual=(1, 3, 7)) == (1, 3, 7)


@pytest.mark.parametrize("manual", [(8, 4, 2), (4, 2, 8), (2, 4, 8, 4, 8)])
def test_manual_buckets_may_come_in_any_order(manual: tuple[int, ...]) -> None:
    """They are used in ascending order."""
    assert decode_buckets("manual", max_batch=8, manual=manual) == (2, 4, 8)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"strategy": "exp", "max_batch": 0}, "at least 1"),
        ({"strategy": "exp", "max_batch": 8, "step": 1}, "step must be at least 2"),
        ({"strategy": "linear", "max_batch": 8, "step": 0}, "step must be at least 1"),
        ({"strategy": "exp", "max_batch": 8, "minimum": 9}, "between 1 and the largest batch 8"),
        ({"strategy": "exp", "max_batch": 8, "minimum": 0}, "between 1"),
        ({"strategy": "exp", "max_batch": 8, "limit": 0}, "number of buckets"),
        ({"strategy": "fibonacci", "max_batch": 8}, "unknown bucket strategy"),
        ({"strategy": "manual", "max_batch": 8}, "need a list"),
        ({"strategy": "manual", "max_batch": 8, "manual": (0, 8)}, "at least 1"),
        ({"strategy": "manual", "max_batch": 8, "manual": (16, 4)}, "must equal the largest batch 8, not 16"),
        ({"strategy": "manual", "max_batch": 8, "manual": (1, 4)}, "must equal the largest batch 8"),
    ],
)
def test_a_bad_setting_is_refused_with_its_rule(arguments: dict[str, object], message: str) -> None:
    """The message names the broken rule."""
    with pytest.raises(ValueError, match=message):
        decode_buckets(**arguments)  # type: ignore[arg-type]


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
