"""`triptych compile`: makes a model's graphs and keeps the code, without serving.

The shapes are those that a scheduler with the same flags would ask for.
"""

import sys
from pathlib import Path

from pydantic_settings import SettingsConfigDict

from deploy.launcher.service_flags import scheduler_flags, worker_flags
from deploy.launcher.settings import LaunchSettings
from protos.errors import ConfigurationRefused, TriptychError
from protos.logs import configure
from protos.settings import load
from worker_svc.log_silencing import quiet_libraries


class CompileSettings(LaunchSettings):
    """What `triptych up` takes; what is about serving changes nothing here."""

    model_config = SettingsConfigDict(
        cli_prog_name="triptych compile", cli_shortcuts={"optimization-level": "O"}
    )


def main(argv: list[str] | None = None) -> int:
    """Runs `triptych compile`.

    Returns:
        0; 2 for a setting or a graph that does not work.
    """
    try:
        settings = load(CompileSettings, argv)
        configure("compile", level=settings.log_level, log_format="console")
        quiet_libraries()
        return _compile(settings)
    except ConfigurationRefused as error:
        print(f"triptych compile: {error}", file=sys.stderr)
        return 2


def _compile(settings: CompileSettings) -> int:
    from scheduler_svc.convert.model import description_from_proto
    from scheduler_svc.settings import Settings as SchedulerSettings
    from scheduler_svc.workers.generating import configure_request, geometry_for
    from worker_svc.api import convert
    from worker_svc.execution.worker import Worker
    from worker_svc.settings import Settings as WorkerSettings

    scheduler_settings = load(SchedulerSettings, scheduler_flags(settings, 0))
    worker_settings = load(WorkerSettings, worker_flags(settings, 0, 0))
    if not worker_settings.enable_warm_up:
        raise ConfigurationRefused("compiling is what warm-up does; drop --no-enable-warm-up")
    if worker_settings.cache_folder("any") is None:
        raise ConfigurationRefused("the compile cache is off, so nothing would be kept; switch it on")
    worker = Worker(worker_settings)
    worker.prepare()
    description = description_from_proto(
        convert.description_to_proto(worker, worker_id="compile", model=settings.model)
    )
    if description.model.pool_tasks:
        print("pooling models run as they are; there is nothing to compile")
        return 0
    geometry = geometry_for(scheduler_settings, description)
    geometry.check(description.limits, description.groups)
    request = configure_request(scheduler_settings, geometry)
    shown = ""

    def progress(phase: str, done: int, total: int, what: str) -> None:
        nonlocal shown
        line = f"{phase.replace('_', ' ')} {done}/{total} {what}" if total else f"{phase} {what}"
        if line != shown:
            print(line, flush=True)
            shown = line

    try:
        ready = worker.configure(convert.geometry_from_proto(request), progress)
    except TriptychError as error:
        raise ConfigurationRefused(error.message) from error
    except (OSError, RuntimeError) as error:  # a full disk, a device without memory, a compiler
        reason = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
        raise ConfigurationRefused(f"{type(error).__name__}: {reason}") from error
    took = sum(ready.phase_seconds.get(phase, 0.0) for phase in ("compile", "warm_up"))
    print(_outcome(worker.code_folder, worker.num_compiled, took))
    return 0


def _outcome(folder: Path | None, compiled: int, seconds: float) -> str:
    if folder is None:
        return "nothing to keep: at this level the graphs are made of the device's own kernels (-O 2 generates code)"
    return f"{compiled} pieces compiled in {seconds:.1f} s; kept in {folder}"
