"""`triptych compile`: compiles a model's graphs and keeps the code, without serving.

A scheduler with the same flags would request the same shapes.
"""

import sys
from typing import TYPE_CHECKING

from pydantic_settings import SettingsConfigDict

from deploy.launcher.service_flags import scheduler_flags, worker_flags
from deploy.launcher.settings import LaunchSettings
from protos.errors import ConfigurationRefused, TriptychError
from protos.logs import configure
from protos.settings import load
from scheduler_svc.settings import Settings as SchedulerSettings
from worker_svc.log_silencing import silence_libraries
from worker_svc.settings import Settings as WorkerSettings

if TYPE_CHECKING:
    from protos.triptych.v1 import worker_pb2
    from worker_svc.execution.worker import Worker


class CompileSettings(LaunchSettings):
    """Compiles the graphs that `triptych up` with the same flags would run.

    Flags about serving have no effect.
    """

    model_config = SettingsConfigDict(cli_prog_name="triptych compile")


def main(argv: list[str] | None = None) -> int:
    """Runs the command.

    Returns:
        The exit code: 0; 2 for a bad setting or a graph that does not compile.
    """
    try:
        settings = load(CompileSettings, argv)
        configure("compile", level=settings.log_level, log_format="console")
        silence_libraries()
        print(_compile(settings))
    except ConfigurationRefused as error:
        print(f"triptych compile: {error}", file=sys.stderr)
        return 2
    return 0


def _compile(settings: CompileSettings) -> str:
    """Compiles, and returns the result for people."""
    # After the settings are read: importing torch takes seconds.
    from worker_svc.execution.worker import Worker
    from worker_svc.graphs.compile_cache import MANIFEST

    worker_settings = load(WorkerSettings, worker_flags(settings, 0))
    if not worker_settings.enable_warm_up:
        raise ConfigurationRefused("graphs are compiled during warm-up; remove --no-enable-warm-up")
    if not worker_settings.compile_cache:
        raise ConfigurationRefused("the compile cache is off, so no code would be kept; set --compile-cache")
    worker = Worker(worker_settings)
    worker.prepare()
    _check_writable(worker_settings, worker.device.name)
    request = _configuration(settings, worker)
    if request is None:
        return "pooling models are not compiled; there is nothing to do"
    seconds = _run(worker, request)
    if worker.code_folder is None:
        return "nothing to keep: at this level graphs use the device's own kernels (-O 2 generates code)"
    if not (worker.code_folder / MANIFEST).is_file():
        raise ConfigurationRefused("the code could not be kept (see above); change --compile-cache-dir")
    return f"{worker.num_compiled} pieces compiled in {seconds:.1f} s; kept in {worker.code_folder}"


def _check_writable(settings: WorkerSettings, device: str) -> None:
    """Refuses a compile cache that cannot be written: a worker could do without, this command cannot."""
    from worker_svc.graphs.compile_cache import CompileCache

    folder = settings.cache_folder(device)
    assert folder is not None
    CompileCache(folder).begin({}).discard()


def _configuration(settings: CompileSettings, worker: "Worker") -> "worker_pb2.ConfigureRequest | None":
    """Returns how a scheduler would configure the worker; None for a pooling model."""
    from scheduler_svc.convert.model import description_from_proto
    from scheduler_svc.workers.generating import configure_request, geometry_for
    from worker_svc.api.convert import description_to_proto

    scheduler_settings = load(SchedulerSettings, scheduler_flags(settings, 0))
    description = description_from_proto(
        description_to_proto(worker, worker_id="compile", model=settings.model)
    )
    if description.model.pool_tasks:
        return None
    geometry = geometry_for(scheduler_settings, description)
    geometry.check(description.limits, description.groups)
    return configure_request(scheduler_settings, geometry, copies_blocks=description.copies_blocks)


def _run(worker: "Worker", request: "worker_pb2.ConfigureRequest") -> float:
    """Configures the worker, which compiles, and returns the seconds that compiling and warm-up took."""
    from worker_svc.api.convert import geometry_from_proto

    shown = ""

    def progress(phase: str, done: int, total: int, what: str) -> None:
        nonlocal shown
        line = f"{phase.replace('_', ' ')} {done}/{total} {what}" if total else f"{phase} {what}"
        if line != shown:
            print(line, flush=True)
            shown = line

    try:
        ready = worker.configure(geometry_from_proto(request), progress)
    except TriptychError as error:
        raise ConfigurationRefused(error.message) from error
    except (OSError, RuntimeError) as error:  # a full disk, a device without memory, a compiler
        reason = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
        raise ConfigurationRefused(f"{type(error).__name__}: {reason}") from error
    return sum(ready.phase_seconds.get(phase, 0.0) for phase in ("compile", "warm_up"))
