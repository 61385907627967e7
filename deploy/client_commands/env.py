"""`triptych env`: describes this machine for a bug report."""

import json
import os
from collections.abc import Iterator
from typing import Any

from deploy.inspection.bug_report import facts
from deploy.one_line_parser import OneLineParser

_SECTIONS = {"versions": "Versions", "cpu": "CPU", "memory": "Memory", "devices": "Devices"}


def main(argv: list[str]) -> int:
    """Prints the report.

    Returns:
        The exit code: 0.
    """
    parser = OneLineParser(
        prog="triptych env",
        description="Prints what a bug report should say about this machine: versions, hardware, packages of the"
        " locks, and set variables with their secrets hidden.",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    arguments = parser.parse_args(argv)
    found = facts(os.environ)
    print(json.dumps(found, indent=2) if arguments.json else "\n".join(_lines(found)))
    return 0


def _lines(found: dict[str, Any]) -> Iterator[str]:
    for section, title in _SECTIONS.items():
        yield f"{title}:"
        for name, value in found[section].items():
            if isinstance(value, list) and section == "devices":
                yield from (f"  {name}: {line}" for line in value or ["none"])
            else:
                text = " ".join(value) if isinstance(value, list) else value
                yield f"  {name}: {'unknown' if text is None else text}"
    yield "Packages (tested version where it differs):"
    for name, entry in found["packages"].items():
        installed, tested = entry["installed"], entry["tested"]
        where = f"  (tested: {tested}; {', '.join(entry['locks'])})"
        yield f"  {name} {installed or 'not installed'}{'' if installed == tested else where}"
    yield "Variables:"
    yield from [f"  {name}={value}" for name, value in found["variables"].items()] or ["  none"]
