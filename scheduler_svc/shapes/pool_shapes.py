"""Static shapes of pooling models: each has a fixed number of rows and of tokens per row."""

from collections.abc import Sequence

from protos.errors import ConfigurationRefused
from protos.steps import PoolShape

# The default shapes: prompt lengths grow by _FACTOR from the shortest up to the model's context. For each
# length, batches grow by the same factor as long as they hold at most _TOKENS_PER_BATCH tokens.
_FACTOR = 4
_SHORTEST_PROMPT = 64
_TOKENS_PER_BATCH = 1024
# Where graphs are cheap, padding is what costs: these lengths replace those up to the last of them, and their
# batches grow by 2. A CPU gains nothing from larger batches.
_CHEAP_LENGTHS = (16, 24, 32, 48, 64, 96, 128, 256)
_CHEAP_TOKENS_PER_BATCH = 512


def default_shapes(
    max_context: int, max_batch: int, max_tokens: int | None = None, *, cheap_graphs: bool = False
) -> tuple[PoolShape, ...]:
    """Returns shapes for every prompt that a model can read, for example 1x64, 4x64, 16x64, 1x256, 4x256.

    For the arguments see `shapes_of`.
    """
    longest = max_context if max_tokens is None else min(max_context, max_tokens)
    lengths = [length for length in _CHEAP_LENGTHS if cheap_graphs and length < longest]
    length = _SHORTEST_PROMPT
    while length < longest:
        if not lengths or length > lengths[-1]:
            lengths.append(length)
        length *= _FACTOR
    shapes = []
    for prompt_len in [*lengths, longest]:
        is_cheap = cheap_graphs and prompt_len <= _CHEAP_LENGTHS[-1]
        factor, most = (2, _CHEAP_TOKENS_PER_BATCH) if is_cheap else (_FACTOR, _TOKENS_PER_BATCH)
        batch = 1
        while batch == 1 or (batch <= max_batch and batch * prompt_len <= min(most, max_tokens or most)):
            shapes.append(PoolShape(prompt_len, batch))
            batch *= factor
    return tuple(shapes)


def shapes_of(
    batch_sizes: Sequence[int],
    prompt_lens: Sequence[int],
    *,
    max_context: int,
    max_batch: int,
    max_tokens: int | None = None,
    cheap_graphs: bool = False,
) -> tuple[PoolShape, ...]:
    """Returns the shapes that the settings name, ascending, or the default shapes if they name none.

    Args:
        batch_sizes: rows of each shape.
        prompt_lens: tokens per row of each shape, in the same order.
        max_context: the longest prompt that the model can read, tokens.
        max_batch: the largest batch that the device can run, rows.
        max_tokens: most tokens of a batch whose results fit into a message; `None` if any do.
        cheap_graphs: whether the default shapes may be many.

    Raises:
        ConfigurationRefused: the model or the device cannot run one of the shapes.
    """
    shapes = tuple(
        sorted({PoolShape(length, batch) for batch, length in zip(batch_sizes, prompt_lens, strict=True)})
    )
    for shape in shapes:
        if shape.prompt_len > max_context:
            raise ConfigurationRefused(
                f"pool_prompt_lens: {shape.prompt_len} exceeds the model's context of {max_context} tokens"
            )
        if shape.batch > max_batch:
            raise ConfigurationRefused(
                f"pool_batch_sizes: {shape.batch} exceeds this device's limit of {max_batch} rows"
            )
        if max_tokens is not None and shape.batch * shape.prompt_len > max_tokens:
            raise ConfigurationRefused(
                f"pool_batch_sizes, pool_prompt_lens: results of {shape} tokens are too large for a message; a shape"
                f" may have {max_tokens} tokens"
            )
    return shapes or default_shapes(max_context, max_batch, max_tokens, cheap_graphs=cheap_graphs)


def format_shapes(shapes: Sequence[PoolShape]) -> str:
    """Returns the shapes as text: "1x64, 4x64 (rows x tokens)"."""
    return f"{', '.join(map(str, shapes))} (rows x tokens)"
