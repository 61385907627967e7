"""The starts of services up to the point of serving: their own settings and their own checks."""

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import grpc

from deploy.checks.check_results import CheckFailed, Note, Report
from deploy.launcher.process import ChildSpec
from deploy.launcher.run_dir import claim
from deploy.launcher.settings import LaunchSettings, secured
from deploy.launcher.stack_plan import StackPlan
from gateway.settings import Settings as GatewaySettings
from protos.errors import ConfigurationRefused
from protos.security.settings import CallSecuritySettings
from protos.security.token_check import METADATA_KEY
from protos.settings import ServiceSettings, load
from protos.triptych.v1 import inference_pb2, inference_pb2_grpc, worker_pb2
from scheduler_svc.settings import Settings as SchedulerSettings
from worker_svc.settings import Settings as WorkerSettings

if TYPE_CHECKING:
    from worker_svc.devices import Device
    from worker_svc.execution.worker import Worker

_GIB = 2**30
_LITTLE_BYTES = 1 << 30
# The flags follow `python -m deploy.cli SERVICE`.
_FLAGS = 4
_ASK_TIMEOUT_S = 3.0
S = TypeVar("S", bound=ServiceSettings)
_DEVICE_CODE = "import sys; from deploy.checks import starts; starts.open_device(sys.argv[1:])"


def check_stack(settings: LaunchSettings, report: Report) -> "Device | None":
    """Checks a launcher and all of its services; returns the first worker's device."""
    with contextlib.ExitStack() as held:
        plans: list[StackPlan] = []

        def plan() -> str:
            held.enter_context(_claimed(settings.run_dir))
            folder = Path(held.enter_context(tempfile.TemporaryDirectory(prefix="triptych-")))
            used = _secured(settings, folder) if settings.secure else settings
            used.link_security()
            plans.append(StackPlan.make(used, folder))
            ports = plans[0].ports
            return f"{settings.run_dir} and ports {ports.http} and {ports.scheduler} are free"

        if not report.check("launcher", plan):
            return None
        gateway = _settings_of(plans[0].gateways[0], GatewaySettings)
        scheduler = _settings_of(plans[0].scheduler, SchedulerSettings)
        report.check("gateway", lambda: _gateway(gateway))
        report.check("scheduler", lambda: _scheduler(scheduler))
        first, *others = plans[0].workers
        worker = _settings_of(first, WorkerSettings)
        device = check_worker(worker, report, scheduler=scheduler, gateway=gateway)
        for spec in others if device is not None and device.name != "cpu" else ():
            report.check(spec.name, partial(_open_elsewhere, spec))
        return device


def check_gateway(settings: GatewaySettings, report: Report) -> None:
    """Checks a gateway that runs alone."""
    report.check("gateway", lambda: _gateway(settings))
    waits = "requests wait for it for --park-timeout-s, and then get 503"
    report.check("scheduler", lambda: _answers(settings.scheduler_address, settings, waits))


def check_scheduler(settings: SchedulerSettings, report: Report) -> None:
    """Checks a scheduler that runs alone."""
    report.check("scheduler", lambda: _scheduler(settings))


def check_worker(
    settings: WorkerSettings,
    report: Report,
    *,
    scheduler: SchedulerSettings | None = None,
    gateway: GatewaySettings | None = None,
) -> "Device | None":
    """Checks a worker, and its model with the scheduler's and the gateway's settings if they are known.

    Returns:
        The device if it could be opened.
    """
    workers: list[Worker] = []
    devices: list[Device] = []
    if settings.master:
        report.check("master", lambda: _meeting_place(settings.master))
    if scheduler is None and settings.scheduler_address:
        waits = "the worker asks again until it answers"
        report.check("scheduler", lambda: _answers(settings.scheduler_address, settings, waits))

    def prepare() -> str:
        with _packages("worker"):
            from worker_svc import service

            worker = service.check(settings)
        workers.append(worker)
        devices.append(worker.device)
        return f"{worker.description.architecture} on {_described(worker.device)}"

    if report.check("model", lambda: _model(settings)) and report.status("model") == "note":
        report.check("worker", lambda: _opened(settings, devices))
    elif report.check("worker", prepare, needs=("model",)):
        if scheduler is not None:
            report.check("shapes", lambda: _shapes(scheduler, workers[0]))
        if gateway is not None:
            report.check("text", lambda: _text(gateway, workers[0]))
    if devices:
        report.check("compile cache", lambda: _writable(settings.cache_folder(devices[0].name)))
    for worker in workers:
        worker.close()
    return next(iter(devices), None)


def check_device(settings: WorkerSettings, report: Report) -> "Device | None":
    """Checks a worker's device without a model."""
    devices: list[Device] = []
    if settings.master:
        report.check("master", lambda: _meeting_place(settings.master))
    report.check("worker", lambda: _opened(settings, devices))
    return next(iter(devices), None)


def configuration(settings: SchedulerSettings, worker: "Worker", model: str) -> worker_pb2.ConfigureRequest:
    """Returns the configuration that a scheduler would send to a prepared worker.

    Raises:
        ConfigurationRefused: the settings contradict the model or the device.
    """
    from scheduler_svc.convert.model import description_from_proto
    from scheduler_svc.workers.deployment import Deployment
    from worker_svc.api.convert import description_to_proto

    description = description_from_proto(description_to_proto(worker, worker_id="check", model=model))
    layout = worker.layout
    description = replace(description, pipeline_stages=layout.pipeline, tensor_parallel=layout.tensor)
    request: worker_pb2.ConfigureRequest = Deployment(settings).set_up("check", description).request
    return request


def open_device(flags: list[str]) -> None:
    """Opens the device of a worker's flags, and ends the process as the worker would."""
    from worker_svc.devices import device_for

    try:
        device_for(load(WorkerSettings, flags))
    except ConfigurationRefused as error:
        sys.exit(error.message)


def _open_elsewhere(spec: ChildSpec) -> str:
    """Opens another worker's device in a process of its own, which sees only that worker's devices."""
    command = [sys.executable, "-c", _DEVICE_CODE, *spec.command[_FLAGS:]]
    environment = {**os.environ, **spec.environment}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ConfigurationRefused((done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1])
    return "its device can be opened"


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
    if settings.state_dir is not None:
        _writable(settings.state_dir)
    return f"would listen on {settings.host} port {settings.port}"


def _model(settings: WorkerSettings) -> str:
    with _packages("worker"):
        from worker_svc.model_files import loader

        if not loader.is_missing(settings.model, settings.revision):
            return f"{settings.model} needs no download"
    raise Note(f"the first start fetches {settings.model}; the worker checks it then")


def _opened(settings: WorkerSettings, devices: "list[Device]") -> str:
    with _packages("worker"):
        from worker_svc.devices import device_for
        from worker_svc.vllm_adapter import startup

        devices.append(device := device_for(settings))
        startup.prepare(device.name)
    return _described(device)


def _described(device: "Device") -> str:
    return f"{device.product_name()} with {device.free_memory() / _GIB:.3g} GiB free"


def _shapes(scheduler: SchedulerSettings, worker: "Worker") -> str:
    from worker_svc.api.convert import geometry_from_proto

    request = configuration(scheduler, worker, "")
    worker.check(geometry_from_proto(request))
    if request.pool_shapes:
        return f"{len(request.pool_shapes)} pool shapes fit"
    buckets = ",".join(map(str, request.decode_buckets))
    return f"chunks of {request.chunk} tokens and decode buckets {buckets} fit"


def _text(gateway: GatewaySettings, worker: "Worker") -> str:
    from gateway.app import check_text
    from worker_svc.model_files.loader import tokenizer_files

    with tempfile.TemporaryDirectory(prefix="triptych-tokenizer-") as folder:
        for file in tokenizer_files(worker.folder):
            shutil.copy(file, folder)
        text = check_text(gateway, Path(folder))
    return f"a tokenizer with {'a' if text.chat_template is not None else 'no'} chat template"


def _answers(address: str, settings: CallSecuritySettings, waits: str) -> str:
    """Calls a scheduler; services start in any order, so only a refused token is a fault."""
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
        raise Note(f"no scheduler answers at {address} ({reason}); {waits}") from error
    return f"{address} answers"


def _meeting_place(master: str) -> str:
    host, _, port = master.rpartition(":")
    try:
        found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
    except OSError as error:
        raise CheckFailed(
            f"--master {master}: unknown host ({error.strerror}); change the name, or add it to DNS or /etc/hosts"
        ) from error
    return f"{master} is {', '.join(dict.fromkeys(str(place[4][0]) for place in found))}"


def _writable(folder: Path | None) -> str:
    """Raises a note if a folder that services can do without is missing, unwritable or nearly full."""
    if folder is None:
        raise Note("off: every start compiles again")
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    try:
        with tempfile.NamedTemporaryFile(dir=existing):
            pass
    except OSError as error:
        raise Note(f"{existing} cannot be written ({error.strerror}), so nothing is kept there") from error
    free = shutil.disk_usage(existing).free
    text = f"{folder}, {free / _GIB:.3g} GiB free"
    if free < _LITTLE_BYTES:
        raise Note(f"{text}: the disk is nearly full")
    return text


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


def _secured(settings: LaunchSettings, folder: Path) -> LaunchSettings:
    """Returns the settings with copies of the files of --secure, or with temporary files."""
    existing = settings.run_dir / "secure"
    if existing.is_dir():
        shutil.copytree(existing, folder / "secure")
    used, _ = secured(settings.model_copy(update={"run_dir": folder}))
    return used.model_copy(update={"run_dir": settings.run_dir})


@contextlib.contextmanager
def _packages(service: str) -> Iterator[None]:
    """Refuses a missing package with the line of `triptych SERVICE`."""
    try:
        yield
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        raise ConfigurationRefused(f"{missing} is not installed; run `triptych install {service}`") from error
