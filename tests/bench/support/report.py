"""The command line of every bench, and the line of JSON that ends it."""

import argparse
import datetime as dt
import json
import os
import platform
import sys
from collections.abc import Callable, Mapping
from pathlib import Path


def parser(doc: str | None, quick: str) -> argparse.ArgumentParser:
    """Returns the parser of a bench with that docstring; `quick` says what --quick does."""
    made = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    made.add_argument("--quick", action="store_true", help=quick)
    return made


def exit_code(name: str, run: Callable[[], None]) -> int:
    """Runs a bench; returns 0.

    After a line that says why: 1 if a contender fails, 2 if a model, a device or a peer's environment is
    missing.
    """
    # Not earlier: benches prepare the environment before they import a worker.
    from protos.errors import ConfigurationRefused
    from tests.bench.support.contenders import ContenderFailed

    try:
        run()
    except ConfigurationRefused as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 2
    except ContenderFailed as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 1
    return 0


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
