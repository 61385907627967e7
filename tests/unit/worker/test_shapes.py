"""KV groups, and the sizes that a model and a device support."""

from dataclasses import replace

import pytest
import torch

from protos.errors import ConfigurationRefused
from protos.steps import GroupKind
from worker_svc.execution.kv_cache import count_blocks
from worker_svc.shapes import AttentionLayer, ShapeConfig, group_layers

SIZES = ShapeConfig(1024, 8, 128, 128, (1, 4, 8))


def make_layer(
    name: str, window: int = 0, kv_heads: int = 2, shares_with: str | None = None
) -> AttentionLayer:
    """A layer with 4 heads of 32 elements in bfloat16."""
    return AttentionLayer(name, 4, kv_heads, 32, window, torch.bfloat16, shares_with)


HYBRID = group_layers([make_layer("a", 512), make_layer("b"), make_layer("c", 512), make_layer("d", 512)])
IN_PLACE = group_layers([make_layer("a", 512), make_layer("b")], GroupKind.IN_PLACE_WINDOW)


def test_groups_put_full_attention_first() -> None:
    """Full attention is group 0; layers with equal windows share a group and keep the model's order."""
    assert [(g.group_id, g.kind, [layer.name for layer in g.layers]) for g in HYBRID] == [
        (0, GroupKind.FULL, ["b"]),
        (1, GroupKind.PAGED_WINDOW, ["a", "c", "d"]),
    ]
    assert [group.kind for group in IN_PLACE] == [GroupKind.FULL, GroupKind.IN_PLACE_WINDOW]
    assert HYBRID[1].window == 512
    assert HYBRID[1].bytes_per_token == 3 * 2 * 2 * 32 * 2


def test_layers_of_different_shapes_are_in_different_groups() -> None:
    assert len(group_layers([make_layer("a"), make_layer("b", kv_heads=1)])) == 2


def test_sharing_layers_have_no_cache() -> None:
    (group,) = group_layers([make_layer("a"), make_layer("b", shares_with="a")])
    assert [layer.name for layer in group.layers] == ["a"]


def test_layers_that_share_an_in_place_window_are_refused() -> None:
    """When the second layer runs, the first one has dropped tokens that the chunk's first queries need."""
    layers = [make_layer("a", 512), make_layer("b", 512, shares_with="a"), make_layer("c")]
    with pytest.raises(ConfigurationRefused, match=r"layer b reads the KV cache of a.*--window-kv paged"):
        group_layers(layers, GroupKind.IN_PLACE_WINDOW)
    sharing_a_full_cache = [make_layer("a", 512), make_layer("c"), make_layer("d", shares_with="c")]
    assert len(group_layers(sharing_a_full_cache, GroupKind.IN_PLACE_WINDOW)) == 2


@pytest.mark.parametrize(
    ("chunk", "block_size", "kept", "in_use", "per_sequence"),
    [
        (
            128,
            128,
            0,
            (256, 6, 1),
            (256, 6, 1),
        ),  # 639 tokens are in 5 blocks, or in 6 if they start within one
        (512, 128, 0, (256, 9, 1), (256, 9, 1)),
        (128, 1024, 0, (32, 2, 1), (32, 2, 1)),
        (128, 128, 2, (256, 6, 1), (256, 16, 3)),  # a kept window lies in up to 5 blocks
        (128, 128, 64, (256, 6, 1), (256, 256, 65)),  # never more than the whole sequence
    ],
)
def test_a_sequence_needs_blocks_for_its_window(
    chunk: int, block_size: int, kept: int, in_use: tuple[int, ...], per_sequence: tuple[int, ...]
) -> None:
    """Full groups keep all tokens, paged windows a span, in-place windows a block, plus kept windows."""
    sizes = replace(
        SIZES, max_model_len=32_768, chunk=chunk, block_size=block_size, windows_kept_per_slot=kept
    )
    groups = (*HYBRID, IN_PLACE[1])
    assert tuple(group.blocks_in_use(sizes) for group in groups) == in_use
    assert tuple(group.blocks_per_sequence(sizes) for group in groups) == per_sequence


def test_a_window_needs_no_more_than_the_longest_sequence() -> None:
    assert HYBRID[1].blocks_in_use(replace(SIZES, max_model_len=256)) == 2


def test_an_in_place_block_holds_a_window() -> None:
    assert [group.tokens_per_block(1024) for group in (*HYBRID, *IN_PLACE)] == [1024, 1024, 1024, 512]
    assert [group.table_width(SIZES) for group in (*HYBRID, *IN_PLACE)] == [8, 8, 8, 1]


@pytest.mark.parametrize(
    ("block_size", "message"),
    [(256, "a block size of at least 512, got 256"), (768, "768 is not a multiple of the in-place window")],
)
def test_a_block_must_hold_whole_windows(block_size: int, message: str) -> None:
    sizes = replace(SIZES, chunk=128, block_size=block_size)
    with pytest.raises(ConfigurationRefused, match=message):
        sizes.check(IN_PLACE, block_size_multiple=32, longest_context=1024)
    sizes.check(HYBRID, block_size_multiple=32, longest_context=1024)


@pytest.mark.parametrize("block_size", [512, 1024])
def test_a_block_of_one_or_more_windows_is_accepted(block_size: int) -> None:
    sizes = replace(SIZES, block_size=block_size, num_blocks=(9, 2))
    sizes.check(IN_PLACE, block_size_multiple=32, longest_context=1024)
    with pytest.raises(ConfigurationRefused, match=r"1 blocks of KV group 1 .* at least 2"):
        replace(sizes, num_blocks=(9, 1)).check(IN_PLACE, block_size_multiple=32, longest_context=1024)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"block_size": 100, "chunk": 100}, "multiple of 32"),
        ({"chunk": 96}, "divide one another"),
        ({"max_model_len": 2048}, "context of 1024"),
        ({"decode_buckets": (4, 1)}, "ascend"),
        ({"decode_buckets": (1, 4)}, "below max_num_seqs 8"),
        ({"decode_buckets": ()}, "at least 1"),
        ({"max_num_seqs": 0}, "at least 1"),
        ({"num_blocks": (9,)}, "has 1 entries, but the model has 2"),
        ({"num_blocks": (8, 9)}, "at least 9"),
        ({"num_blocks": (9, 6)}, "at least 7"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigurationRefused, match=message):
        replace(SIZES, **change).check(HYBRID, block_size_multiple=32, longest_context=1024)  # type: ignore[arg-type]


def test_chunk_may_be_several_blocks_or_a_part_of_one() -> None:
    for chunk, block_size in ((256, 128), (128, 256)):
        replace(SIZES, chunk=chunk, block_size=block_size).check(
            HYBRID, block_size_multiple=32, longest_context=1024
        )


@pytest.mark.parametrize(
    ("buckets", "message"),
    [
        ((64, 32, 128), "must ascend to the chunk 128"),
        ((32, 64), "must ascend to the chunk 128"),
        ((64, 256), "must ascend to the chunk 128"),
        ((96, 128), "chunk 96 and block size 128 must divide one another"),
        ((0, 128), "every size must be at least 1"),
    ],
)
def test_prefill_buckets_that_do_not_fit_are_refused(buckets: tuple[int, ...], message: str) -> None:
    sizes = replace(SIZES, chunk=128, block_size=128, prefill_buckets=buckets)
    with pytest.raises(ConfigurationRefused, match=message):
        sizes.check(HYBRID, block_size_multiple=32, longest_context=1024)
    assert replace(sizes, prefill_buckets=()).chunk_sizes == (128,)


def test_groups_share_memory_in_the_ratio_of_use() -> None:
    """All groups have blocks for the same number of longest sequences, within the budget."""
    budget = 8 << 20
    counts = count_blocks(HYBRID, SIZES, budget)
    used = sum(count * g.bytes_per_token * SIZES.block_size for count, g in zip(counts, HYBRID, strict=True))
    assert used <= budget
    sequences = [(count - 1) / g.blocks_per_sequence(SIZES) for count, g in zip(counts, HYBRID, strict=True)]
    assert sequences[0] == pytest.approx(sequences[1], rel=0.1)


def test_excess_memory_stays_free() -> None:
    """There are no more blocks than all slots at full length and their kept windows can use."""
    assert count_blocks(HYBRID, SIZES, 1 << 40) == (1 + 8 * 8, 1 + 8 * 6)
    kept = replace(SIZES, windows_kept_per_slot=3)
    assert count_blocks(HYBRID, kept, 1 << 40) == (1 + 8 * 8, 1 + 8 * 8)
    assert count_blocks(IN_PLACE, kept, 1 << 40) == (1 + 8 * 8, 1 + 8 * 4)


def test_an_in_place_block_costs_one_window() -> None:
    sizes = replace(SIZES, block_size=1024)
    full, window = (group.bytes_per_token for group in IN_PLACE)
    budget = 2 * (1024 * full + 512 * window)
    assert count_blocks(IN_PLACE, sizes, budget) == (2, 2)
    with pytest.raises(ConfigurationRefused, match="one sequence of 1024 tokens"):
        count_blocks(IN_PLACE, sizes, budget - 1)


@pytest.mark.parametrize(
    ("requested", "room", "kept"), [(4, 0, 0), (1024, 0, 0), (4, 2, 2), (4, 4, 4), (4, 9, 4)]
)
def test_short_memory_keeps_fewer_windows(requested: int, room: int, kept: int) -> None:
    """A budget for one sequence and `room` windows is accepted, however many windows should be kept."""
    sizes = replace(SIZES, max_num_seqs=1, block_size=1024, windows_kept_per_slot=requested)
    full, window = (group.bytes_per_token for group in IN_PLACE)
    budget = 2 * (1024 * full + 512 * window) + room * 512 * window
    assert count_blocks(IN_PLACE, sizes, budget) == (2, 2 + kept)


def test_too_little_memory_is_refused() -> None:
    with pytest.raises(ConfigurationRefused, match=r"1024 tokens needs .* MiB"):
        count_blocks(HYBRID, SIZES, 1 << 19)
