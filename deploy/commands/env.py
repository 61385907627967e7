"""`triptych env`: describes this machine for a bug report."""

import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

import deploy
from protos.service.help import ArgumentParser
from protos.service.redaction import HIDDEN, shown, without_users

_SECTIONS: Final = {"versions": "Versions", "cpu": "CPU", "memory": "Memory", "devices": "Devices"}
_TOOL_TIMEOUT_S: Final = 10.0
# The CPU flags that kernels use; all flags are more than a hundred.
_CPU_FLAGS: Final = re.compile(r"avx|amx|f16c|fma|sse4|asimd|bf16|i8mm|sve|neon")
# Variables of ours, of the stacks that we understand, and of libraries that services load.
_VARIABLES: Final = re.compile(
    r"(TRIPTYCH|VLLM|RBLN|TORCH|PYTORCH|TRITON|CUDA|CUBLAS|CUDNN|NCCL|NVIDIA|GLOO|OMP|MKL|KMP|GOMP|HF|OPENAI"
    r"|OTEL|GRPC|SSL|PYTHON|LD|XDG)_|(LD_LIBRARY_PATH|LD_PRELOAD|CC|CXX|VIRTUAL_ENV|TZ|LANG|(HTTPS?|NO|ALL)_PROXY)$",
    re.IGNORECASE,
)
# Headers hold credentials; so may an unknown variable.
_MORE_SECRETS: Final = re.compile(r"HEADERS|AUTH|PASSW|_KEY$|KEYS$|TOKEN(?!IZER|_FILE)")
# Tools that list devices.
_TOOLS: Final = {
    "gpus": ("nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"),
    "npus": ("rbln-stat",),
}


def main(argv: list[str]) -> int:
    """Prints the report; returns the exit code 0."""
    parser = ArgumentParser(
        prog="triptych env",
        description="Prints the facts of this machine for a bug report: versions, hardware, packages of the"
        " locks, and set variables with their secrets hidden.",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    arguments = parser.parse_args(argv)
    found = facts(os.environ)
    print(json.dumps(found, indent=2) if arguments.json else "\n".join(_lines(found)))
    return 0


def _lines(found: dict[str, Any]) -> Iterator[str]:
    for section, title in _SECTIONS.items():
        yield f"{title}:"
        for name, value in found[section].items():
            if isinstance(value, list) and section == "devices":
                yield from (f"  {name}: {line}" for line in value or ["none"])
            else:
                text = " ".join(value) if isinstance(value, list) else value
                yield f"  {name}: {'unknown' if text is None else text}"
    yield "Packages (tested version where it differs):"
    for name, entry in found["packages"].items():
        installed, tested = entry["installed"], entry["tested"]
        where = f"  (tested: {tested}; {', '.join(entry['locks'])})"
        yield f"  {name} {installed or 'not installed'}{'' if installed == tested else where}"
    yield "Variables:"
    yield from [f"  {name}={value}" for name, value in found["variables"].items()] or ["  none"]


def facts(environment: Mapping[str, str]) -> dict[str, Any]:
    """Returns the report by section."""
    return {
        "versions": {
            "triptych": version("triptych"),
            "python": sys.version.replace("\n", " "),
            "python_path": sys.executable,
            "os": _os_name(),
            "kernel": platform.release(),
            "libc": " ".join(platform.libc_ver()),
        },
        "cpu": _cpu(),
        "memory": _memory(),
        "devices": {name: _lines_of(command) for name, command in _TOOLS.items()}
        | {"npu_files": sorted(str(path) for path in Path("/dev").glob("rbln*"))},
        "packages": packages(),
        "variables": variables(environment),
    }


def variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns relevant set variables. Secrets are hidden, including those in URLs."""
    return {
        name: HIDDEN if _MORE_SECRETS.search(name.upper()) else shown(name.upper(), without_users(value))
        for name, value in sorted(environment.items())
        if value and _VARIABLES.match(name)
    }


def packages() -> dict[str, dict[str, Any]]:
    """Returns each package of the locks: the tested version, the installed version if any, and the locks."""
    found: dict[str, dict[str, Any]] = {}
    for path in sorted((Path(deploy.__path__[0]) / "locks").glob("*.txt")):
        for line in path.read_text().splitlines():
            name, equals, tested = line.partition("#")[0].partition(" --hash=")[0].strip().partition("==")
            if equals:
                entry = found.setdefault(name, {"tested": tested, "installed": _installed(name), "locks": []})
                entry["locks"].append(path.stem)
    return dict(sorted(found.items()))


def _installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _os_name() -> str:
    try:
        return platform.freedesktop_os_release()["PRETTY_NAME"]
    except (OSError, KeyError):
        return platform.platform()


def _cpu() -> dict[str, Any]:
    fields = dict(re.findall(r"^([^:\t]+)\s*: (.*)$", _read("/proc/cpuinfo"), re.MULTILINE))
    flags = (fields.get("flags") or fields.get("Features") or "").split()
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "model": fields.get("model name") or platform.processor() or platform.machine(),
        "architecture": platform.machine(),
        "cores": os.cpu_count(),
        "usable_cores": usable,
        "flags": sorted(flag for flag in flags if _CPU_FLAGS.match(flag)),
    }


def _memory() -> dict[str, float | None]:
    """Returns the machine's memory, its free memory and this process' limit, in GiB."""
    sizes = dict(re.findall(r"^(\w+):\s+(\d+) kB$", _read("/proc/meminfo"), re.MULTILINE))
    limit = _read("/sys/fs/cgroup/memory.max").strip()

    def gib(text: str, unit: int) -> float | None:
        return round(int(text) * unit / 2**30, 2) if text.isdecimal() else None

    return {
        "total_gib": gib(sizes.get("MemTotal", ""), 1024),
        "available_gib": gib(sizes.get("MemAvailable", ""), 1024),
        "limit_gib": gib(limit, 1),
    }


def _lines_of(command: tuple[str, ...]) -> list[str]:
    """Returns the output of a tool; nothing if it is not installed."""
    if shutil.which(command[0]) is None:
        return []
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TOOL_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return [f"{command[0]} failed: {error}"]
    return [line.rstrip() for line in (done.stdout or done.stderr).splitlines() if line.strip()]


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
