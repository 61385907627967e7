"""Reads the services' logs while they are written: JSON lines of structlog, and whatever else ends up there."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_TAIL_BYTES = 64 * 1024
_LONGEST_LINE = 240
# On every line, and of no use to somebody who reads one service's last lines.
_NOISE = {"timestamp", "level", "service", "event", "exception"}


def last_lines(path: Path, count: int) -> list[str]:
    """The last `count` lines of a log, as people want to read them; fewer if there are not that many."""
    try:
        with path.open("rb") as log:
            log.seek(0, 2)
            log.seek(max(0, log.tell() - _TAIL_BYTES))
            text = log.read().decode(errors="replace")
    except FileNotFoundError:
        return []
    lines = [part for line in text.splitlines() if line.strip() for part in humanize(line).splitlines()]
    return [line[:_LONGEST_LINE] for line in lines[-count:]]


def humanize(line: str) -> str:
    """A log line without JSON: `event key=value`, then the traceback if there is one. Other lines stay as they are."""
    entry = parse(line)
    if entry is None:
        return line
    fields = [f"{key}={value}" for key, value in entry.items() if key not in _NOISE]
    head = " ".join([str(entry.get("event", "")), *fields])
    return "\n".join([head, *str(entry.get("exception", "")).splitlines()])


def parse(line: str) -> dict[str, Any] | None:
    """The fields of a structured line; None if it is something else."""
    if not line.startswith("{"):
        return None
    try:
        entry = json.loads(line)
    except ValueError:
        return None
    return entry if isinstance(entry, dict) else None


def progress(line: str) -> tuple[str, str] | None:
    """What a line of the scheduler's or a worker's log says about a worker's way to readiness.

    Returns:
        The worker's address (empty if it is the log's own) and a text for people; None for every other line.
    """
    entry = parse(line) or {}
    target = str(entry.get("target", ""))
    match entry:
        case {"event": "prepared", "architecture": architecture, "device_name": device}:
            return target, f"{architecture} on {device}"
        case {"event": "progress", "phase": phase, "done": done, "total": total, "message": message}:
            count = f" {done}/{total}" if total else ""
            return target, f"{str(phase).replace('_', ' ')}{count} {message}"
        case {"event": "ready", "phase_seconds": {**seconds}}:
            return target, f"ready ({', '.join(f'{name} {s:.1f} s' for name, s in seconds.items())})"
        case _:
            return None


class LogTail:
    """The lines that were added to a file since the last look. The file may not exist yet."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._rest = b""

    def new_lines(self) -> Iterator[str]:
        """Whole lines only; half a line is kept for the next call."""
        try:
            with self._path.open("rb") as log:
                log.seek(self._offset)
                added = log.read()
        except FileNotFoundError:
            return
        self._offset += len(added)
        *lines, self._rest = (self._rest + added).split(b"\n")
        for line in lines:
            yield line.decode(errors="replace")
