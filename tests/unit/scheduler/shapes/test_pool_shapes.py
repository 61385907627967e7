"""Static shapes of pooling models."""

import pytest

from protos.errors import ConfigurationRefused
from protos.steps import PoolShape
from scheduler_svc.shapes.pool_shapes import default_shapes, format_shapes, shapes_of


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


def test_cheap_graphs_make_more_default_shapes() -> None:
    """Short prompts have more lengths and batches; long ones the same as otherwise."""
    shapes = default_shapes(2048, 4096, cheap_graphs=True)
    assert [one.batch for one in shapes if one.prompt_len == 24] == [1, 2, 4, 8, 16]
    assert sorted({one.prompt_len for one in shapes})[4:] == [64, 96, 128, 256, 1024, 2048]
    few = default_shapes(40, 2, cheap_graphs=True)
    assert format_shapes(few) == "1x16, 2x16, 1x24, 2x24, 1x32, 2x32, 1x40, 2x40 (rows x tokens)"


def test_results_of_tokens_bound_the_shapes() -> None:
    """The default shapes hold at most so many tokens; a larger one of the settings is refused."""
    assert format_shapes(default_shapes(512, 8, max_tokens=100)) == "1x64, 1x100 (rows x tokens)"
    with pytest.raises(ConfigurationRefused, match="results of 4x64 tokens are too large for a message"):
        shapes_of((4,), (64,), max_context=64, max_batch=4, max_tokens=255)
