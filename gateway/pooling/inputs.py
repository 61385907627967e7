"""Token ids of a pooling model's inputs: a text, or a pair of texts.

Truncation cuts texts, never the special tokens around them, as in transformers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

from tokenizers import Encoding, Tokenizer

from gateway.text.tokenization import token_ids

# Any text with a token: it stands for texts while the tokenizer puts special tokens around them.
_SAMPLE: Final = "a"


@dataclass(frozen=True, slots=True)
class PoolInput:
    """An input of a pooling model."""

    token_ids: list[int]
    second_text_at: int = 0
    """Index of the first token of the second type; 0 if all tokens are of the first."""


@dataclass(frozen=True, slots=True)
class Cuts:
    """How many tokens to keep; ``None`` for all."""

    total: int | None = None
    """Tokens of the whole input, special tokens included."""
    first: int | None = None
    """Tokens of the first text."""
    second: int | None = None
    """Tokens of the second text."""
    side: Literal["left", "right"] = "right"
    """Where texts lose tokens."""

    def cut_ids(self, token_ids: list[int]) -> list[int]:
        """Returns the tokens to keep of token ids."""
        if self.total is None or len(token_ids) <= self.total:
            return token_ids
        return token_ids[: self.total] if self.side == "right" else token_ids[len(token_ids) - self.total :]


def encode_text(tokenizer: Tokenizer, text: str, cuts: Cuts, *, add_special_tokens: bool = True) -> PoolInput:
    """Returns the tokens of a text."""
    found = _kept(text_ids(tokenizer, text), cuts.first, cuts)
    if not add_special_tokens:
        return PoolInput(_kept(found, cuts.total, cuts))
    if cuts.total is not None:
        found = _kept(found, cuts.total - tokenizer.num_special_tokens_to_add(is_pair=False), cuts)
    return _framed(tokenizer.encode(_SAMPLE), (found,))


def encode_pair(tokenizer: Tokenizer, first: str | Sequence[int], second: str, cuts: Cuts) -> PoolInput:
    """Returns the tokens of a pair, joined as the tokenizer joins pairs.

    A pair that is too long loses tokens of its longer text, as with transformers' ``truncation=True``.

    Args:
        tokenizer: the model's.
        first: the first text, or its tokens.
        second: the second text.
        cuts: how many tokens to keep.
    """
    one = _kept(text_ids(tokenizer, first) if isinstance(first, str) else list(first), cuts.first, cuts)
    two = _kept(text_ids(tokenizer, second), cuts.second, cuts)
    if cuts.total is not None:
        room = max(0, cuts.total - tokenizer.num_special_tokens_to_add(is_pair=True))
        if len(one) + len(two) > room:
            kept = min(len(one), len(two), room // 2)
            count = kept if len(one) <= len(two) else room - kept
            one, two = _kept(one, count, cuts), _kept(two, room - count, cuts)
    return _framed(tokenizer.encode(_SAMPLE, _SAMPLE), (one, two))


def text_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """Returns the tokens of a text without special tokens."""
    return token_ids(tokenizer, text, add_special_tokens=False)


def _kept(ids: list[int], count: int | None, cuts: Cuts) -> list[int]:
    if count is None or len(ids) <= count:
        return ids
    count = max(0, count)
    return ids[:count] if cuts.side == "right" else ids[len(ids) - count :]


def _framed(sample: Encoding, texts: Sequence[list[int]]) -> PoolInput:
    """Puts texts where the tokenizer puts those of a sample, between its special tokens.

    The texts themselves are never post-processed: truncated encodings keep the rest, and a pair is made of
    every combination.
    """
    ids: list[int] = []
    types: list[int] = []
    done: set[int] = set()
    for token, kind, text in zip(sample.ids, sample.type_ids, sample.sequence_ids, strict=True):
        if text is None:
            ids.append(token)
            types.append(kind)
        elif text not in done:
            done.add(text)
            ids += texts[text]
            types += [kind] * len(texts[text])
    return PoolInput(ids, types.index(1) if 1 in types else 0)
