"""Static shapes of pooling models."""

import pytest

from protos.errors import ConfigurationRefused
from protos.steps import PoolShape, format_shapes
from scheduler_svc.shapes.shape_config import default_shapes, shapes_of


def shape(batch: int, prompt_len: int) -> PoolShape:
    return PoolShape(prompt_len, batch)


def test_default_shapes_cover_every_prompt() -> None:
    """Every prompt up to the context fits a shape, alone and in a batch."""
    assert format_shapes(default_shapes(256, 4096)) == "1x64, 4x64, 16x64, 1x256, 4x256 (rows x tokens)"
    assert format_shapes(default_shapes(40, 8)) == "1x40, 4x40 (rows x tokens)"
    assert default_shapes(8192, 4096)[-1] == shape(1, 8192)


def test_shapes_from_settings_are_sorted_and_unique() -> None:
    """Order and repetition of the settings do not matter."""
    found = shapes_of((4, 1, 4), (16, 64, 16), max_context=64, max_batch=4)
    assert found == (shape(4, 16), shape(1, 64))


def test_packed_default_shapes_waste_few_tokens() -> None:
    """Texts of 40 to 512 tokens in all have a shape of which at most a fifth is padding."""
    shapes = default_shapes(2048, 4096, packs_texts=True)
    assert all(one.packed for one in shapes)
    for tokens in range(40, 513):
        smallest = next(one for one in shapes if one.prompt_len >= tokens)
        assert smallest.num_tokens - tokens <= max(7, smallest.num_tokens / 5)
    assert [one.prompt_len for one in shapes[-3:]] == [512, 1024, 2048]
    few = default_shapes(40, 5, packs_texts=True)
    assert format_shapes(few) == "2/8, 4/16, 5/24, 5/32, 5/40 (texts / tokens)"


def test_replicas_share_shapes() -> None:
    """The shapes of other replicas replace the default; a device without packed shapes refuses them."""
    fixed = default_shapes(64, 8, packs_texts=True)
    assert shapes_of((), (), max_context=64, max_batch=8, packs_texts=True, fixed=fixed) == fixed
    with pytest.raises(ConfigurationRefused, match="this device runs no packed shapes"):
        shapes_of((), (), max_context=64, max_batch=8, fixed=fixed)


def test_results_of_tokens_bound_the_shapes() -> None:
    """No default shape has too many tokens for a message, and a larger one in the settings is refused."""
    assert format_shapes(default_shapes(512, 8, max_tokens=100)) == "1x64, 1x100 (rows x tokens)"
    with pytest.raises(ConfigurationRefused, match="results of 4x64 tokens are too large for a message"):
        shapes_of((4,), (64,), max_context=64, max_batch=4, max_tokens=255)
