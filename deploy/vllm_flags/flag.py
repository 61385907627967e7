"""One flag of `vllm serve`: what it is here, and why."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

Kind = Literal["alias", "mapped", "moot", "refused"]
"""alias: ours means the same. mapped: ours means nearly the same, and the reason says what differs. moot:
accepted without effect. refused: the reason says what to use instead."""

Form = Literal["value", "values", "switch"]
"""What follows the flag: one value, one or more values, or none, as for a flag with a `--no-` form."""

Convert = Callable[[str], list[str]]
"""Turns vLLM's value into our flags. Raises ValueError with what the value should be."""


@dataclass(frozen=True)
class VllmFlag:
    """One flag of `vllm serve`."""

    name: str
    """With its dashes, as in `vllm serve --help=all`."""
    kind: Kind
    ours: str
    """Our flag; empty if there is none."""
    reason: str
    """One or more sentences without a subject that complete "--name …"; empty for an alias of the same
    name."""
    form: Form = "value"
    short: tuple[str, ...] = ()
    """Other names of the flag."""
    harmless: tuple[str, ...] = ()
    """Values of a refused flag that ask for what happens anyway."""
    convert: Convert | None = None
    """How a mapped value becomes ours."""
    noted: bool = False
    """Whether the reason is said even if a mapped value stays as it is."""


def same(*names: str, form: Form = "value", note: str = "") -> list[VllmFlag]:
    """Returns rows of flags with our name and our meaning; short forms may follow a name."""
    return [
        VllmFlag(name, "alias", name, note, form, tuple(short))
        for name, *short in (text.split() for text in names)
    ]


def mapped(
    names: str, ours: str, reason: str, *, form: Form = "value", convert: Convert, noted: bool = False
) -> list[VllmFlag]:
    """Returns the row of a flag that becomes one of ours."""
    name, *short = names.split()
    return [VllmFlag(name, "mapped", ours, reason, form, tuple(short), convert=convert, noted=noted)]


def moot(reason: str, *names: str, form: Form = "value") -> list[VllmFlag]:
    """Returns rows of flags that have no effect, all for one reason."""
    return [
        VllmFlag(name, "moot", "", reason, form, tuple(short))
        for name, *short in (text.split() for text in names)
    ]


def refused(reason: str, *names: str, form: Form = "value", harmless: tuple[str, ...] = ()) -> list[VllmFlag]:
    """Returns rows of flags that are refused, all for one reason.

    The `--no-` form of a switch is harmless.
    """
    return [
        VllmFlag(name, "refused", "", reason, form, tuple(short), harmless)
        for name, *short in (text.split() for text in names)
    ]
