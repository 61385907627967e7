"""Which settings a command was given, and where each comes from."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel

from protos.environment.table import HIDDEN
from protos.settings import ServiceSettings, declared, is_secret, reference_variables


@dataclass(frozen=True)
class Given:
    """A setting that a flag, a variable or a file has set."""

    flag: str
    value: str
    """As people write it; a secret is hidden."""
    source: str
    """ "command line", a variable's name, or "configuration file"."""

    def __str__(self) -> str:
        """One line for people."""
        return f"{self.flag} {self.value}  ({self.source})"


def given(settings: ServiceSettings, argv: Sequence[str]) -> list[Given]:
    """Returns what was set, in the order of the class' fields.

    Args:
        settings: as they were loaded.
        argv: our flags on the command line.
    """
    cls = type(settings)
    flags = _fields(cls, argv)
    return [
        Given(f"--{name.replace('_', '-')}", _shown(settings, name), _source(cls, name, flags))
        for name in cls.model_fields
        if name in settings.model_fields_set
    ]


def _fields(cls: type[ServiceSettings], argv: Sequence[str]) -> set[str]:
    """Returns the fields that a command line sets."""
    shortcuts = {
        f"-{short}": name for name, short in dict(cls.model_config.get("cli_shortcuts") or {}).items()
    }
    found = set()
    for argument in argv:
        name = argument.partition("=")[0].partition(".")[0]
        short = next((long for short, long in shortcuts.items() if name.startswith(short)), "")
        words = [name.removeprefix("--"), name.removeprefix("--no-")] if name.startswith("--") else [short]
        found |= {field for word in words if (field := word.replace("-", "_")) in cls.model_fields}
    if cls.positional and argv and not any(os.environ.get(name) for name in _variables(cls, cls.positional)):
        found.add(cls.positional)
    return found


def _source(cls: type[ServiceSettings], field: str, flags: set[str]) -> str:
    if field in flags:
        return "command line"
    return next((name for name in _variables(cls, field) if os.environ.get(name)), "configuration file")


def _variables(cls: type[ServiceSettings], field: str) -> list[str]:
    """Returns a setting's variables, the first that counts first."""
    opposite = declared(cls, "reference_opposites").get(field)
    return [f"TRIPTYCH_{field.upper()}", *([opposite] if opposite else []), *reference_variables(cls, field)]


def _shown(settings: ServiceSettings, field: str) -> str:
    value = getattr(settings, field)
    if is_secret(type(settings), field):
        return HIDDEN
    match value:
        case bool():
            return "on" if value else "off"
        case tuple():
            return " ".join(map(str, value))
        case dict():
            return ",".join(f"{key}={item}" for key, item in value.items())
        case BaseModel():
            return value.model_dump_json(exclude_unset=True)
        case str() | Path() | int() | float() | None:
            return str(value)
        case _:
            return repr(value)
