"""Prints what was understood and found: as lines while checks run, or as one JSON object at the end."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from deploy.diagnosis.findings import Finding, Findings
from deploy.inspection.given import Given
from protos.environment.table import Reading


class Report:
    """The answer of `triptych doctor`."""

    def __init__(self, command: str, *, as_json: bool) -> None:
        """Starts empty.

        Args:
            command: what is checked, for example "triptych serve".
            as_json: whether to print one JSON object instead of lines.
        """
        self._as_json = as_json
        self._content: dict[str, Any] = {"command": command, "starts": True, "error": ""}
        self._content |= {"environment": [], "flags": [], "settings": [], "checks": []}
        self.findings = Findings(self._add)
        """Runs checks, whose results become part of the report."""

    def environment(self, readings: Sequence[Reading]) -> None:
        """Says what variables of other stacks mean."""
        self._content["environment"] = [asdict(reading) for reading in readings]
        self._section("Environment", readings)

    def flags(self, notes: Sequence[str]) -> None:
        """Says what flags of `vllm serve` mean where that differs."""
        self._content["flags"] = list(notes)
        self._section("Flags", notes)

    def settings(self, given: Sequence[Given]) -> None:
        """Says which settings were given, and where."""
        self._content["settings"] = [asdict(each) for each in given]
        self._section("Settings", given)

    def refuse(self, error: str) -> None:
        """Ends the report with a bad flag or setting; the caller prints the line to standard error."""
        self._content |= {"starts": False, "error": error}
        self._print_json()

    def close(self, works: str) -> bool:
        """Ends the report.

        Args:
            works: the last line if no check failed.

        Returns:
            Whether no check failed.
        """
        failed = self.findings.num_failed
        self._content["starts"] = not failed
        if failed:
            works = f"{failed} check{'s' if failed > 1 else ''} failed: it would not start, or not work."
        if left_out := self.findings.num_skipped:
            works += f" {left_out} check{'s were' if left_out > 1 else ' was'} left out."
        if not self._as_json:
            print(f"\n{works}")
        self._print_json()
        return not failed

    def _add(self, finding: Finding) -> None:
        self._content["checks"].append(asdict(finding))
        if not self._as_json:
            print(finding, flush=True)

    def _section(self, heading: str, lines: Sequence[object]) -> None:
        if lines and not self._as_json:
            print("\n".join([f"{heading}:", *(f"  {line}" for line in lines), ""]), flush=True)

    def _print_json(self) -> None:
        if self._as_json:
            print(json.dumps(self._content, indent=2))
