"""Requests that kill the simulated device, or make its steps fail."""

from dataclasses import dataclass
from typing import Literal, TypeAlias

Kind: TypeAlias = Literal["admit", "chunk", "decode"]


class DeviceLostError(Exception):
    """A sequence, whose id this is, has killed the device."""


class StepFailedError(Exception):
    """A sequence, whose id this is, has made the device's step fail; the device runs on."""


@dataclass(frozen=True, slots=True)
class Moment:
    """What the device is about to do for one sequence."""

    kind: Kind
    request_id: str
    end: int
    """Tokens that are computed afterwards."""


def nothing_kills(_moment: Moment) -> bool:
    """The device survives."""
    return False


def nothing_fails(_moment: Moment) -> bool:
    """Every step works."""
    return False
