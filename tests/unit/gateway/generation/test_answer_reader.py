"""The count of a sequence's thinking tokens."""

from collections.abc import Sequence

import pytest

from gateway.generation.sequence_text import ThinkingMeter
from gateway.parsers.reasoning import Thinking, ThinkParser


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
