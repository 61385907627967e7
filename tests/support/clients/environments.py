"""Environments of other projects' clients and agents, each made once, in ``.cache/clients/``."""

import asyncio
import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

from tests.support.paths import ROOT

_SOURCES: Final = ROOT / "tests" / "clients"
_CACHE: Final = ROOT / ".cache" / "clients"
_TIMEOUT_S: Final = 100


def node_folder() -> Path:
    """Returns a folder with the npm packages, in which Node finds them for the scripts of ``npm/``."""

    def install(folder: Path) -> None:
        for name in ("package.json", "package-lock.json"):
            shutil.copy(_SOURCES / "npm" / name, folder)
        _run(["npm", "ci", "--no-fund", "--no-audit", "--ignore-scripts"], folder)

    folder = _made_once("npm", (_SOURCES / "npm" / "package-lock.json").read_bytes(), install)
    for script in (_SOURCES / "npm").glob("*.mjs"):
        target = folder / script.name
        if not target.exists() or target.read_bytes() != script.read_bytes():
            shutil.copy(script, target)
    return folder


def agents_python() -> Path:
    """Returns the interpreter of the environment with the Python agents."""
    requirements = _SOURCES / "agents" / "requirements.txt"

    def install(folder: Path) -> None:
        _run([sys.executable, "-m", "venv", "."], folder)
        pip = ["bin/python", "-m", "pip", "--disable-pip-version-check", "install", "--no-deps", "-q"]
        _run([*pip, "-r", str(requirements)], folder)

    recipe = sys.version.encode() + requirements.read_bytes()
    return _made_once("agents", recipe, install) / "bin" / "python"


def _made_once(name: str, recipe: bytes, install: Callable[[Path], None]) -> Path:
    """Returns the folder for a recipe; `install` fills it the first time, in one process at a time."""
    folder = _CACHE / f"{name}-{hashlib.sha256(recipe).hexdigest()[:12]}"
    with _locked():
        if not (folder / ".complete").exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            install(folder)
            (folder / ".complete").touch()
    return folder


@contextlib.contextmanager
def _locked() -> Iterator[None]:
    _CACHE.mkdir(parents=True, exist_ok=True)
    with (_CACHE / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _run(command: list[str], folder: Path) -> None:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command[0]} failed:\n{done.stdout}{done.stderr}"


async def run_client(*command: object, folder: Path = ROOT, **variables: str) -> Any:
    """Returns what a client program printed as JSON on its last line."""
    # Variables that would steer the clients past the arguments.
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith(("OPENAI_", "ANTHROPIC_"))
    }
    process = await asyncio.create_subprocess_exec(
        *map(str, command), cwd=folder, env={**kept, "OPENAI_AGENTS_DISABLE_TRACING": "1", **variables},
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            out, err = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0, err.decode()
    return json.loads(out.decode().splitlines()[-1])
