"""The settings of a command line, and their sources."""

import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel

from protos.environment.table import HIDDEN
from protos.settings import ServiceSettings, declared, is_secret, reference_variables


@dataclass(frozen=True)
class SettingSource:
    """A setting that a flag, a variable or a file has set."""

    flag: str
    value: str
    """As people write it; a secret is hidden."""
    source: str
    """ "command line", a variable's name, or "configuration file"."""

    def __str__(self) -> str:
        return f"{self.flag} {self.value}  ({self.source})"


def setting_sources(settings: ServiceSettings, flags: Collection[str]) -> list[SettingSource]:
    """Returns the settings that have been set, in the order of the class' fields.

    Args:
        settings: as loaded.
        flags: the fields that the command line sets.
    """
    cls = type(settings)
    return [
        SettingSource(f"--{name.replace('_', '-')}", _shown(settings, name), _source(cls, name, flags))
        for name in cls.model_fields
        if name in settings.model_fields_set
    ]


def _source(cls: type[ServiceSettings], field: str, flags: Collection[str]) -> str:
    other = declared(cls, "also_set_by").get(field)
    fields = [field] if other is None else [field, other]
    if any(name in flags for name in fields):
        return "command line"
    variables = [variable for name in fields for variable in _variables(cls, name)]
    return next((name for name in variables if os.environ.get(name)), "configuration file")


def _variables(cls: type[ServiceSettings], field: str) -> list[str]:
    """Returns a setting's variables by precedence."""
    opposite = declared(cls, "reference_opposites").get(field)
    return [f"TRIPTYCH_{field.upper()}", *([opposite] if opposite else []), *reference_variables(cls, field)]


def _shown(settings: ServiceSettings, field: str) -> str:
    if is_secret(type(settings), field):
        return HIDDEN
    match getattr(settings, field):
        case bool() as value:
            return "on" if value else "off"
        case tuple() as value:
            return " ".join(map(str, value))
        case dict() as value:
            return ",".join(f"{key}={item}" for key, item in value.items())
        case BaseModel() as value:
            return value.model_dump_json(exclude_unset=True)
        case str() | Path() | int() | float() | None as value:
            return str(value)
        case value:
            return repr(value)
