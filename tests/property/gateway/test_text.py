"""Detokenization of arbitrary texts and arbitrary token streams."""

import functools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from gateway.text.tokenization import TextCodec
from tests.support.gateway.serving import smollm2_folder

pytestmark = pytest.mark.property


@functools.cache
def loaded() -> tuple[TextCodec, Tokenizer]:
    folder = smollm2_folder()
    return TextCodec.load(folder), Tokenizer.from_file(str(folder / "tokenizer.json"))


token_streams = st.lists(st.integers(0, 49151), max_size=40)
# The vocabulary starts with rare bytes and control characters: streams of them break characters most often.
broken_streams = st.lists(st.integers(0, 300), max_size=40)


@given(text=st.text(max_size=200))
@settings(max_examples=300, deadline=None)
def test_any_text_survives_token_by_token(text: str) -> None:
    """The deltas of an encoded text add up to the text, and each is valid by itself."""
    codec, tokenizer = loaded()
    ids = codec.encode(text, add_special_tokens=False)
    detokenizer = codec.detokenizers.make(skip_special_tokens=False)
    parts = [detokenizer.push([i]) for i in ids]
    out = "".join(parts) + detokenizer.finish()
    assert out == tokenizer.decode(ids, skip_special_tokens=False)
    # This tokenizer lacks a few bytes, so texts with them cannot come back.
    if out == text:
        assert sum(part.count("\ufffd") for part in parts) == text.count("\ufffd")


@given(
    ids=st.one_of(token_streams, broken_streams),
    skip=st.booleans(),
    cuts=st.lists(st.integers(1, 5), max_size=40),
)
@settings(max_examples=500, deadline=None)
def test_any_token_stream_equals_its_full_decode(ids: list[int], skip: bool, cuts: list[int]) -> None:
    """However a stream is cut into events, the deltas add up to the decode of all tokens at once."""
    codec, tokenizer = loaded()
    detokenizer = codec.detokenizers.make(skip_special_tokens=skip)
    out, rest = "", list(ids)
    for cut in [*cuts, len(ids) or 1]:
        out += detokenizer.push(rest[:cut])
        rest = rest[cut:]
    assert out + detokenizer.finish() == tokenizer.decode(ids, skip_special_tokens=skip)
