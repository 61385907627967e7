"""Checks of this machine's ports, folders and packages for the services that would start."""

import contextlib
import importlib
import os
import shutil
import socket
import tempfile
from pathlib import Path

from deploy.diagnosis.findings import Missing, Remark
from deploy.launcher.ports import free_ports
from deploy.launcher.run_dir import user_of
from deploy.launcher.settings import LaunchSettings
from deploy.launcher.supervisor import LaunchError
from gateway.settings import Settings as GatewaySettings

_GIB = 2**30
# The optimization level from which a CPU's kernels are generated and compiled.
_GENERATES = 2
# Less than that, and logs or a histogram may fill the disk.
_LITTLE_BYTES = 1 << 30


def launcher_ports(settings: LaunchSettings) -> str:
    """Binds the ports of `triptych up` for a moment.

    Raises:
        Missing: names the one that is not free.
    """
    try:
        with free_ports(settings) as ports:
            metrics = [port for port in ports.metrics if port is not None]
            also = f", {', '.join(map(str, metrics))} for metrics" if metrics else ""
            return f"{ports.http} for HTTP, {ports.scheduler} for gRPC{also}: free"
    except LaunchError as error:
        raise Missing(str(error)) from error


def port(host: str, number: int, flag: str) -> str:
    """Binds a service's port for a moment.

    Raises:
        Missing: it is in use, or the address is not this machine's.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.create_server((host, number), family=family) as server:
            found = server.getsockname()[1]
    except OSError as error:
        raise Missing(
            f"cannot listen on {host} port {number}: {error.strerror or error}; choose another {flag}"
        ) from error
    return f"{found} on {host}: free"


def run_folder(folder: Path) -> str:
    """Checks the launcher's folder. It removes nothing there.

    Raises:
        Missing: it cannot be written, or another launcher uses it.
        Remark: its disk is nearly full.
    """
    if (user := user_of(folder)) is not None:
        raise Missing(f"{folder} is in use by another launcher (pid {user}); choose another --run-dir")
    return writable(folder, "--run-dir")


def writable(folder: Path, flag: str) -> str:
    """Checks that a folder can be written, or made.

    Raises:
        Missing: it cannot.
        Remark: its disk is nearly full.
    """
    base = existing_parent(folder)
    try:
        with tempfile.NamedTemporaryFile(dir=base):
            pass
    except OSError as error:
        raise Missing(f"{base} cannot be written ({error.strerror}); change {flag}") from error
    return _free(base, str(folder))


def service_packages(*modules: str) -> str:
    """Imports what services consist of.

    Args:
        *modules: a module of each service, whose first word is the service's package.

    Raises:
        Missing: names the first package that is not installed.
    """
    names = [module.partition(".")[0].removesuffix("_svc") for module in modules]
    for name, module in zip(names, modules, strict=True):
        try:
            importlib.import_module(module)
        except ModuleNotFoundError as error:
            raise Missing(f"{error.name} is not installed; run `triptych install {name}`") from error
    return f"those of the {' and the '.join(names)} are installed"


def parsers(settings: GatewaySettings) -> str:
    """Loads the parsers of tool calls and thinking that the settings name.

    Raises:
        ConfigurationRefused: vLLM is not installed, or has no such parser.
    """
    from gateway.tools import vllm_parsers  # needs the gateway's packages

    vllm_parsers.check("--tool-call-parser", settings.tool_call_parser)
    vllm_parsers.check("--reasoning-parser", settings.reasoning_parser)
    return f"{settings.tool_call_parser} for tool calls, {settings.reasoning_parser} for thinking"


def compiler(name: str, level: int) -> str:
    """Finds the compiler that makes host code for a device.

    Args:
        name: the device's name.
        level: the optimization level; from 2 on, a CPU's kernels are generated.

    Raises:
        Missing: there is none, and the worker needs one.
        Remark: there is none, and a CPU's worker is slower without.
    """
    candidates = ("g++", "clang++") if name == "cpu" else ("gcc", "cc", "clang")
    found = os.environ.get("CXX" if name == "cpu" else "CC") or next(
        filter(None, map(shutil.which, candidates)), ""
    )
    if found:
        return found
    if name == "cuda":
        raise Missing("Triton compiles its launchers with a C compiler, and there is none; install gcc")
    if level >= _GENERATES:
        raise Missing(
            f"-O {level} generates C++ code, and there is no C++ compiler; install g++, or use -O 1"
        )
    raise Remark("there is no C++ compiler, so own CPU kernels must be in the image; install g++")


def _free(folder: Path, text: str) -> str:
    free = shutil.disk_usage(folder).free
    shown = f"{text}, {free / _GIB:.3g} GiB free"
    if free < _LITTLE_BYTES:
        raise Remark(f"{shown}: the disk is nearly full")
    return shown


def existing_parent(folder: Path) -> Path:
    """Returns the folder, or the nearest one above it that exists."""
    folder = folder.expanduser().absolute()
    with contextlib.suppress(OSError):
        while not folder.exists():
            folder = folder.parent
    return folder
