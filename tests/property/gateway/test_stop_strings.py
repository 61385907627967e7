"""Stop strings against a naive search, however the text is cut."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.text.stop_strings import StopStrings

pytestmark = pytest.mark.property

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
    """Text held back is the beginning of some stop string."""
    watcher = StopStrings(stops, include_in_output=False)
    out = ""
    for character in text:
        out += watcher.feed(character)
        if watcher.matched is not None:
            return
    held = watcher.flush()
    assert out + held == text
    assert not held or any(stop.startswith(held) for stop in stops)
