"""KV groups and the sizes that fit a model and a device."""

from dataclasses import replace

import pytest
import torch

from protos.errors import ConfigurationRefused
from worker_svc.geometry import AttentionLayer, Geometry, GroupKind, group_layers
from worker_svc.kv_cache import count_blocks

SIZES = Geometry(1024, 8, 128, 128, (1, 4, 8))


def make_layer(
    name: str, window: int = 0, kv_heads: int = 2, shares_with: str | None = None
) -> AttentionLayer:
    """A layer of 4 heads of 32 elements in bfloat16."""
    return AttentionLayer(name, 4, kv_heads, 32, window, torch.bfloat16, shares_with)


HYBRID = group_layers([make_layer("a", 512), make_layer("b"), make_layer("c", 512), make_layer("d", 512)])


def test_groups_put_full_attention_first() -> None:
    """Layers of equal window share a group; full attention is group 0; the model's order stays within a group."""
    assert [(g.group_id, g.kind, [layer.name for layer in g.layers]) for g in HYBRID] == [
        (0, GroupKind.FULL, ["b"]),
        (1, GroupKind.PAGED_WINDOW, ["a", "c", "d"]),
    ]
    assert HYBRID[1].window == 512
    assert HYBRID[1].bytes_per_token == 3 * 2 * 2 * 32 * 2


def test_layers_of_other_shapes_get_groups_of_their_own() -> None:
    """A block has one size in all layers of a group."""
    assert len(group_layers([make_layer("a"), make_layer("b", kv_heads=1)])) == 2


def test_sharing_layers_have_no_cache() -> None:
    """A layer that reads another's cache needs no memory."""
    (group,) = group_layers([make_layer("a"), make_layer("b", shares_with="a")])
    assert [layer.name for layer in group.layers] == ["a"]


def test_every_group_keeps_a_whole_sequence() -> None:
    """Blocks behind a window are not freed yet, so a window's pool is as long as the others."""
    long = replace(SIZES, max_model_len=32_768)
    assert [group.blocks_per_sequence(long) for group in HYBRID] == [256, 256]


def test_default_sizes_are_accepted() -> None:
    """Sizes that fit raise nothing."""
    SIZES.check(HYBRID, block_size_multiple=32, longest_context=1024)


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
        ({"num_blocks": (9,)}, "names 1 groups, the model has 2"),
        ({"num_blocks": (8, 8)}, "at least 9"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(change: dict[str, object], message: str) -> None:
    """The refusal names what does not fit."""
    with pytest.raises(ConfigurationRefused, match=message):
        replace(SIZES, **change).check(HYBRID, block_size_multiple=32, longest_context=1024)  # type: ignore[arg-type]


def test_chunk_may_be_several_blocks_or_a_part_of_one() -> None:
    """Either divides the other."""
    for chunk, block_size in ((256, 128), (128, 256)):
        replace(SIZES, chunk=chunk, block_size=block_size).check(
            HYBRID, block_size_multiple=32, longest_context=1024
        )


def test_memory_is_shared_in_the_ratio_of_use() -> None:
    """Blocks of all groups suffice for the same number of longest sequences, and take no more than the budget."""
    budget = 8 << 20
    counts = count_blocks(HYBRID, SIZES, budget)
    used = sum(count * g.bytes_per_token * SIZES.block_size for count, g in zip(counts, HYBRID, strict=True))
    assert used <= budget
    sequences = [(count - 1) / g.blocks_per_sequence(SIZES) for count, g in zip(counts, HYBRID, strict=True)]
    assert sequences[0] == pytest.approx(sequences[1], rel=0.1)


def test_plenty_of_memory_is_not_taken() -> None:
    """No more blocks than every slot at full length can use."""
    assert count_blocks(HYBRID, SIZES, 1 << 40) == (1 + 8 * 8, 1 + 8 * 8)


def test_too_little_memory_is_refused() -> None:
    """The refusal says how much one sequence needs."""
    with pytest.raises(ConfigurationRefused, match=r"1024 tokens needs .* MiB"):
        count_blocks(HYBRID, SIZES, 1 << 19)
