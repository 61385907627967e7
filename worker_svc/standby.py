"""A process ready to become a worker: everything is imported, but no device, weights or port are taken.

Importing vLLM and torch takes most of a worker's start. The launcher starts a standby with a worker's flags,
and writes a line of JSON to its standard input after a worker's death. The standby then runs the worker's
command in the same process.
"""

import gc
import importlib
import os
import sys
import threading
import time
import traceback
from pathlib import Path

from protos.errors import ConfigurationRefused, print_end
from protos.service import private_files
from protos.service.logs import configure, get_logger
from protos.service.settings import load
from worker_svc import __main__ as worker
from worker_svc.settings import Settings
from worker_svc.standby_messages import Orders

# A running worker comes first, and under full load the imports still end within minutes.
_NICENESS = 10
_BAD_SETTING = 2
# Modules that a worker imports in functions.
_IMPORTED_LATE = ("worker_svc.vllm_adapter.attention", "worker_svc.vllm_adapter.weights")


def main(argv: list[str] | None = None) -> int:
    """Imports the worker's modules, waits for orders, and is a worker from then on, with the orders' flags.

    Returns the worker's exit code; 0 if standard input ends without orders, 2 for a bad setting.
    """
    try:
        settings = load(Settings, argv)
    except ConfigurationRefused as error:
        print_end("standby", error)
        return _BAD_SETTING
    configure("standby", level=settings.log_level, log_format=settings.log_format)
    importing = threading.Thread(target=_import, args=(settings,), name="imports", daemon=True)
    importing.start()
    line = sys.stdin.buffer.readline()
    if not line:
        # The launcher stops, or is gone. The imports may still run, so a normal exit is not safe.
        os._exit(0)
    orders = Orders.from_line(line)
    importing.join()
    _detach_from_launcher(orders)
    return worker.main(list(orders.flags))


def _import(settings: Settings) -> None:
    """Imports on a thread of low priority, so that running workers keep the processors.

    Later threads come from the main thread, with its priority. Ends the process if an import fails.
    """
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
    started = time.monotonic()
    try:
        worker.prepare_process()
        _import_worker(settings)
    except ConfigurationRefused as error:
        print_end("standby", error)
        os._exit(_BAD_SETTING)
    except BaseException:  # noqa: BLE001 - a process that misses a module must not become a worker
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    # Modules live as long as the process; later collections can skip them.
    gc.collect()
    gc.freeze()
    get_logger().info("standby_ready", import_s=round(time.monotonic() - started, 2))


def _import_worker(settings: Settings) -> None:
    """Imports the services' modules, vLLM with our platform, and the model's class. Opens no device."""
    # Importing the service imports most of a worker.
    from worker_svc import service  # noqa: F401
    from worker_svc.devices.registry import choose_device
    from worker_svc.model_files import loader
    from worker_svc.vllm_adapter import startup
    from worker_svc.vllm_adapter.configuration import register_model_class

    folder = loader.resolve(
        settings.model,
        settings.revision,
        load_format=settings.load_format,
        trust_remote_code=settings.trust_remote_code,
    )
    startup.prepare(choose_device(settings.device))
    register_model_class(
        folder, trust_remote_code=settings.trust_remote_code, language_model_only=settings.language_model_only
    )
    for name in _IMPORTED_LATE:
        importlib.import_module(name)


def _detach_from_launcher(orders: Orders) -> None:
    """Applies the orders that concern the process: its variables, its log, and no standard input."""
    os.environ.update(orders.environment)
    with Path(os.devnull).open("rb") as nothing:
        os.dup2(nothing.fileno(), sys.stdin.fileno())
    if orders.log is not None:
        sys.stdout.flush()
        sys.stderr.flush()
        with private_files.open_binary(Path(orders.log), "ab") as log:
            os.dup2(log.fileno(), sys.stdout.fileno())
            os.dup2(log.fileno(), sys.stderr.fileno())
