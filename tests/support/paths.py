"""Paths of the checkout and its sources."""

from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]

PACKAGES: Final = ("deploy", "gateway", "protos", "scheduler_svc", "worker_svc")


def sources(*packages: str) -> list[Path]:
    """Returns the modules of packages, generated stubs excluded."""
    return [
        path for package in packages for path in (ROOT / package).rglob("*.py") if "_pb2" not in path.name
    ]
