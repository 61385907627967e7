"""Prints the line of JSON that ends every bench."""

import datetime as dt
import json
import os
import platform
from collections.abc import Mapping
from pathlib import Path


def machine() -> str:
    """Returns the machine's processor, usable cores and memory as text."""
    text = Path("/proc/cpuinfo").read_text()
    name = next(
        (line.split(":", 1)[1].strip() for line in text.splitlines() if line.startswith("model name")),
        platform.machine(),
    )
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{name}, {len(os.sched_getaffinity(0))} cores, {memory:.0f} GiB"


def report(name: str, figures: Mapping[str, object], ratios: Mapping[str, float]) -> None:
    """Prints the line: the bench's name, machine, day, figures, and ratios against a peer or a limit."""
    day = dt.datetime.now(tz=dt.UTC).date().isoformat()
    rounded = {key: round(value, 4) for key, value in ratios.items()}
    print(json.dumps({"bench": name, "machine": machine(), "day": day, **figures, "ratios": rounded}))
