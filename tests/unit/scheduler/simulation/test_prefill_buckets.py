"""What prefill buckets are for, in virtual time: an 8B model on an H100, prompts of 100 tokens."""

import pytest

from tests.support.scheduler.simulated import poisson, simulated


@pytest.mark.parametrize(("rate", "with_buckets_s", "with_one_size_s"), [(30.0, 0.05, 1.0), (40.0, 0.4, 2.5)])
def test_short_prompts_do_not_queue_behind_their_padding(
    rate: float, with_buckets_s: float, with_one_size_s: float
) -> None:
    """At 30 a second a chunk of 512 for each prompt is more than the device computes; one of 128 is not."""
    requests = poisson(rate, 400, 100, 200)
    buckets, one_size = (simulated(requests, prefill_bucket_limit=limit) for limit in (4, 1))
    assert buckets["ttft_s"]["p50"] <= with_buckets_s
    assert one_size["ttft_s"]["p50"] >= with_one_size_s
    assert buckets["padding_share"] < one_size["padding_share"] / 2
