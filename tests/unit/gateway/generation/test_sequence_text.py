"""Log-probabilities, and the count of thinking tokens."""

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


def test_half_a_character_is_reported_by_its_bytes() -> None:
    """Its text is U+FFFD; the bytes of both halves make the character."""
    tokens = [TokenReport(2, 0, -1.0), TokenReport(3, 0, -2.0, ((3, -2.0), (1, -3.0)))]
    found = REPORTER.chat(tokens)
    assert found is not None
    first, second = found["content"]
    assert {first["token"], second["token"]} == {"\ufffd"}
    assert bytes([*first["bytes"], *second["bytes"]]).decode() == "é"
    assert second["top_logprobs"] == [
        {"token": "\ufffd", "logprob": -2.0, "bytes": [0xA9]}, {"token": "a", "logprob": -3.0, "bytes": [97]},
    ]  # fmt: skip


def test_tokens_that_look_alike_do_not_hide_the_chosen_one() -> None:
    """Both halves of a character read U+FFFD; the chosen token's value wins."""
    found = REPORTER.completion([TokenReport(2, 0, -5.0, ((3, -0.5), (1, -1.0)))])
    assert found is not None
    assert found["top_logprobs"] == [{"\ufffd": -5.0, "a": -1.0}]


def test_infinity_is_a_number() -> None:
    """JSON has no infinity, so a finite number stands for it."""
    one = TokenReport.from_proto(1, 0, entry(-math.inf, 9, (4, -math.inf)), 1)
    assert (one.logprob, one.top) == (MIN_LOGPROB, ((4, MIN_LOGPROB),))


def test_no_more_than_was_asked_for() -> None:
    """Log-probabilities that only an echo needs are not reported elsewhere."""
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


def test_without_logprobs_the_field_is_null() -> None:
    """Unrequested log-probabilities are null, as in OpenAI's API."""
    silent = Reporter(BYTES.__getitem__, wanted=False)
    assert silent.chat([]) is None
    assert silent.completion([]) is None
    assert REPORTER.chat([]) == {"content": []}


class LetterDetokenizer:
    """A detokenizer for tests: token 1 is "a", 2 is "b" and so on.

    Token 26 holds its text back until the next one.
    """

    def __init__(self) -> None:
        self.held = ""

    def push(self, token_ids: object) -> str:
        text = ""
        for token_id in token_ids:  # type: ignore[attr-defined]
            if token_id == 26:
                self.held = "z"
            else:
                text, self.held = text + self.held + chr(96 + token_id), ""
        return text

    def finish(self) -> str:
        return self.held


def event(*tokens: int, reason: int = 0) -> SequenceEvent:
    logprobs = [entry(-float(token), 1) for token in tokens]
    return SequenceEvent(tokens, pb.FinishReason.ValueType(reason), logprobs=logprobs)


@pytest.mark.parametrize("stops", [(), ("nothing",)])
def test_offsets_follow_the_text(stops: tuple[str, ...]) -> None:
    """A token whose text is held back has the offset at which its text will appear."""
    watcher = StopStrings(stops, include_in_output=False) if stops else None
    sequence = SequenceText(0, 3, LetterDetokenizer(), watcher, 0, False, frozenset(), num_logprobs=0)
    first = sequence.push(event(1, 26))
    last = sequence.push(event(2, 3, reason=pb.FINISH_REASON_LENGTH))
    assert first.text + last.text == "azbc"
    assert [token.offset for token in first.tokens + last.tokens] == [0, 1, 1, 3]
    assert [token.logprob for token in first.tokens + last.tokens] == [-1.0, -26.0, -2.0, -3.0]
    assert last.finish_reason == "length"


def test_tokens_behind_a_stop_string_are_not_reported() -> None:
    """The tokens that complete the stop string count and are reported."""
    watcher = StopStrings(("cd",), include_in_output=False)
    sequence = SequenceText(0, 3, LetterDetokenizer(), watcher, 0, False, frozenset(), num_logprobs=0)
    delta = sequence.push(event(1, 2, 3, 4, 5, 6))
    assert delta[:4] == Delta(0, "ab", "stop", "cd")[:4]
    assert [token.token_id for token in delta.tokens] == [1, 2, 3, 4]
    assert sequence.num_tokens == 4


def test_added_tokens_without_spaces_between_them() -> None:
    """spaces_between_special_tokens=false joins neighbouring added tokens."""
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
