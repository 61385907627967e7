"""Reads the services' logs while they grow: structlog's JSON lines and the output of libraries."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_TAIL_BYTES = 1 << 20
# A service's line about its own end. The bar of a download may precede it.
_REASON = re.compile(rb"triptych (gateway|scheduler|worker|standby): ")
# Fields of every line that say nothing new to a reader of one service's last lines.
_NOISE = {"timestamp", "level", "service", "event", "exception"}


def last_lines(path: Path, count: int) -> list[str]:
    """Returns the last `count` lines of a log in readable form, or fewer if the log is shorter."""
    try:
        with path.open("rb") as log:
            log.seek(max(0, size_of(path) - _TAIL_BYTES))
            text = log.read().decode(errors="replace")
    except FileNotFoundError:
        return []
    lines = [part for line in text.splitlines() if line.strip() for part in humanize(line).splitlines()]
    return lines[-count:]


def reason(path: Path, since: int) -> str:
    """Returns a service's last line about its own end, written after the first `since` bytes of its log.

    Without such a line, returns the log's last line.
    """
    found = b""
    try:
        with path.open("rb") as log:
            log.seek(since if since <= size_of(path) else 0)  # it was rotated
            for line in log:
                if not line.startswith(b"{") and (match := _REASON.search(line)):
                    found = line[match.start() :]
    except FileNotFoundError:
        return ""
    return found.decode(errors="replace").strip() or "".join(last_lines(path, 1))


def size_of(path: Path) -> int:
    """Returns a file's size; 0 if there is none."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def humanize(line: str) -> str:
    """Returns a JSON line as `event key=value`, followed by its traceback, and any other line unchanged."""
    entry = parse(line)
    if entry is None:
        return line
    fields = [f"{key}={value}" for key, value in entry.items() if key not in _NOISE]
    head = " ".join([str(entry.get("event", "")), *fields])
    return "\n".join([head, *str(entry.get("exception", "")).splitlines()])


def parse(line: str) -> dict[str, Any] | None:
    """Returns the fields of a JSON line; None for any other line."""
    if not line.startswith("{"):
        return None
    try:
        entry = json.loads(line)
    except ValueError:
        return None
    return entry if isinstance(entry, dict) else None


def progress(line: str) -> tuple[str, str] | None:
    """Extracts a worker's progress from a line of its log or of the scheduler's; None for every other line.

    Returns:
        The worker's address, which is empty in its own log, and a text for people.
    """
    entry = parse(line) or {}
    target = str(entry.get("target", ""))
    match entry:
        case {"event": "prepared", "architecture": architecture, "device_name": device}:
            return target, f"{architecture} on {device}"
        case {"event": "progress", "phase": phase, "done": done, "total": total, "message": message}:
            count = f" {done}/{total}" if total else ""
            return target, f"{str(phase).replace('_', ' ')}{count} {message}"
        case {"event": "nothing_to_precompile", "level": level, "device": device}:
            return target, nothing_to_precompile(level, device)
        case {"event": "settings_ignored", "names": [*names], "reason": reason}:
            flags = ", ".join(f"--{name.replace('_', '-')}" for name in names)
            return "scheduler", f"{flags} {'has' if len(names) == 1 else 'have'} no effect here: {reason}"
        case {"event": "adapter_delayed", "reason": reason}:
            return "scheduler", f"tries again: {reason}"
        case {"event": "ready", "phase_seconds": {**seconds}}:
            return target, f"ready ({', '.join(f'{name} {s:.1f} s' for name, s in seconds.items())})"
        case _:
            return None


def nothing_to_precompile(level: int, device: str) -> str:
    """Returns the line about a flag without effect."""
    return f"--require-precompiled has no effect: -O {level} on device {device} keeps no compiled code"


def refused_adapter(line: str) -> str | None:
    """Returns the reason why an adapter of the settings is refused if the scheduler's line says so."""
    entry = parse(line) or {}
    return str(entry["reason"]) if entry.get("event") == "adapter_refused" else None


class LogTail:
    """Follows a log file, which may not exist yet."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._incomplete = b""

    def new_lines(self) -> Iterator[str]:
        """Yields the complete lines that were added since the last call."""
        try:
            with self._path.open("rb") as log:
                if log.seek(0, 2) < self._offset:  # it was rotated
                    self._offset, self._incomplete = 0, b""
                log.seek(self._offset)
                added = log.read()
        except FileNotFoundError:
            return
        self._offset += len(added)
        *lines, self._incomplete = (self._incomplete + added).split(b"\n")
        for line in lines:
            yield line.decode(errors="replace")
