"""Static shapes: each rule refuses with its own message."""

import dataclasses

import pytest

from protos.errors import ConfigurationRefused
from protos.steps import GroupKind
from scheduler_svc.shapes.shape_config import DeviceLimits, KvGroup, ShapeConfig
from tests.support.scheduler.factories import FULL

LIMITS = DeviceLimits(max_context=2048, block_size_multiple=32, max_batch=64, max_chunk=512)
GOOD = ShapeConfig(max_model_len=2048, max_num_seqs=8, chunk=128, block_size=128, buckets=(1, 2, 4, 8))


@pytest.mark.parametrize(("chunk", "block_size"), [(128, 128), (128, 512), (256, 64), (32, 32)])
def test_chunk_and_block_may_divide_one_another_either_way(chunk: int, block_size: int) -> None:
    """Large blocks hold several chunks; large chunks fill several blocks."""
    dataclasses.replace(GOOD, chunk=chunk, block_size=block_size).check(LIMITS, [FULL])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_model_len": 2049}, "max_model_len 2049 exceeds the model's context of 2048"),
        ({"block_size": 100}, "block_size 100 must be a multiple of 32"),
        ({"chunk": 96}, "must divide one another"),
        ({"chunk": 1024, "block_size": 1024}, "exceeds this device's limit of 512"),
        ({"max_num_seqs": 65, "buckets": (65,)}, "max_num_seqs 65 exceeds this device's limit of 64"),
        ({"buckets": (1, 4)}, "the largest decode bucket 4 is smaller than max_num_seqs 8"),
        (
            {"buckets": (1, 3), "stages": 2},
            "the largest decode bucket 3 is smaller than max_num_seqs 8 // 2 pipeline stages",
        ),
    ],
)
def test_a_broken_rule_is_named_with_the_setting(change: dict[str, object], message: str) -> None:
    """The message is one line that says what to change."""
    with pytest.raises(ConfigurationRefused, match=message):
        dataclasses.replace(GOOD, **change).check(LIMITS, [FULL])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("group", "message"),
    [
        (
            KvGroup(GroupKind.IN_PLACE_WINDOW, 256),
            "block_size 128 is smaller than the window; use a multiple of 256",
        ),
        (KvGroup(GroupKind.IN_PLACE_WINDOW, 96), "block_size 128 must be a multiple of the window"),
        (KvGroup(GroupKind.PAGED_WINDOW, 0), "a window must be at least 1"),
        (KvGroup(GroupKind.IN_PLACE_WINDOW, 0), "a window must be at least 1"),
        (KvGroup(GroupKind.FULL, 64), "full attention has no window"),
    ],
)
def test_an_impossible_window_is_refused_with_its_group(group: KvGroup, message: str) -> None:
    """The message names the KV group, its kind and its window."""
    with pytest.raises(ConfigurationRefused, match=message) as caught:
        GOOD.check(LIMITS, [FULL, group])
    assert f"KV group 1 ({group.kind.value.replace('_', ' ')}, window {group.window})" in str(caught.value)


@pytest.mark.parametrize("kind", [GroupKind.IN_PLACE_WINDOW, GroupKind.PAGED_WINDOW])
@pytest.mark.parametrize("window", [32, 64, 128])
def test_a_window_may_be_smaller_than_a_block(kind: GroupKind, window: int) -> None:
    """A block may hold several windows, if the window divides the block."""
    GOOD.check(LIMITS, [KvGroup(kind, window)])


def test_the_decode_batch_of_a_stage_must_fit_the_device_and_a_bucket() -> None:
    """128 slots are more than the device's 64 rows, but 2 stages run 64 rows each."""
    dataclasses.replace(GOOD, max_num_seqs=128, buckets=(64,), stages=2).check(LIMITS, [FULL])
