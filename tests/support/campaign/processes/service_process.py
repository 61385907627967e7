"""A service under test: ``python -m tests.support.campaign.processes.service_process NAME FOLDER FLAGS``.

It is the service's own command. On SIGUSR1 it writes what it holds to a file of FOLDER; a worker also obeys
the file with its device's fault (see `faulty_worker`).
"""

import importlib
import os
import sys
from pathlib import Path

from deploy.launcher.process import die_with_launcher
from tests.support.campaign.processes import inspection

MAIN_MODULES = {
    "gateway": "gateway.__main__",
    "scheduler": "scheduler_svc.__main__",
    "worker": "worker_svc.__main__",
}


def main() -> int:
    """Runs the service; returns its exit code."""
    name, folder, *flags = sys.argv[1:]
    return run(name, Path(folder), flags)


def run(name: str, folder: Path, flags: list[str]) -> int:
    """Runs the service in this process; returns its exit code."""
    die_with_launcher(os.environ)
    service = name.partition("-")[0]
    inspection.install(service, folder / f"{name}.json")
    if service == "worker":
        from tests.support.campaign.processes import faulty_worker

        faulty_worker.install(folder / f"{name}.fault")
    return int(importlib.import_module(MAIN_MODULES[service]).main(flags))


if __name__ == "__main__":
    sys.exit(main())
