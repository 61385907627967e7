"""Finds the flag that was meant."""

import difflib
from collections.abc import Collection, Sequence

from protos.command_line.hiding import words_shown

_LIKENESS = 0.7


def unknown_arguments(arguments: Sequence[str], known: Collection[str], given: Sequence[str]) -> str:
    """Returns the refusal of unknown arguments; it names a flag without its value.

    Args:
        arguments: the rest of the command line.
        known: all flags.
        given: the whole command line.
    """
    flags = (argument.partition("=")[0] for argument in arguments if argument.startswith("-"))
    flag = next((name for name in flags if name.strip("-")), None)
    if flag is None:
        return f"unrecognized arguments: {words_shown(arguments, given)}"
    meant = similar(flag, known)
    return (
        f"unrecognized arguments: {flag}; {f'did you mean {meant}?' if meant else '--help lists the flags'}"
    )


def similar(name: str, known: Collection[str]) -> str | None:
    """Returns the known name most like `name`, if any."""
    found = difflib.get_close_matches(name, known, n=1, cutoff=_LIKENESS)
    return found[0] if found else None
