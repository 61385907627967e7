"""Finds the flag that was meant."""

import difflib
from collections.abc import Collection

from protos.command_line.hiding import without_secrets

_LIKENESS = 0.7


def unknown_arguments(arguments: list[str], known: Collection[str]) -> str:
    """Returns the refusal of arguments that no flag takes.

    Args:
        arguments: what is left of the command line.
        known: all flags.
    """
    first = next((place for place, argument in enumerate(arguments) if argument.startswith("-")), None)
    if first is None:
        return f"unrecognized arguments: {' '.join(arguments)}"
    meant = similar(arguments[first].partition("=")[0], known)
    advice = f"; did you mean {meant}?" if meant else "; --help lists the flags"
    return f"unrecognized arguments: {without_secrets(arguments[first:])}{advice}"


def similar(name: str, known: Collection[str]) -> str | None:
    """Returns the known name that is most like `name`, if one is."""
    found = difflib.get_close_matches(name, known, n=1, cutoff=_LIKENESS)
    return found[0] if found else None
