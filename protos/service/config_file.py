"""Reads the file of `--config`: YAML, with settings at the top level and sections by service."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from protos.errors import ConfigurationRefused
from protos.service.help import similar

SECTIONS = ("gateway", "scheduler", "worker", "launcher")
"""The sections of a file, so a single file serves all services."""


@dataclass(frozen=True)
class ConfigFile:
    """The values of a configuration file."""

    path: Path
    shared: Mapping[str, Any]
    """Settings at the top level, by field name."""
    sections: Mapping[str, Mapping[str, Any]]
    """The settings of each section, by field name."""

    @classmethod
    def read(cls, path: Path) -> "ConfigFile":
        """Reads a file; refuses unreadable and malformed files."""
        try:
            content = parse_yaml(path.read_bytes())
        except OSError as error:
            raise ConfigurationRefused(f"--config {path}: {error.strerror}") from error
        except ValueError as error:
            raise ConfigurationRefused(f"--config {path} is not YAML{error}; correct it") from None
        top = _settings(path, content, "the file")
        sections = {
            name: _settings(path, top.pop(name), f"section {name}") for name in SECTIONS if name in top
        }
        return cls(path, top, sections)

    def values(
        self, fields: Mapping[str, Mapping[str, str]], own: Collection[str], fixed: Mapping[str, str]
    ) -> dict[str, Any]:
        """Returns the values for a command, by field; refuses unknown names and contradictions.

        Args:
            fields: the command's sections, and for each name in them its field.
            own: names allowed at the top level.
            fixed: names set by the command itself, and why.
        """
        values = _without_no(self.shared, own)
        self._check(values, own, fixed, "")
        for section, names in fields.items():
            given = _without_no(self.sections.get(section, {}), names)
            self._check(given, names, fixed, f"section {section}: ")
            for name, value in ((names[name], value) for name, value in given.items()):
                if values.setdefault(name, value) != value:
                    raise ConfigurationRefused(
                        f"{self.path}: section {section} sets {name}, which is set above to something else;"
                        " one command has one value"
                    )
        return values

    def _check(
        self, given: Mapping[str, Any], known: Collection[str], fixed: Mapping[str, str], where: str
    ) -> None:
        for name in given:
            if name not in known:
                if name in fixed:
                    raise ConfigurationRefused(
                        f"{self.path}: {where}{name} cannot be set here: {fixed[name]}"
                    )
                meant = similar(name, [*known, *([] if where else SECTIONS)])
                advice = f"did you mean {meant}?" if meant else f"sections are {', '.join(SECTIONS)}"
                raise ConfigurationRefused(f"{self.path}: {where}there is no setting {name!r}; {advice}")


def _settings(path: Path, content: Any, what: str) -> dict[str, Any]:
    """Returns a mapping of the file by field name; unset values are left out."""
    if content is None:
        return {}
    if not isinstance(content, dict) or not all(isinstance(name, str) for name in content):
        raise ConfigurationRefused(f"{path}: {what} should have lines like `port: 8000`")
    return {name.replace("-", "_"): value for name, value in content.items() if value is not None}


def _without_no(given: Mapping[str, Any], own: Collection[str]) -> dict[str, Any]:
    """Returns settings with `no_x: true` as `x: false`; `no_x: false` says nothing, as in vLLM."""
    values: dict[str, Any] = {}
    for name, value in given.items():
        positive = name.removeprefix("no_")
        if name in own or positive not in own or not isinstance(value, bool):
            values[name] = value
        elif value:
            values[positive] = False
    return values


def parse_yaml(content: bytes) -> Any:
    """Returns the value of a YAML document.

    Raises:
        ValueError: It is not YAML. The message is the place, or empty: `` at line 2, column 1``.
    """
    import yaml  # a service without such a file does without

    try:
        return yaml.load(content, getattr(yaml, "CSafeLoader", yaml.SafeLoader))  # noqa: S506 - a safe loader
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a date that does not exist
        mark = getattr(error, "problem_mark", None)
        raise ValueError(f" at line {mark.line + 1}, column {mark.column + 1}" if mark else "") from None
