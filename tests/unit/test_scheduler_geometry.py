"""Static shapes: each rule refuses with its own message."""

import dataclasses

import pytest

from protos.errors import ConfigurationRefused
from scheduler_svc.geometry import DeviceLimits, Geometry

LIMITS = DeviceLimits(max_context=2048, block_size_multiple=32, max_batch=64, max_chunk=512)
GOOD = Geometry(max_model_len=2048, max_num_seqs=8, chunk=128, block_size=128, buckets=(1, 2, 4, 8))


@pytest.mark.parametrize(("chunk", "block_size"), [(128, 128), (128, 512), (256, 64), (32, 32)])
def test_chunk_and_block_may_divide_one_another_either_way(chunk: int, block_size: int) -> None:
    """Large blocks hold several chunks, large chunks fill several blocks."""
    dataclasses.replace(GOOD, chunk=chunk, block_size=block_size).check(LIMITS)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_model_len": 2049}, "max_model_len 2049 exceeds the model's context of 2048"),
        ({"block_size": 100}, "block_size 100 must be a multiple of 32"),
        ({"chunk": 96}, "must divide one another"),
        ({"chunk": 1024, "block_size": 1024}, "exceeds this device's limit of 512"),
        ({"max_num_seqs": 65, "buckets": (65,)}, "max_num_seqs 65 exceeds this device's limit of 64"),
        ({"buckets": (1, 4)}, "the largest decode bucket 4 is smaller than max_num_seqs 8"),
    ],
)
def test_a_broken_rule_is_named_with_the_setting(change: dict[str, object], message: str) -> None:
    """One line that says what to change."""
    with pytest.raises(ConfigurationRefused, match=message):
        dataclasses.replace(GOOD, **change).check(LIMITS)  # type: ignore[arg-type]
