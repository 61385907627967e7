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


STOP, LENGTH = pb.FINISH_REASON_STOP, pb.FINISH_REASON_LENGTH


@pytest.mark.parametrize(
    ("sequence", "arrived", "delta"),
    [
        (make(), event(1, 2), Delta(0, "ab")),
        (make(), event(3, reason=LENGTH), Delta(0, "c", "length")),
        (make(), event(reason=LENGTH), Delta(0, "", "length")),
        # The model's end token counts, but has no text and is no stop_reason; a client's stop token is one.
        (make(), event(1, END, reason=STOP, stop=END), Delta(0, "a", "stop")),
        (make(ids=(2,)), event(1, 2, reason=STOP, stop=2), Delta(0, "a", "stop", 2)),
        (make(include=True, ids=(2,)), event(1, 2, reason=STOP, stop=2), Delta(0, "ab", "stop", 2)),
        # An unset field reads as token 0, which may be one of the client's stop tokens.
        (make(ids=(0,)), event(1, reason=LENGTH), Delta(0, "a", "length", None)),
        (make(ids=(0,)), event(1, 0, reason=STOP, stop=0), Delta(0, "a", "stop", 0)),
        # Hidden text completes no stop string.
        (make(("<end>",)), event(1, END, reason=STOP, stop=END), Delta(0, "a", "stop", None)),
    ],
)
def test_an_event_becomes_a_delta(sequence: SequenceText, arrived: SequenceEvent, delta: Delta) -> None:
    """Its tokens become one text, and the last event has the reason."""
    assert sequence.push(arrived) == delta
    assert (sequence.num_tokens, sequence.finished) == (len(arrived.token_ids), bool(arrived.finish_reason))


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


def test_min_tokens_come_before_stop_strings() -> None:
    """The text of the first min_tokens tokens is not part of a match."""
    sequence = make(("ab",), min_tokens=3)
    assert sequence.push(event(1, 2, 1)) == Delta(0, "aba")
    assert sequence.push(event(2)) == Delta(0, "b")
    assert sequence.push(event(1, 2)) == Delta(0, "", "stop", "ab")
    assert sequence.num_tokens == 6
