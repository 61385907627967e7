"""Static shapes of pooling models: rows and tokens per row, or the tokens of all texts together."""

from collections.abc import Sequence

from protos.errors import ConfigurationRefused
from protos.steps import PoolShape

# The default shapes: prompt lengths grow by _FACTOR from the shortest up to the model's context. For each
# length, batches grow by the same factor as long as they hold at most _TOKENS_PER_BATCH tokens.
_FACTOR = 4
_SHORTEST_PROMPT = 64
_TOKENS_PER_BATCH = 1024
# Packed shapes: up to each of these numbers of tokens they grow by a step, so that little of one is padding.
# From PACKED_TOKENS on they double, because only longer texts need them.
_PACKED_STEPS = ((64, 8), (128, 16), (256, 32), (512, 64))
PACKED_TOKENS = _PACKED_STEPS[-1][0]
"""Texts fill packed shapes up to this many tokens, because a CPU gains nothing from longer steps."""
_TOKENS_PER_TEXT, _MOST_TEXTS = 4, 64


def default_shapes(
    max_context: int, max_batch: int, max_tokens: int | None = None, *, packs_texts: bool = False
) -> tuple[PoolShape, ...]:
    """Returns shapes for every prompt of a model, for example 1x64, 4x64, 16x64, 1x256, 4x256.

    For the arguments see `shapes_of`.
    """
    longest = max_context if max_tokens is None else min(max_context, max_tokens)
    if packs_texts:
        return tuple(
            PoolShape(size, max(1, min(max_batch, _MOST_TEXTS, size // _TOKENS_PER_TEXT)), packed=True)
            for size in _packed_sizes(longest)
        )
    lengths = []
    length = _SHORTEST_PROMPT
    while length < longest:
        lengths.append(length)
        length *= _FACTOR
    shapes = []
    for prompt_len in [*lengths, longest]:
        batch = 1
        while batch == 1 or (
            batch <= max_batch
            and batch * prompt_len <= min(_TOKENS_PER_BATCH, max_tokens or _TOKENS_PER_BATCH)
        ):
            shapes.append(PoolShape(prompt_len, batch))
            batch *= _FACTOR
    return tuple(shapes)


def _packed_sizes(longest: int) -> list[int]:
    sizes = []
    size = 0
    for limit, step in _PACKED_STEPS:
        while size < limit:
            size += step
            sizes.append(size)
    while size < longest:
        size *= 2
        sizes.append(size)
    return [*(each for each in sizes if each < longest), longest]


def shapes_of(
    batch_sizes: Sequence[int],
    prompt_lens: Sequence[int],
    *,
    max_context: int,
    max_batch: int,
    max_tokens: int | None = None,
    packs_texts: bool = False,
    fixed: Sequence[PoolShape] = (),
) -> tuple[PoolShape, ...]:
    """Returns the shapes of the settings, ascending, or the default shapes if the settings name none.

    Args:
        batch_sizes: rows of each shape.
        prompt_lens: tokens per row of each shape, in the same order.
        max_context: the model's longest prompt, tokens.
        max_batch: the device's largest batch, rows.
        max_tokens: most tokens of a batch whose results fit into a message; `None` if any do.
        packs_texts: whether the device runs packed shapes, which then are the default.
        fixed: the shapes of other replicas, which replace those of the settings.

    Raises:
        ConfigurationRefused: the model or the device cannot run a shape.
    """
    named = {PoolShape(length, batch) for batch, length in zip(batch_sizes, prompt_lens, strict=True)}
    shapes = tuple(sorted(fixed or named))
    for shape in shapes:
        if shape.packed and not packs_texts:
            raise ConfigurationRefused(
                "this device runs no packed shapes, which the other workers run; set pool_batch_sizes and"
                " pool_prompt_lens"
            )
        if shape.prompt_len > max_context:
            raise ConfigurationRefused(
                f"pool_prompt_lens: {shape.prompt_len} exceeds the model's context of {max_context} tokens"
            )
        if shape.batch > max_batch:
            raise ConfigurationRefused(
                f"pool_batch_sizes: {shape.batch} exceeds this device's limit of {max_batch} rows"
            )
        if max_tokens is not None and shape.num_tokens > max_tokens:
            raise ConfigurationRefused(
                f"pool_batch_sizes, pool_prompt_lens: results of {shape} tokens are too large for a message; a shape"
                f" may have {max_tokens} tokens"
            )
    return shapes or default_shapes(max_context, max_batch, max_tokens, packs_texts=packs_texts)
