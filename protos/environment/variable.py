"""What a variable of another stack does here."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Literal

HIDDEN: Final = "********"
"""Stands for a secret value."""

_FALSE = frozenset({"", "0", "false", "f", "no", "n", "off"})


class Kind(StrEnum):
    """What happens to a variable that is set."""

    MAPPED = "mapped"
    """One of our settings takes it, with the same meaning."""
    HONOURED = "honoured"
    """It has its meaning, without a setting of ours."""
    MOOT = "moot"
    """Nothing here reads it; a service says so once."""
    REFUSED = "refused"
    """It would change answers, and is not served: no service starts."""
    UNKNOWN = "unknown"
    """The table does not have it."""


@dataclass(frozen=True)
class Variable:
    """A row of the table."""

    name: str
    kind: Kind
    """What happens with the values that are not refused."""
    reason: str
    """Why, or what to use instead."""
    ours: str = ""
    """The flag of the setting that a mapped variable sets."""
    refused: Literal["", "on", "off"] = ""
    """The values that are refused although others are not."""

    def kind_of(self, value: str) -> Kind:
        """Returns what happens to a value."""
        if self.refused and (value.strip().lower() in _FALSE) == (self.refused == "off"):
            return Kind.REFUSED
        return self.kind


def mapped(flag: str, *names: str, reason: str = "") -> list[Variable]:
    """Returns rows of variables that set one setting."""
    return [Variable(name, Kind.MAPPED, reason, ours=flag) for name in names]


def honoured(reason: str, names: str) -> list[Variable]:
    """Returns rows for names that are separated by spaces."""
    return _rows(Kind.HONOURED, reason, names.split())


def moot(reason: str, names: str) -> list[Variable]:
    """Returns rows for names that are separated by spaces."""
    return _rows(Kind.MOOT, reason, names.split())


def _rows(kind: Kind, reason: str, names: Iterable[str]) -> list[Variable]:
    return [Variable(name, kind, reason) for name in names]
