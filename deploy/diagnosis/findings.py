"""Runs checks one after another and prints a line for each."""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Literal

from protos.errors import ConfigurationRefused

Status = Literal["ok", "note", "FAILED", "skipped"]


class Missing(Exception):  # noqa: N818 - a finding, not an error
    """A check found that something is missing. The text says what, and what to do."""


class Remark(Exception):  # noqa: N818 - a finding, not an error
    """A check found something that a worker can do without. The text says what, and what follows."""


@dataclass(frozen=True)
class Finding:
    """The result of one check."""

    name: str
    """What was checked."""
    status: Status
    """"FAILED" if a worker would not start, or not work."""
    text: str
    """What was found, or what is missing and what to do."""

    def __str__(self) -> str:
        return f"{self.status:<8}{self.name:<20}{self.text}"


class Findings:
    """The results so far."""

    def __init__(self, show: Callable[[Finding], None]) -> None:
        """Starts empty.

        Args:
            show: called with each result as soon as it is known.
        """
        self._show = show
        self._found: dict[str, Finding] = {}

    @property
    def num_failed(self) -> int:
        """The number of checks that failed."""
        return sum(finding.status == "FAILED" for finding in self._found.values())

    @property
    def num_skipped(self) -> int:
        """The number of checks that were left out."""
        return sum(finding.status == "skipped" for finding in self._found.values())

    def status_of(self, name: str) -> Status:
        """Returns the result of an earlier check."""
        return self._found[name].status

    def check(self, name: str, run: Callable[[], str], *, needs: Collection[str] = ()) -> None:
        """Runs a check, unless one that it needs has failed or was skipped.

        Any error of the check is its result: a broken driver or compiler may raise anything.

        Args:
            name: unique.
            run: returns what it found; raises `Missing`, `Remark` or any error.
            needs: names of earlier checks.
        """
        broken = [
            other
            for other in needs
            if other not in self._found or self._found[other].status in ("FAILED", "skipped")
        ]
        if broken:
            self._add(Finding(name, "skipped", f"needs: {', '.join(broken)}"))
            return
        try:
            self._add(Finding(name, "ok", run()))
        except Remark as remark:
            self._add(Finding(name, "note", str(remark)))
        except (Missing, ConfigurationRefused) as reason:
            self._add(Finding(name, "FAILED", str(reason)))
        except Exception as error:  # noqa: BLE001 - see above
            lines = [line.strip() for line in str(error).splitlines() if line.strip()]
            self._add(Finding(name, "FAILED", f"{type(error).__name__}: {lines[0] if lines else ''}"))

    def _add(self, finding: Finding) -> None:
        self._found[finding.name] = finding
        self._show(finding)
