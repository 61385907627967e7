"""Detokenization of arbitrary texts and tokens, and stop strings against a naive search."""

import functools
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from gateway.text.detokenizer import StopStrings
from gateway.text.tokenization import TextCodec
from tests.support.gateway.serving import smollm2_folder, tokenizer_of

pytestmark = pytest.mark.property


@functools.cache
def loaded() -> tuple[TextCodec, Tokenizer]:
    return TextCodec.load(smollm2_folder()), tokenizer_of(smollm2_folder())


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


texts = st.text("abc", max_size=30)


def naive(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """Searches character by character.

    The first end of any stop string, the longest of those that end there.
    """
    for end in range(1, len(text) + 1):
        hits = [stop for stop in stops if text[:end].endswith(stop)]
        if hits:
            stop = max(hits, key=len)
            return (text[:end] if include else text[: end - len(stop)]), stop
    return text, None


@given(
    text=texts,
    stops=st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=4),
    cuts=st.lists(st.integers(0, 30)),
    include=st.booleans(),
)
def test_agrees_with_a_naive_search(text: str, stops: list[str], cuts: list[int], include: bool) -> None:
    """Emitted text and match equal those of a character-by-character search, for every cut of the text."""
    borders = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    watcher = StopStrings(stops, include_in_output=include)
    out = ""
    for start, end in itertools.pairwise(borders):
        out += watcher.feed(text[start:end])
        assert text.startswith(out)
        if watcher.matched is not None:
            break
    if watcher.matched is None:
        out += watcher.flush()
    assert (out, watcher.matched) == naive(text, stops, include)


@given(text=texts, stops=st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3))
def test_holds_back_only_beginnings_of_stop_strings(text: str, stops: list[str]) -> None:
    watcher = StopStrings(stops, include_in_output=False)
    out = ""
    for character in text:
        out += watcher.feed(character)
        if watcher.matched is not None:
            return
    held = watcher.flush()
    assert out + held == text
    assert not held or any(stop.startswith(held) for stop in stops)
