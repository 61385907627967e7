"""Turns a text into token ids without stopping the other threads."""

from typing import Final

from tokenizers import Tokenizer

# Bytes or so. Below it, to hand the interpreter to another thread would cost more than encoding does.
_SHORT: Final = 2_000


def token_ids(tokenizer: Tokenizer, text: str, *, add_special_tokens: bool) -> list[int]:
    """Returns the token ids of ``text``. Recognizes special tokens in it, as transformers does.

    The library keeps Python's global lock while it encodes one text, but not while it encodes a batch. A text
    of 8 MB takes seconds, in which no stream would go on.
    """
    if len(text) <= _SHORT:
        ids: list[int] = tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
    else:
        ids = tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
    return ids
