"""The settings of a command line, and their sources."""

import os
from collections.abc import Collection
from dataclasses import dataclass

from deploy.launcher.service_flags import written
from protos.environment.table import HIDDEN
from protos.settings import ServiceSettings, declared, is_secret, reference_variables


@dataclass(frozen=True)
class SettingSource:
    """A setting, and its flag, variable or file."""

    flag: str
    value: str
    """Empty for a switch; a secret is hidden."""
    source: str
    """ "command line", a variable's name, or "configuration file"."""

    def __str__(self) -> str:
        return f"{self.flag} {self.value} ".rstrip() + f"  ({self.source})"


def setting_sources(settings: ServiceSettings, flags: Collection[str]) -> list[SettingSource]:
    """Returns the settings without defaults; `flags` are the fields that the command line sets."""
    cls = type(settings)
    sources = []
    for name in cls.model_fields:
        if name in settings.model_fields_set:
            flag, _, value = written(name, getattr(settings, name)).partition("=")
            shown = HIDDEN if is_secret(cls, name) else value
            sources.append(SettingSource(flag, shown, _source(cls, name, flags)))
    return sources


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
