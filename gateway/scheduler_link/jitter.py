"""Pauses of random length, so that what one fault interrupted does not come back all at once."""

import random
from typing import Final

_SPREAD: Final = 0.5


def jittered(pause_s: float) -> float:
    """Returns a pause between ``pause_s`` and half as much again."""
    return pause_s * random.uniform(1, 1 + _SPREAD)  # noqa: S311 - no secret
