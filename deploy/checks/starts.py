"""The starts of services up to the point of serving: their own settings and their own checks."""

import contextlib
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import grpc

from deploy.checks.check_results import CheckFailed, Note, Report
from deploy.launcher.log_tail import nothing_to_precompile
from deploy.launcher.process import COMMAND, ChildSpec
from deploy.launcher.settings import LaunchSettings, secured
from deploy.launcher.stack_plan import StackPlan, claim, socket_folder, with_run_dir
from deploy.launcher.supervisor import BAD_SETTING
from gateway.settings import Settings as GatewaySettings
from protos.errors import ConfigurationRefused, TriptychError
from protos.service.common_settings import CallSecuritySettings
from protos.service.settings import ServiceSettings, load
from protos.service.tokens import METADATA_KEY
from protos.triptych.v1 import inference_pb2, inference_pb2_grpc, worker_pb2
from scheduler_svc.settings import Settings as SchedulerSettings
from worker_svc.settings import Settings as WorkerSettings

if TYPE_CHECKING:
    from worker_svc.devices.base import Device
    from worker_svc.execution.worker import Worker

_GIB = 2**30
# The flags follow the name of the service.
_FLAGS = len(COMMAND) + 1
_ASK_TIMEOUT_S = 3.0
S = TypeVar("S", bound=ServiceSettings)


def check(settings: ServiceSettings, report: Report) -> "Device | None":
    """Checks a command with these settings; returns the worker's device if it could be opened."""
    if isinstance(settings, CallSecuritySettings) and _names_certificates(settings):
        report.check("certificates", lambda: _certificates(settings))
    match settings:
        case LaunchSettings():
            return _check_stack(settings, report)
        case GatewaySettings():
            report.check("gateway", lambda: _gateway(settings))
            report.check("scheduler", lambda: _answers(settings.scheduler_address, settings))
        case SchedulerSettings():
            report.check("scheduler", lambda: _scheduler(settings))
        case WorkerSettings():
            if settings.model and settings.scheduler_address:
                report.check("scheduler", lambda: _answers(settings.scheduler_address, settings))
            return _check_worker(settings, report)
    return None


def _names_certificates(settings: CallSecuritySettings) -> bool:
    return settings.grpc_tls_ca is not None or getattr(settings, "ssl_certfile", None) is not None


def _certificates(settings: CallSecuritySettings) -> str:
    """Reads certificates as the services do, which refuse those that have ended."""
    from gateway.http.listeners import ServerTls

    tls = ServerTls.from_settings(settings) if isinstance(settings, GatewaySettings) else None
    known = [each for each in (settings.link_security().certificates, tls) if each is not None]
    if soon := [line for each in known for line in each.expiries.soon()]:
        raise Note("; ".join(soon))
    return "none ends within 30 days"


def _check_stack(settings: LaunchSettings, report: Report) -> "Device | None":
    with contextlib.ExitStack() as held:
        plans: list[StackPlan] = []

        def plan() -> str:
            chosen = with_run_dir(settings)
            held.enter_context(_claimed(chosen.run_dir))
            folder = Path(held.enter_context(_scratch_folder(chosen.run_dir)))
            used = _secured(chosen, folder)
            used.link_security()
            plans.append(StackPlan.make(used, held.enter_context(socket_folder(folder))))
            ports = plans[0].ports
            free = [
                chosen.run_dir,
                chosen.uds or ports.http,
                *([ports.scheduler] if ports.scheduler else []),
            ]
            return f"free to use: {', '.join(map(str, free))}"

        if report.check("launcher", plan) != "ok":
            return None
        gateway = _settings_of(plans[0].gateways[0], GatewaySettings)
        scheduler = _settings_of(plans[0].scheduler, SchedulerSettings)
        report.check("gateway", lambda: _gateway(gateway))
        report.check("scheduler", lambda: _scheduler(scheduler))
        first, *others = plans[0].workers
        device = _check_worker(_settings_of(first, WorkerSettings), report, scheduler, gateway)
        for spec in others if device is not None and device.spec.visible_by else ():
            report.check(spec.name, partial(_check_elsewhere, spec))
        return device


def _check_worker(
    settings: WorkerSettings,
    report: Report,
    scheduler: SchedulerSettings | None = None,
    gateway: GatewaySettings | None = None,
) -> "Device | None":
    """Checks a worker, and its model with the settings of the other services if they are known."""
    workers: list[Worker] = []
    devices: list[Device] = []

    def prepare() -> str:
        with _packages("worker"):
            from worker_svc import service

            worker = service.check(settings)
        workers.append(worker)
        devices.append(worker.device)
        return f"{worker.description.architecture} on {_described(worker.device)}"

    if not settings.model or report.check("model", lambda: _model(settings)) == "note":
        report.check("worker", lambda: _opened(settings, devices))
        if settings.model:
            report.skip("shapes and text", "the model's files")
    elif report.check("worker", prepare, needs=("model",)) == "ok":
        if scheduler is not None:
            report.check("shapes", lambda: _shapes(scheduler, settings, workers[0]))
            if modules := scheduler.lora_modules:
                report.check("adapters", lambda: _adapters(modules, workers[0]))
        if gateway is not None:
            report.check("text", lambda: _text(gateway, workers[0]))
        workers[0].close()
    return next(iter(devices), None)


def _check_elsewhere(spec: ChildSpec) -> str:
    """Checks another worker in a process of its own, which sees only that worker's devices."""
    command = (*COMMAND, "doctor", "worker", *spec.command[_FLAGS:], "--json")
    environment = {**os.environ, **spec.environment}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    error = json.loads(done.stdout)["error"]
    if done.returncode:
        raise ConfigurationRefused(error) if done.returncode == BAD_SETTING else CheckFailed(error)
    return "as the first worker"


def _settings_of(spec: ChildSpec, cls: type[S]) -> S:
    """Returns a service's settings, read as the service would read them."""
    os.environ.update(spec.environment)
    return load(cls, spec.command[_FLAGS:])


def _gateway(settings: GatewaySettings) -> str:
    with _packages("gateway"):
        from gateway.__main__ import check
    check(settings)
    return "would serve " + (str(settings.uds) if settings.uds else f"{settings.host} port {settings.port}")


def _scheduler(settings: SchedulerSettings) -> str:
    with _packages("scheduler"):
        from scheduler_svc.__main__ import check
    check(settings)
    return f"would listen on {f'{settings.host} port {settings.port}' if settings.host else settings.socket}"


def _model(settings: WorkerSettings) -> str:
    with _packages("worker"):
        from worker_svc.model_files import loader

        if not loader.is_missing(settings.model, settings.revision):
            return f"{settings.model} needs no download"
    raise Note(f"the first start fetches {settings.model}; the worker checks it then")


def _opened(settings: WorkerSettings, devices: "list[Device]") -> str:
    with _packages("worker"):
        from worker_svc.devices import open_device
        from worker_svc.vllm_adapter import startup

        devices.append(device := open_device(settings.device, settings.device_options))
        startup.prepare(device.name)
    return _described(device)


def _described(device: "Device") -> str:
    return f"{device.product_name()} with {device.free_memory() / _GIB:.3g} GiB free"


def _shapes(scheduler: SchedulerSettings, settings: WorkerSettings, worker: "Worker") -> str:
    from worker_svc.api.convert import shapes_from_proto
    from worker_svc.graphs.compilation import graph_options, keeps_code

    request = configuration(scheduler, worker, settings.model)
    worker.check(shapes_from_proto(request))
    level = graph_options(settings, worker.device).level
    if settings.require_precompiled and not keeps_code(level, worker.device):
        raise Note(nothing_to_precompile(level, worker.device.name))
    if request.pool_shapes:
        return f"{len(request.pool_shapes)} pool shapes fit"
    chunks, buckets = (",".join(map(str, each)) for each in (request.prefill_buckets, request.decode_buckets))
    return f"prefill buckets {chunks} and decode buckets {buckets} fit"


def _adapters(modules: Sequence[str], worker: "Worker") -> str:
    from scheduler_svc.adapters.registry import name_and_path

    assert worker.adapters is not None, "the settings refuse adapters without --enable-lora"
    for module in modules:
        name, source = name_and_path(module)
        try:
            worker.adapters.load(0, name, source)
        except TriptychError as error:
            if not error.retryable:
                raise
            raise Note(f"{error.message}; the scheduler tries again") from error
        finally:
            worker.adapters.unload(0)
    return f"{len(modules)} of --lora-modules fit"


def _text(gateway: GatewaySettings, worker: "Worker") -> str:
    from gateway.app import check_text
    from worker_svc.model_files.loader import tokenizer_files

    with tempfile.TemporaryDirectory(prefix="triptych-tokenizer-") as folder:
        for file in tokenizer_files(worker.folder):
            shutil.copy(file, folder)
        text = check_text(gateway, Path(folder))
    return f"a tokenizer with {'a' if text.chat_template is not None else 'no'} chat template"


def _answers(address: str, settings: CallSecuritySettings) -> str:
    """Calls a scheduler. Services start in any order, so only a refused token is a fault."""
    security = settings.link_security()
    metadata = ((METADATA_KEY, security.tokens.authorization),) if security.tokens else None
    try:
        with security.open_blocking_channel(address) as channel:
            inference_pb2_grpc.InferenceStub(channel).GetLoad(
                inference_pb2.GetLoadRequest(), timeout=_ASK_TIMEOUT_S, metadata=metadata
            )
    except grpc.RpcError as error:
        reason = " ".join((error.details() or error.code().name).split())
        if error.code() is grpc.StatusCode.UNAUTHENTICATED:
            raise CheckFailed(f"the scheduler at {address} refuses this service: {reason}") from error
        raise Note(f"none answers at {address} ({reason}); the service waits for it") from error
    return f"{address} answers"


@contextlib.contextmanager
def _claimed(run_dir: Path) -> Iterator[None]:
    """Claims a run dir, and leaves it as it was."""
    made = [path for path in (run_dir, *run_dir.parents) if not path.exists()]
    try:
        with claim(run_dir, clean=False):
            yield
    finally:
        for path in made:
            with contextlib.suppress(OSError):
                path.rmdir()


def _scratch_folder(run_dir: Path) -> tempfile.TemporaryDirectory[str]:
    """Makes a folder where a start would write secure files, whose disk may be full, or read them."""
    makes_files = not (run_dir / "secure").is_dir()
    try:
        return tempfile.TemporaryDirectory(
            prefix="triptych-", dir=run_dir.absolute() if makes_files else None
        )
    except OSError as error:
        raise ConfigurationRefused(f"cannot write to the run dir {run_dir}: {error.strerror}") from error


def _secured(settings: LaunchSettings, folder: Path) -> LaunchSettings:
    """Returns the settings with copies of the files of a start, or with temporary files."""
    from deploy.secure_files import SecureFiles, check_files  # needs cryptography

    existing = settings.run_dir.absolute() / "secure"
    if existing.is_dir():
        check_files(SecureFiles.in_folder(existing))  # the copies are ours
        shutil.copytree(existing, folder / "secure")
    try:
        used, _ = secured(settings.model_copy(update={"run_dir": folder}))
    except ConfigurationRefused as error:
        raise ConfigurationRefused(
            error.message.replace(str(folder), str(settings.run_dir.absolute()))
        ) from error
    return used.model_copy(update={"run_dir": settings.run_dir})


@contextlib.contextmanager
def _packages(service: str) -> Iterator[None]:
    """Refuses a missing package with the line of `triptych SERVICE`."""
    try:
        yield
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        raise ConfigurationRefused(f"{missing} is not installed; run `triptych install {service}`") from error


def configuration(settings: SchedulerSettings, worker: "Worker", model: str) -> worker_pb2.ConfigureRequest:
    """Returns the configuration of a worker that is prepared for the `--model` setting `model`.

    Refuses settings unfit for the model or the device.
    """
    # The worker's room imports torch.
    from scheduler_svc.workers.deployment import Deployment
    from scheduler_svc.workers.descriptions import description_from_proto
    from worker_svc.api.convert import description_to_proto

    description = description_from_proto(description_to_proto(worker, worker_id="", model=model))
    description = replace(description, pipeline_stages=worker.layout.pipeline)
    request: worker_pb2.ConfigureRequest = Deployment(settings).set_up("", description).request
    return request
