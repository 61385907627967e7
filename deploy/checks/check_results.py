"""Results of checks: lines while they run, or a JSON object at the end."""

import json
import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from deploy.launcher.service_flags import written
from deploy.launcher.supervisor import BAD_SETTING
from protos.errors import TriptychError
from protos.service.environment import Reading
from protos.service.redaction import HIDDEN
from protos.service.settings import ServiceSettings, declared, is_secret, may_be_empty, reference_variables

Status = Literal["ok", "note", "FAILED", "skipped"]


class CheckFailed(Exception):  # noqa: N818 - a result, not an error
    """A fault that a start would not find. The text names it and the remedy."""


class Note(Exception):  # noqa: N818 - a result, not an error
    """A shortcoming that stops no start. The text names it and its consequence."""


@dataclass(frozen=True)
class CheckResult:
    """The result of a check."""

    name: str
    status: Status
    """"FAILED" if the command would not start, or not work."""
    text: str
    """The finding; for a failure, the line that the command would print."""

    def __str__(self) -> str:
        return f"{self.status:<8}{self.name:<20}{self.text}"


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


class Report:
    """The answer of `triptych doctor`."""

    def __init__(self, command: str, *, as_json: bool) -> None:
        """Starts an empty report about a command, such as "triptych serve"."""
        self._as_json = as_json
        self._content: dict[str, Any] = {"command": command, "starts": True, "error": ""}
        self._content |= {"environment": [], "flags": [], "settings": [], "checks": []}
        self._status: dict[str, Status] = {}
        self._exit_code = 0

    def describe(
        self, section: str, lines: Sequence[Reading] | Sequence[str] | Sequence[SettingSource]
    ) -> None:
        """Adds the lines of the section "environment", "flags" or "settings"."""
        self._content[section] = [line if isinstance(line, str) else asdict(line) for line in lines]
        if lines and not self._as_json:
            print("\n".join([f"{section.capitalize()}:", *(f"  {line}" for line in lines), ""]), flush=True)

    def check(self, name: str, run: Callable[[], str], *, needs: Collection[str] = ()) -> Status:
        """Runs a check unless an earlier check that it needs has failed or is absent; returns its status.

        `run` returns its finding. It may raise anything, as a broken driver or compiler may.
        """
        broken = [other for other in needs if self._status.get(other) not in {"ok", "note"}]
        if broken:
            return self.skip(name, ", ".join(broken))
        try:
            return self._add(CheckResult(name, "ok", run()))
        except Note as note:
            return self._add(CheckResult(name, "note", str(note)))
        except CheckFailed as failure:
            return self._fail(name, str(failure))
        except TriptychError as error:
            return self._fail(name, error.message, BAD_SETTING)
        except Exception as error:  # noqa: BLE001 - becomes the result
            lines = [line.strip() for line in str(error).splitlines() if line.strip()]
            return self._fail(name, f"{type(error).__name__}: {lines[0] if lines else ''}")

    def skip(self, name: str, needs: str) -> Status:
        """Records a check that cannot run for want of something."""
        return self._add(CheckResult(name, "skipped", f"needs: {needs}"))

    def refuse(self, error: str) -> int:
        """Ends the report with a bad flag or setting; returns the exit code."""
        self._content |= {"starts": False, "error": error}
        self._print_json()
        return BAD_SETTING

    def close(self, works: str) -> int:
        """Ends the report, with the line `works` if no check failed; returns the exit code."""
        statuses = list(self._status.values())
        if failed := statuses.count("FAILED"):
            works = f"{failed} check{'s' if failed > 1 else ''} failed: it would not start, or not work."
        if skipped := statuses.count("skipped"):
            if not failed:
                works, self._exit_code = "Nothing found so far stands against a start.", 1
            works += f" {skipped} check{'s were' if skipped > 1 else ' was'} skipped."
        self._content["starts"] = False if failed else None if skipped else True
        if not self._as_json:
            print(f"\n{works}")
        self._print_json()
        return self._exit_code

    def _fail(self, name: str, text: str, exit_code: int = 1) -> Status:
        if exit_code > self._exit_code:
            self._exit_code, self._content["error"] = exit_code, text
        return self._add(CheckResult(name, "FAILED", text))

    def _add(self, result: CheckResult) -> Status:
        self._status[result.name] = result.status
        self._content["checks"].append(asdict(result))
        if not self._as_json:
            print(result, flush=True)
        return result.status

    def _print_json(self) -> None:
        if self._as_json:
            print(json.dumps(self._content, indent=2))


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
    empty_counts = may_be_empty(cls, field)
    given = (name for name in variables if os.environ.get(name) or (empty_counts and name in os.environ))
    return next(given, "configuration file")


def _variables(cls: type[ServiceSettings], field: str) -> list[str]:
    """Returns a setting's variables by precedence."""
    opposite = declared(cls, "reference_opposites").get(field)
    return [f"TRIPTYCH_{field.upper()}", *([opposite] if opposite else []), *reference_variables(cls, field)]
