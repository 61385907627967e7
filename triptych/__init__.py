"""The command `triptych`, and the only name that the wheel adds to an environment.

The packages `deploy`, `gateway`, `protos`, `scheduler_svc` and `worker_svc` lie in this folder once the wheel
is installed, and next to it in a checkout. Triptych's own processes find them through `add_packages`; in
other processes their names stay free. See docs/adr/030-the-wheel-has-one-package.md.
"""

import os
import sys
from pathlib import Path


def add_packages() -> None:
    """Makes the packages importable in this process and in its children."""
    here = Path(__file__).resolve().parent
    folder = str(here if (here / "protos").is_dir() else here.parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    others = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if folder not in others:
        os.environ["PYTHONPATH"] = os.pathsep.join([folder, *filter(None, others)])


def main() -> int:
    """Runs the command; returns its exit code."""
    add_packages()
    from deploy.cli import main as run

    return run()


def register() -> str | None:
    """Is the entry point `vllm.platform_plugins`, which vLLM calls in every process that imports it.

    Returns the platform class in a worker and its children, and does nothing elsewhere.
    """
    if "TRIPTYCH_VLLM_PLATFORM" not in os.environ:
        return None
    add_packages()
    from worker_svc.vllm_platform import register as platform

    return platform()
