"""Events become text, counts, finish reasons and log-probabilities; thinking tokens are counted."""

import math
from collections.abc import Sequence

import pytest

from gateway.generation.sequence_text import (
    MIN_LOGPROB,
    Delta,
    Reporter,
    SequenceText,
    ThinkingMeter,
    TokenReport,
)
from gateway.parsers.reasoning import Thinking, ThinkParser
from gateway.scheduler_client.in_flight import SequenceEvent
from gateway.text.detokenizer import StopStrings, WindowedDetokenizer
from protos.triptych.v1 import common_pb2 as pb

BYTES = {1: b"a", 2: "é".encode()[:1], 3: "é".encode()[1:], 4: b" b", 5: b"<end>"}
REPORTER = Reporter(BYTES.__getitem__)


def entry(logprob: float, rank: int, *top: tuple[int, float]) -> pb.TokenLogprobs:
    return pb.TokenLogprobs(
        logprob=logprob,
        rank=rank,
        top_token_ids=[one for one, _ in top],
        top_logprobs=[one for _, one in top],
    )


def test_tokens_that_look_alike_do_not_hide_the_chosen_one() -> None:
    """Both halves of a character read U+FFFD; the chosen token's value wins."""
    found = REPORTER.completion([TokenReport(2, 0, -5.0, ((3, -0.5), (1, -1.0)))])
    assert found is not None
    assert found["top_logprobs"] == [{"\ufffd": -5.0, "a": -1.0}]


def test_infinity_is_a_number() -> None:
    one = TokenReport.from_proto(1, 0, entry(-math.inf, 9, (4, -math.inf)), 1)
    assert (one.logprob, one.top) == (MIN_LOGPROB, ((4, MIN_LOGPROB),))


def test_no_more_than_was_asked_for() -> None:
    found = entry(-1.0, 4, (4, -0.1), (2, -0.2))
    ((token_id, logprob),) = TokenReport.from_proto(1, 0, found, 1).top
    assert token_id == 4
    assert logprob == pytest.approx(-0.1)
    assert TokenReport.from_proto(1, 0, found, 0).top == ()
    (first, second) = REPORTER.prompt([4, 1], [found], 1)
    assert first is None
    assert second == {
        "1": {"logprob": -1.0, "rank": 4, "decoded_token": "a"},
        "4": {"logprob": pytest.approx(-0.1), "rank": 1, "decoded_token": " b"},
    }


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


def test_tokens_behind_a_stop_string_are_not_reported() -> None:
    watcher = StopStrings(("cd",), include_in_output=False)
    sequence = SequenceText(0, 3, LetterDetokenizer(), watcher, 0, False, frozenset(), num_logprobs=0)
    reports = [entry(-float(token), 1) for token in range(1, 7)]
    delta = sequence.push(SequenceEvent((1, 2, 3, 4, 5, 6), pb.FINISH_REASON_UNSPECIFIED, logprobs=reports))
    assert delta[:4] == Delta(0, "ab", "stop", "cd")[:4]
    assert [token.token_id for token in delta.tokens] == [1, 2, 3, 4]
    assert sequence.num_tokens == 4


def test_added_tokens_without_spaces_between_them() -> None:
    words = {1: "one", 2: "two", 8: "<x>", 9: "<y>"}

    def decode(token_ids: list[int]) -> str:
        return " ".join(words[token_id] for token_id in token_ids)

    for glued, text in (({}, " <x> <y> two"), ({8: "<x>", 9: "<y>"}, " <x><y> two")):
        detokenizer = WindowedDetokenizer(decode, [1], glued)
        assert detokenizer.push([8, 9, 2]) + detokenizer.finish() == text


@pytest.mark.parametrize(
    ("at", "pieces", "expected"),
    [
        (Thinking.POSSIBLE, ["<think>", "a", "b", "</think>", "\n\n", "answer"], 4),
        (Thinking.POSSIBLE, ["\n", "<th", "ink>", "a", "</think>", "answer", "</think>"], 5),
        (Thinking.POSSIBLE, ["no", "thinking", "<think>", "a"], 0),
        (Thinking.OPEN, ["a", "</think>answer", "b"], 1),
        (Thinking.OPEN, ["a", "b", ""], 2),
        (Thinking.OVER, ["a", "b"], 0),
    ],
)
def test_tokens_of_thinking_are_counted(at: Thinking, pieces: Sequence[str], expected: int) -> None:
    """Markers count; the token that begins the answer does not, nor anything behind it."""
    meter = ThinkingMeter(ThinkParser(at))
    for count, piece in enumerate(pieces, start=1):
        meter.feed(piece, count)
    assert meter.num_tokens == expected
