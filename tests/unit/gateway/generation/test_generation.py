"""Events become text, counts and finish reasons."""

import pytest

from gateway.generation.sequence_text import Delta, SequenceText
from gateway.scheduler_client.in_flight import SequenceEvent
from gateway.text.detokenizer import StopStrings
from protos.triptych.v1 import common_pb2 as pb

END = 99


class LetterDetokenizer:
    """A detokenizer for tests: token 1 is "a", 2 is "b" and so on; the end token has text, too."""

    def push(self, token_ids: object) -> str:
        return "".join("<end>" if i == END else chr(96 + i) for i in token_ids)  # type: ignore[attr-defined]

    def finish(self) -> str:
        return ""


def make(
    stops: tuple[str, ...] = (), *, include: bool = False, min_tokens: int = 0, ids: tuple[int, ...] = ()
) -> SequenceText:
    watcher = StopStrings(stops, include_in_output=include) if stops else None
    return SequenceText(0, 3, LetterDetokenizer(), watcher, min_tokens, include, frozenset(ids))


def event(*tokens: int, reason: int = 0, stop: int | None = None) -> SequenceEvent:
    return SequenceEvent(tokens, pb.FinishReason.ValueType(reason), stop)


def test_text_grows() -> None:
    """The tokens of an event become one delta."""
    sequence = make()
    assert sequence.push(event(1, 2)) == Delta(0, "ab")
    assert sequence.push(event(3, reason=pb.FINISH_REASON_LENGTH)) == Delta(0, "c", "length")
    assert (sequence.num_tokens, sequence.finished) == (3, True)


def test_an_event_may_only_finish() -> None:
    """An event without tokens only ends the sequence."""
    sequence = make()
    sequence.push(event(1))
    assert sequence.push(event(reason=pb.FINISH_REASON_LENGTH)) == Delta(0, "", "length")
    assert sequence.num_tokens == 1


def test_end_tokens_count_but_do_not_show() -> None:
    """An end token counts in the usage, but has no text and no stop_reason."""
    sequence = make()
    assert sequence.push(event(1, END, reason=pb.FINISH_REASON_STOP, stop=END)) == Delta(0, "a", "stop")
    assert sequence.num_tokens == 2


def test_stop_tokens_are_named() -> None:
    """A stop token from the client is the stop_reason."""
    delta = make(ids=(2,)).push(event(1, 2, reason=pb.FINISH_REASON_STOP, stop=2))
    assert delta == Delta(0, "a", "stop", 2)


def test_a_field_that_is_not_set_is_no_stop_token() -> None:
    """An unset field reads as token 0, which may be one of the client's stop tokens."""
    delta = make(ids=(0,)).push(event(1, reason=pb.FINISH_REASON_LENGTH))
    assert delta == Delta(0, "a", "length", None)
    delta = make(ids=(0,)).push(event(1, 0, reason=pb.FINISH_REASON_STOP, stop=0))
    assert delta == Delta(0, "a", "stop", 0)


def test_stop_tokens_show_on_request() -> None:
    """include_stop_str_in_output shows stop tokens."""
    delta = make(include=True, ids=(2,)).push(event(1, 2, reason=pb.FINISH_REASON_STOP, stop=2))
    assert delta == Delta(0, "ab", "stop", 2)


@pytest.mark.parametrize("cut", [1, 2, 3, 6])
@pytest.mark.parametrize(("include", "text"), [(False, "ab"), (True, "abcd")])
def test_a_stop_string_ends_text_and_count(cut: int, include: bool, text: str) -> None:
    """Tokens behind the completed stop string are neither shown nor counted, however events are cut."""
    sequence, out, tokens = make(("cd",), include=include), "", [1, 2, 3, 4, 5, 6]
    delta = Delta(0, "")
    while not sequence.finished:
        delta = sequence.push(event(*tokens[:cut]))
        out, tokens = out + delta.text, tokens[cut:]
    assert (out, delta.finish_reason, delta.stop_reason) == (text, "stop", "cd")
    assert sequence.num_tokens == 4


def test_a_near_miss_is_shown_at_the_end() -> None:
    """Text held back for a stop string appears when the sequence ends."""
    sequence = make(("cd",))
    assert sequence.push(event(1, 3)).text == "a"
    assert sequence.push(event(reason=pb.FINISH_REASON_LENGTH)) == Delta(0, "c", "length")


def test_an_end_token_does_not_complete_a_stop_string() -> None:
    """Hidden text cannot match."""
    delta = make(("<end>",)).push(event(1, END, reason=pb.FINISH_REASON_STOP, stop=END))
    assert delta == Delta(0, "a", "stop", None)


def test_min_tokens_come_before_stop_strings() -> None:
    """The text of the first min_tokens tokens is not part of a match."""
    sequence = make(("ab",), min_tokens=3)
    assert sequence.push(event(1, 2, 1)) == Delta(0, "aba")
    assert sequence.push(event(2)) == Delta(0, "b")
    assert sequence.push(event(1, 2)) == Delta(0, "", "stop", "ab")
    assert sequence.num_tokens == 6
