"""When an engine without a model emits tokens, and which ones; the same for both contenders.

It imports nothing, because vLLM's environment has none of our packages.
"""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

# Each is one token of SmolLM2 that begins with a space, so that a client counts tokens by their spaces.
WORDS: Final = " the capital of France is Paris and it lies on the river in the north of the country"


def read_token_ids(path: Path) -> list[int]:
    """Returns the token ids that every answer repeats, from a file of numbers."""
    return [int(number) for number in path.read_text().split()]


class Pace:
    """Times of steps: one token for every running answer in each."""

    def __init__(self, tokens_per_s: float) -> None:
        """Starts the clock; `tokens_per_s` is the rate of each answer, 0 for as fast as the engine can."""
        self._tokens_per_s = tokens_per_s
        self._interval_s = 1 / tokens_per_s if tokens_per_s else 0.0
        self._next_s = time.monotonic()

    def at(self, tokens_per_s: float) -> "Pace":
        """Returns a clock of that rate: this one, if it has it."""
        return self if tokens_per_s == self._tokens_per_s else Pace(tokens_per_s)

    def wait_s(self) -> float:
        """Returns the seconds until the next step is due, and counts that step."""
        now = time.monotonic()
        # An engine that falls behind does not catch up in a burst, as a device would not.
        self._next_s = max(self._next_s + self._interval_s, now)
        return self._next_s - now


class Answer:
    """One answer under way."""

    __slots__ = ("_left", "_tokens")

    def __init__(self, token_ids: list[int], max_tokens: int, offset: int) -> None:
        self._left = max_tokens
        self._tokens = self._cycle(token_ids, offset)

    @staticmethod
    def _cycle(token_ids: list[int], offset: int) -> Iterator[int]:
        position = offset
        while True:
            yield token_ids[position % len(token_ids)]
            position += 1

    def next(self) -> tuple[int, bool]:
        """Returns the next token, and whether it is the last."""
        self._left -= 1
        return next(self._tokens), self._left <= 0
