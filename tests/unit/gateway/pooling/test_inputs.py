"""Pairs and texts of pooling models: what truncation keeps, and what it costs."""

import tracemalloc
from typing import Literal

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing

from gateway.pooling.call import Cuts, encode_pair

WORDS = [f"w{number}" for number in range(50)]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """A word for each token, and BERT's special tokens and types."""
    vocabulary = {word: number for number, word in enumerate(("[CLS]", "[SEP]", "[UNK]", "a", *WORDS))}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))  # noqa: S106 - a word
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 0), ("[SEP]", 1)],
    )
    return made


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("total", [5, 6, 8, 11, 40])
def test_pairs_lose_tokens_of_the_longer_text(
    tokenizer: Tokenizer, total: int, side: Literal["left", "right"]
) -> None:
    first, second = "w1 w2", "w3 w4 w5 w6 w7 w8"
    own = Tokenizer.from_str(tokenizer.to_str())
    own.enable_truncation(total, strategy="longest_first", direction=side)
    got = encode_pair(tokenizer, first, second, Cuts(total, side=side))
    assert len(got.token_ids) == min(total, 11)
    assert got.token_ids == own.encode(first, second).ids


def test_cutting_long_pairs_costs_little(tokenizer: Tokenizer) -> None:
    text = " ".join(WORDS * 100)
    tracemalloc.start()
    got = encode_pair(tokenizer, text, text, Cuts(first=1, second=1))
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(got.token_ids) == 5
    assert most < 10_000_000
