"""What tests of the client commands share."""

from collections.abc import Callable, Coroutine
from dataclasses import dataclass

KEY = "the-key-of-the-clients"


@dataclass(frozen=True)
class Output:
    """What a command has printed."""

    code: int
    out: str
    err: str


Command = Callable[..., Coroutine[None, None, Output]]
"""Runs `triptych` with these arguments."""
