"""The locks agree with one another, with pyproject.toml and with what is installed."""

import re
from collections import defaultdict

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from deploy import lockfile

PINS = {lock.name: lockfile.read(lock.path) for lock in lockfile.LOCK_FILES}


def test_a_package_has_one_version() -> None:
    """No two locks pin different versions of a package."""
    versions = defaultdict(set)
    for pins in PINS.values():
        for name, version in pins.items():
            versions[name].add(version)
    assert {name: found for name, found in versions.items() if len(found) > 1} == {}


def test_services_install_without_torch() -> None:
    """The gateway's and the scheduler's lock holds neither torch nor anything that belongs to it."""
    heavy = re.compile(r"torch.*|vllm.*|triton|nvidia-.*|accelerate|xgrammar")
    assert [name for name in PINS["services"] if heavy.fullmatch(name)] == []


def test_torch_is_the_build_without_cuda() -> None:
    """The worker's lock names torch's CPU build, and none of the libraries that come with the other one."""
    assert PINS["worker-cpu"]["torch"].endswith("+cpu")
    assert [
        name for name in PINS["worker-cpu"] if name.startswith(("nvidia", "cuda", "triton", "torchvision"))
    ] == []


@pytest.mark.parametrize(
    ("lock", "extras"),
    [
        ("services", ["base", "gateway", "scheduler"]),
        ("worker-cpu", ["base", "worker"]),
        ("dev", ["dev"]),
    ],
)
def test_pins_satisfy_what_is_declared(lock: str, extras: list[str]) -> None:
    """Every requirement in pyproject.toml is pinned to a version that it accepts."""
    pins = PINS["services"] | PINS[lock] if lock == "dev" else PINS[lock]
    declared = lockfile.declared()
    for requirement in (Requirement(text) for extra in extras for text in declared[extra]):
        pinned = pins[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(pinned, prereleases=True), requirement


def test_locks_are_what_the_tests_run_with() -> None:
    """The locks are complete: they hold what follows from the metadata of the installed packages, in those versions."""
    assert {lock.name: pins for lock, pins in lockfile.compute().items()} == PINS


def test_every_left_out_package_is_really_left_out() -> None:
    """A package that is declared as never imported is in no lock."""
    assert {name for pins in PINS.values() for name in pins} & lockfile.NEVER_IMPORTED.keys() == set()
