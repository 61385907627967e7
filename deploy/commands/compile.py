"""`triptych compile`: compiles a model's graphs and keeps the code, without serving.

A scheduler with the same flags would request the same shapes. The ranks of a replica are compiled in
sequence, each in a process of its own that joins no other: code depends on a rank's part of the model, not on
messages of the others.
"""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

from pydantic_settings import SettingsConfigDict

from deploy.checks.starts import configuration
from deploy.launcher.process import COMMAND, PARENT_VARIABLE
from deploy.launcher.service_flags import scheduler_flags, worker_flags
from deploy.launcher.settings import LaunchSettings
from deploy.vllm_flags.translate import VllmFlags
from protos.errors import ConfigurationRefused, TriptychError
from protos.service.environment import check_for_service
from protos.service.logs import configure, reserve_stdout
from protos.service.settings import CONFIG_VARIABLE, load
from scheduler_svc.settings import Settings as SchedulerSettings
from worker_svc.settings import Settings as WorkerSettings
from worker_svc.vllm_platform import prepare_libraries

if TYPE_CHECKING:
    from protos.triptych.v1 import worker_pb2
    from worker_svc.execution.worker import Worker

# Names a group without other members.
_ALONE = "compile"


class CompileSettings(LaunchSettings):
    """Compiles the graphs that `triptych up` with the same flags would run, for all ranks or for --rank.

    Flags about serving have no effect.
    """

    model_config = SettingsConfigDict(cli_prog_name="triptych compile")

    fixed: ClassVar[Mapping[str, str]] = {"rank": ""}
    common: ClassVar[tuple[str, ...]] = ()


class _RankSettings(WorkerSettings):
    """A worker's settings without a place to meet other ranks."""

    needs_master: ClassVar[bool] = False


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code: 0; 2 for a bad setting or a graph that does not compile."""
    try:
        settings = load(CompileSettings, argv, VllmFlags())
        if settings.layout.world_size > 1 and "rank" not in settings.model_fields_set:
            return _compile_all(settings.layout.world_size, sys.argv[1:] if argv is None else argv)
        configure("compile", level=settings.log_level, log_format="console")
        check_for_service(os.environ)
        os.environ.pop(CONFIG_VARIABLE, None)  # all its settings become flags of the services
        prepare_libraries()
        reserve_stdout()
        print(_compile(settings))
    except ConfigurationRefused as error:
        print(f"triptych compile: {error}", file=sys.stderr)
        return 2
    return 0


def _compile_all(ranks: int, argv: Sequence[str]) -> int:
    """Compiles every rank in a process of its own; stops at the first that fails, and returns its code."""
    environment = {**os.environ, PARENT_VARIABLE: str(os.getpid())}
    for rank in range(ranks):
        print(f"rank {rank} of {ranks}", flush=True)
        command = [*COMMAND, "compile", *argv, f"--rank={rank}"]
        if code := subprocess.run(command, env=environment, check=False).returncode:
            return code
    return 0


def _compile(settings: CompileSettings) -> str:
    """Compiles, and returns the result for people."""
    # After the settings are read: importing torch takes seconds.
    from worker_svc.execution.worker import Worker
    from worker_svc.graphs.compile_cache import MANIFEST, CompileCache

    worker_settings = load(_RankSettings, worker_flags(settings, index=settings.rank))
    if not worker_settings.enable_warm_up:
        raise ConfigurationRefused("graphs are compiled during warm-up; remove --no-enable-warm-up")
    if not worker_settings.compile_cache:
        raise ConfigurationRefused("the compile cache is off, so no code would be kept; set --compile-cache")
    worker = Worker(worker_settings)
    worker.prepare()
    folder = worker_settings.cache_folder(worker.device.name)
    assert folder is not None
    CompileCache(folder).begin({}).rmdir()  # refuses a folder that cannot be written, as a worker does not
    scheduler = load(SchedulerSettings, scheduler_flags(settings))
    _check_num_blocks(scheduler, worker_settings, worker)
    request = configuration(scheduler, worker, settings.model)
    seconds = _run(worker, request)
    if worker.code_folder is None:
        return "nothing to keep: at this level graphs use the device's own kernels (-O 2 generates code)"
    if not (worker.code_folder / MANIFEST).is_file():
        raise ConfigurationRefused("the code could not be kept (see above); change --compile-cache-dir")
    return f"{worker.num_compiled} pieces compiled in {seconds:.1f} s; kept in {worker.code_folder}"


def _check_num_blocks(scheduler: SchedulerSettings, settings: WorkerSettings, worker: "Worker") -> None:
    """Refuses to compile code for another number of blocks than a start would have."""
    device = worker.device
    if worker.description.pooling is not None or not device.caches_are_inputs or scheduler.num_blocks:
        return
    if worker.layout.pipeline > 1:
        origin, flags = "the stages of a pipeline agree on when they start", "--num-blocks"
    elif settings.compile_only and settings.kv_memory_on(device.name) is None:
        origin, flags = "follows from the memory of the absent NPU", "--num-blocks or --kv-memory"
    else:
        return
    raise ConfigurationRefused(
        f"code for device {device.name} depends on the number of blocks, which {origin};"
        f" set {flags}, and use it with `triptych up`, too"
    )


def _run(worker: "Worker", request: "worker_pb2.ConfigureRequest") -> float:
    """Configures the worker, which compiles, and returns the seconds that compiling and warm-up took."""
    from worker_svc.api.convert import shapes_from_proto

    shown = ""

    def progress(phase: str, done: int, total: int, what: str) -> None:
        nonlocal shown
        line = f"{phase.replace('_', ' ')} {done}/{total} {what}" if total else f"{phase} {what}"
        if line != shown:
            print(line, flush=True)
            shown = line

    try:
        ready = worker.configure(shapes_from_proto(request), progress, epoch=_ALONE)
    except TriptychError as error:
        raise ConfigurationRefused(error.message) from error
    except (OSError, RuntimeError) as error:  # a full disk, a device without memory, a compiler
        reason = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
        raise ConfigurationRefused(f"{type(error).__name__}: {reason}") from error
    return sum(ready.phase_seconds.get(phase, 0.0) for phase in ("compile", "warm_up"))
