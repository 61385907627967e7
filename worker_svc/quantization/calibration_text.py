"""The text that calibration runs a model on: what the model writes itself, or a file."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch

from protos.errors import ConfigurationRefused

LENGTH: Final = 256
"""Tokens of a row of text, or of the model's context if that is shorter."""
Progress = Callable[[int, int, str], None]
"""Called with the number of steps done, the total, and what the next one does."""
_SEED: Final = 0
# Rows that the model writes side by side.
_ROWS: Final = 64


def own_text(model: Any, tokens: int, length: int, progress: Progress) -> torch.Tensor:
    """Returns text that the model writes, token ids [rows, length].

    Each row begins with the token that begins texts, if the model has one, and a token drawn from the whole
    vocabulary; the model continues it at temperature 1. Rows do not end early. The text depends on the model
    alone.

    Args:
        model: of transformers, for causal language modelling.
        tokens: wanted in all; rows are whole.
        length: of a row.
        progress: see `Progress`.
    """
    generator = torch.Generator().manual_seed(_SEED)
    config = model.config.get_text_config()
    rows = max(1, tokens // length)
    starts = torch.randint(config.vocab_size, (rows, 1), generator=generator)
    if isinstance(config.bos_token_id, int):
        starts = torch.cat([torch.full_like(starts, config.bos_token_id), starts], dim=1)
    parts = starts.split(_ROWS)
    written = []
    for done, part in enumerate(parts):
        progress(done, len(parts), "writing the calibration text")
        written.append(_continued(model, part, length, _ends(model), generator))
    return torch.cat(written)


def _ends(model: Any) -> list[int]:
    """Returns the tokens that end a text."""
    found: set[int] = set()
    for config in (model.config.get_text_config(), model.generation_config):
        ends = config.eos_token_id
        found |= set(ends) if isinstance(ends, list) else {ends} - {None}
    return sorted(found)


def _continued(
    model: Any, starts: torch.Tensor, length: int, ends: list[int], generator: torch.Generator
) -> torch.Tensor:
    ids, cache = starts, None
    for position in range(length - 1):
        # Never two tokens at once: torch would copy the head's weights for each row of a slice.
        output = model(
            ids[:, position : position + 1], past_key_values=cache, use_cache=True, logits_to_keep=1
        )
        cache = output.past_key_values
        if position + 1 == ids.shape[1]:
            logits = output.logits[:, -1].float()
            logits[:, ends] = -torch.inf
            ids = torch.cat([ids, drawn(logits.softmax(dim=-1), generator)], dim=1)
    return ids


def drawn(probabilities: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Returns a token id for each distribution, [..., 1].

    It takes one random number each; torch.multinomial takes one for each token of the vocabulary.

    Args:
        probabilities: [..., vocabulary].
        generator: of the random numbers.
    """
    sums = probabilities.cumsum(dim=-1)
    points = torch.rand(*sums.shape[:-1], 1, generator=generator) * sums[..., -1:]
    return torch.searchsorted(sums, points, right=True).clamp_(max=sums.shape[-1] - 1)


def text_of(file: Path, source: Path, tokens: int, length: int) -> torch.Tensor:
    """Returns rows of a text file, token ids [rows, length], spread over the whole file.

    Args:
        file: text in UTF-8.
        source: the model's folder, with its tokenizer.
        tokens: wanted in all; a shorter file gives fewer.
        length: of a row.

    Raises:
        ConfigurationRefused: if the file cannot be read or fills no row, or the model has no tokenizer.
    """
    from transformers import AutoTokenizer

    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationRefused(f"cannot read the calibration text {file}: {error}") from error
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    except (OSError, ValueError, ImportError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise ConfigurationRefused(
            f"cannot read the tokenizer of {source}: {reason}; use --calibrate without a file"
        ) from error
    ids: list[int] = tokenizer(text, verbose=False)["input_ids"]
    begins = ids[:1] if ids and ids[0] == tokenizer.bos_token_id else []
    ids = ids[len(begins) :]
    own = length - len(begins)
    found = len(ids) // own
    if not found:
        raise ConfigurationRefused(
            f"the calibration text {file} has {len(ids)} tokens, and calibration needs at least {own}; choose a"
            " longer one"
        )
    rows = min(found, max(1, tokens // length))
    firsts = [row * found // rows * own for row in range(rows)]
    return torch.tensor([[*begins, *ids[first : first + own]] for first in firsts])
