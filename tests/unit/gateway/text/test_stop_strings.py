"""Stop strings across token boundaries."""

import pytest

from gateway.text.detokenizer import StopStrings


def run(stops: list[str], pieces: list[str], *, include: bool = False) -> tuple[list[str], str | None]:
    """Returns the text emitted per piece (and by the flush, if nothing matched), and the match."""
    watcher = StopStrings(stops, include_in_output=include)
    out = []
    for piece in pieces:
        out.append(watcher.feed(piece))
        if watcher.matched is not None:
            return out, watcher.matched
    return [*out, watcher.flush()], None


@pytest.mark.parametrize(
    ("stops", "pieces", "emitted", "matched"),
    [
        (["END"], ["abc", "END", "x"], ["abc", ""], "END"),
        (["END"], ["abcE", "N", "D"], ["abc", "", ""], "END"),
        (["END"], ["abcE", "N", "X"], ["abc", "", "ENX", ""], None),
        (["END"], ["abcEN"], ["abc", "EN"], None),
        (["\n\n"], ["a\n", "b\n", "\n"], ["a", "\nb", ""], "\n\n"),
        (["aab"], ["aa", "ab"], ["", "a"], "aab"),
        (["abc", "b"], ["a", "b"], ["", "a"], "b"),
        (["b", "ab"], ["ab"], [""], "ab"),
        (["x"], ["", "a", ""], ["", "a", "", ""], None),
        (["."], ["Paris.", " More"], ["Paris"], "."),
        (["日本"], ["私は日", "本人"], ["私は", ""], "日本"),
        (["aXb", "X"], ["a", "Xb"], ["", "a"], "X"),
        (["stop", "stopping"], ["stopp"], [""], "stop"),
    ],
)
def test_emits_up_to_the_first_match(
    stops: list[str], pieces: list[str], emitted: list[str], matched: str | None
) -> None:
    """Only text that may still become a stop string is held back."""
    assert run(stops, pieces) == (emitted, matched)


@pytest.mark.parametrize(
    ("pieces", "emitted"), [(["abcEN", "D!"], ["abc", "END"]), (["END"], ["END"]), (["aEND more"], ["aEND"])]
)
def test_the_stop_string_is_part_of_the_output_on_request(pieces: list[str], emitted: list[str]) -> None:
    """include_stop_str_in_output emits the match, and nothing behind it."""
    assert run(["END"], pieces, include=True) == (emitted, "END")
