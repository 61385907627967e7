"""The locks agree with one another, with pyproject.toml and with what is installed."""

import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.support import lockfile
from tests.support.paths import ROOT

PINS = {lock.name: lockfile.read(lock.path) for lock in lockfile.LOCK_FILES}


def test_a_package_has_one_version() -> None:
    versions = defaultdict(set)
    for pins in PINS.values():
        for name, version in pins.items():
            versions[name].add(version)
    assert {name: found for name, found in versions.items() if len(found) > 1} == {}


@pytest.mark.parametrize("lock", ["gateway", "scheduler"])
def test_gateway_and_scheduler_install_without_torch(lock: str) -> None:
    """Their locks have neither torch nor a package that belongs to it, nor a client of a model hub."""
    heavy = re.compile(r"torch.*|vllm.*|triton|nvidia-.*|transformers|xgrammar|numpy|huggingface-hub")
    allowed = ["numpy"] if lock == "gateway" else []
    assert [name for name in PINS[lock] if heavy.fullmatch(name)] == allowed


# Imports every module of a package and more modules by name, and prints the distributions of all imports.
_IMPORT_ALL = """
import importlib, pkgutil, sys
from importlib.metadata import packages_distributions
from packaging.utils import canonicalize_name

package = importlib.import_module(sys.argv[1])
for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
    importlib.import_module(module.name)
for name in sys.argv[2:]:
    importlib.import_module(name)
distributions = packages_distributions()
for top in {name.partition(".")[0] for name in sys.modules}:
    print(*map(canonicalize_name, distributions.get(top, [])))
"""


@pytest.mark.parametrize(
    ("lock", "package", "by_name", "not_imported"),
    [
        (
            "gateway",
            "gateway",
            # `triptych secure-files` runs in the gateway's image.
            [
                "uvicorn.loops.uvloop",
                "uvicorn.protocols.http.httptools_impl",
                "cryptography.x509",
                "yaml",
                # Imported by the requests that need them.
                "numpy",
                "fastapi_offline",
            ],
            set(),
        ),
        # `--config` reads YAML; the dates of certificates are read where there are any.
        ("scheduler", "scheduler_svc", ["yaml", "cryptography.x509"], set()),
    ],
)
def test_a_service_imports_every_package_of_its_image(
    lock: str, package: str, by_name: list[str], not_imported: set[str]
) -> None:
    """The images of the gateway and the scheduler carry nothing that their service does not use."""
    done = subprocess.run(
        [sys.executable, "-c", _IMPORT_ALL, package, *by_name], capture_output=True, text=True, check=True
    )
    assert PINS[lock].keys() - set(done.stdout.split()) == not_imported


@pytest.mark.parametrize("path", sorted(lockfile.LOCKS.glob("*.txt")), ids=lambda path: path.stem)
def test_every_pin_has_hashes(path: Path) -> None:
    """The same ones in each lock: pip refuses a file that has none of them."""
    lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
    assert all(re.fullmatch(r"[a-z0-9-]+==\S+( --hash=sha256:[0-9a-f]{64})+", line) for line in lines)
    pins = [f"{name}=={version}" for name, version in lockfile.read(path).items()]
    assert [lockfile.with_hashes(pins)[pin] for pin in pins] == lines


@pytest.mark.parametrize(
    "path", [ROOT / "Makefile", *(ROOT / "deploy/images").glob("*.Dockerfile")], ids=lambda path: path.name
)
def test_every_install_of_a_lock_checks_hashes(path: Path) -> None:
    """Without the option a lock that has lost its hashes would be installed unchecked."""
    text = path.read_text().replace("\\\n", "")
    installs = [
        command for command in re.split(r"&&|;|\n", text) if " -r" in command and "rm -r" not in command
    ]
    assert installs
    assert [command for command in installs if "--require-hashes" not in command] == []


def test_torch_is_the_build_without_cuda() -> None:
    """The worker's lock names torch's CPU build, and none of the libraries that the CUDA build needs."""
    assert PINS["worker-cpu"]["torch"].endswith("+cpu")
    assert [
        name for name in PINS["worker-cpu"] if name.startswith(("nvidia", "cuda", "triton", "torchvision"))
    ] == []


@pytest.mark.parametrize("lock", lockfile.LOCK_FILES, ids=lambda lock: lock.name)
def test_pins_satisfy_what_is_declared(lock: lockfile.Lock) -> None:
    """Every requirement in pyproject.toml is pinned to a version that it accepts."""
    pins = {name: version for part in (*lock.on_top_of, lock.name) for name, version in PINS[part].items()}
    declared = lockfile.declared()
    for requirement in (Requirement(text) for part in lock.requirements for text in declared[part]):
        pinned = pins[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(pinned, prereleases=True), requirement


def test_locks_are_what_the_tests_run_with() -> None:
    """The locks have everything that the metadata of the installed packages requires."""
    assert {lock.name: pins for lock, pins in lockfile.compute().items()} == PINS


@pytest.mark.parametrize("lock", lockfile.LOCK_FILES, ids=lambda lock: lock.name)
def test_packages_that_nothing_imports_are_left_out(lock: lockfile.Lock) -> None:
    """A lock has none of the packages that its rule leaves out."""
    assert PINS[lock.name].keys() & lock.never_imported.keys() == set()
