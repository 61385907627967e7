"""Token ids of what a pooling model reads: one text, or a pair of texts.

Truncation cuts texts, never the special tokens around them, as in transformers.
"""

from dataclasses import dataclass
from typing import Any, Literal

from tokenizers import Encoding, Tokenizer


@dataclass(frozen=True, slots=True)
class PoolInput:
    """What a pooling model reads."""

    token_ids: list[int]
    second_text_at: int = 0
    """Index of the first token of the second type; 0 if all tokens are of the first."""


@dataclass(frozen=True, slots=True)
class Cuts:
    """How many tokens to keep; ``None`` for all."""

    total: int | None = None
    """Tokens of the whole input, special ones included."""
    first: int | None = None
    """Tokens of the first text."""
    second: int | None = None
    """Tokens of the second text."""
    side: Literal["left", "right"] = "right"
    """Where texts lose tokens."""

    def cut_ids(self, token_ids: list[int]) -> list[int]:
        """Returns the tokens to keep of an input that is given as token ids."""
        if self.total is None or len(token_ids) <= self.total:
            return token_ids
        return token_ids[: self.total] if self.side == "right" else token_ids[len(token_ids) - self.total :]


def encode_text(tokenizer: Tokenizer, text: str, cuts: Cuts, *, add_special_tokens: bool = True) -> PoolInput:
    """Returns the tokens of a text."""
    found = tokenizer.encode(text, add_special_tokens=False)
    special = tokenizer.num_special_tokens_to_add(is_pair=False) if add_special_tokens else 0
    _shorten(found, cuts.first, cuts)
    if cuts.total is not None:
        _shorten(found, cuts.total - special, cuts)
    done = tokenizer.post_process(found, add_special_tokens=add_special_tokens)
    return PoolInput(done.ids)


def encode_pair(tokenizer: Tokenizer, first: str, second: str, cuts: Cuts) -> PoolInput:
    """Returns the tokens of a pair, joined as the tokenizer joins pairs.

    A pair that is too long loses tokens of its longer text, as with transformers' ``truncation=True``.
    """
    one, two = (tokenizer.encode(text, add_special_tokens=False) for text in (first, second))
    _shorten(one, cuts.first, cuts)
    _shorten(two, cuts.second, cuts)
    if cuts.total is not None:
        room = max(0, cuts.total - tokenizer.num_special_tokens_to_add(is_pair=True))
        if len(one.ids) + len(two.ids) > room:
            short, long = (one, two) if len(one.ids) <= len(two.ids) else (two, one)
            kept = min(len(short.ids), room // 2)
            _shorten(short, kept, cuts)
            _shorten(long, room - kept, cuts)
    done = tokenizer.post_process(one, two)
    return PoolInput(done.ids, done.type_ids.index(1) if 1 in done.type_ids else 0)


def _shorten(encoding: Encoding, count: int | None, cuts: Cuts) -> None:
    if count is not None and len(encoding.ids) > count:
        options: Any = {"direction": cuts.side}
        encoding.truncate(max(0, count), **options)
