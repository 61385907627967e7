"""Prompts of many lengths that share prefixes, in the form of vLLM's custom dataset."""

import json
import random
from pathlib import Path
from typing import Final

from tokenizers import Tokenizer

SHORTEST: Final = 40
LONGEST: Final = 900
PREFIX_LENGTHS: Final = (32, 64, 128, 256, 384, 512)
"""Tokens of the shared prefixes: short instructions, examples, and retrieved documents."""
_SHARE_WITH_PREFIX: Final = 0.75


def write(file: Path, model: Path, count: int, seed: int) -> None:
    """Writes ``count`` prompts, one JSON object a line; the same seed gives the same prompts.

    Three of four begin with a shared prefix. Lengths are log-uniform, so short prompts are the most frequent.
    """
    draw = random.Random(seed)
    words = _words(Tokenizer.from_file(str(model / "tokenizer.json")))
    prefixes = [draw.choices(words, k=length) for length in PREFIX_LENGTHS]
    with file.open("w") as lines:
        for _ in range(count):
            start = draw.choice(prefixes) if draw.random() < _SHARE_WITH_PREFIX else []
            shortest = max(SHORTEST, len(start) + 8)
            length = round(shortest * (LONGEST / shortest) ** draw.random())
            prompt = "".join([*start, *draw.choices(words, k=length - len(start))])
            lines.write(json.dumps({"prompt": prompt}) + "\n")


def _words(tokenizer: Tokenizer) -> list[str]:
    """Returns words, each with a leading space, that are a single token wherever they stand."""
    texts = (tokenizer.decode([token]) for token in range(tokenizer.get_vocab_size()))
    return [text for text in texts if text.startswith(" ") and text[1:].isascii() and text[1:].islower()]
