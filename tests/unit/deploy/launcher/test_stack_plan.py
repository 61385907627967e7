"""The folder and the ports of a stack."""

import contextlib
import fcntl
import os
import resource
import socket
import time
from pathlib import Path

import pytest

from deploy.launcher.settings import LaunchSettings
from deploy.launcher.stack_plan import Ports, StackPlan, claim, free_ports, socket_folder, with_run_dir
from gateway.settings import Settings as GatewaySettings
from protos.errors import ConfigurationRefused
from protos.service.grpc_options import MAX_SOCKET_PATH_BYTES
from protos.service.settings import load
from scheduler_svc.settings import Settings as SchedulerSettings
from tests.support.foreign import Foreign, foreign_folders
from tests.support.ports import free_port
from worker_svc.settings import Settings as WorkerSettings


def settings(*flags: str) -> LaunchSettings:
    return load(LaunchSettings, ["--port", "0", *flags])


def test_ports_are_all_different() -> None:
    """The gateways share a port and have one each; the scheduler has one if a flag asks for it."""
    flags = ("--workers", "4", "--tensor-parallel-size", "2", "--gateways", "3", "--scheduler-port", "0")
    with free_ports(settings(*flags)) as ports:
        assert len({ports.http, ports.scheduler, *ports.masters, *ports.metrics}) == 2 + 4 + 3


def test_a_stack_has_its_http_port_alone(tmp_path: Path) -> None:
    """Scheduler and workers listen on Unix sockets, whatever the variables of the ports say."""
    asked = settings("--workers", "2")
    plan = StackPlan.make(asked, tmp_path)
    assert plan.ports == Ports(plan.ports.http, None, (), (None,))
    scheduler = load(SchedulerSettings, plan.scheduler.command[5:])
    worker = load(WorkerSettings, plan.workers[1].command[5:])
    assert (scheduler.host, scheduler.socket) == ("", tmp_path / "scheduler.sock")
    assert (worker.host, worker.socket) == ("", tmp_path / "worker-1.sock")
    plan = StackPlan.make(settings("--scheduler-port", "0"), tmp_path)
    scheduler = load(SchedulerSettings, plan.scheduler.command[5:])
    assert (scheduler.host, scheduler.port) == ("127.0.0.1", plan.ports.scheduler)


def test_two_stacks_need_two_http_ports_alone() -> None:
    with free_ports(settings("--workers", "2")), free_ports(settings("--workers", "2")):
        pass


def test_two_stacks_of_a_folder_have_their_own_run_dirs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second takes the name of its port, unless a flag names the folder."""
    monkeypatch.chdir(tmp_path)
    first, second = load(LaunchSettings, []), load(LaunchSettings, ["--port", "8001"])
    assert with_run_dir(first).run_dir == Path("run")
    with claim(first.run_dir):
        assert with_run_dir(second).run_dir == Path("run-8001")
        named = load(LaunchSettings, ["--run-dir", "run"])
        assert with_run_dir(named).run_dir == Path("run")
        with pytest.raises(ConfigurationRefused, match="with --secure, give this stack a --run-dir"):
            with_run_dir(load(LaunchSettings, ["--port", "8001", "--secure"]))
    assert with_run_dir(second).run_dir == Path("run")


def test_a_stack_on_a_unix_socket_has_no_port(tmp_path: Path) -> None:
    """Not even for metrics, unless a flag asks."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        plan = StackPlan.make(settings("--port", port, "--uds", str(tmp_path / "http.sock")), tmp_path)
    gateway = load(GatewaySettings, plan.gateways[0].command[5:])
    assert (gateway.uds, gateway.metrics_port) == (tmp_path / "http.sock", None)


def test_the_scheduler_expects_the_model_that_was_asked_for(tmp_path: Path) -> None:
    (tmp_path / "models" / "mine").mkdir(parents=True)
    for model, name in ((str(tmp_path / "models" / "mine"), "mine"), ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B")):
        plan = StackPlan.make(settings(model), tmp_path)
        assert load(SchedulerSettings, plan.scheduler.command[5:]).expect_model == name


def test_one_gateway_needs_no_second_port() -> None:
    with free_ports(settings()) as ports:
        assert ports.metrics == (None,)
        free = ports.http
    with free_ports(settings("--metrics-port", str(free))) as ports:
        assert ports.metrics == (free,)


def after_a_free_port() -> int:
    while True:
        port = free_port()
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port + 1)):
            return port + 1


def test_gateways_have_consecutive_metrics_ports() -> None:
    with socket.create_server(("127.0.0.1", after_a_free_port())) as taken:
        port = taken.getsockname()[1]
        flags = ("--gateways", "2", "--metrics-port", str(port - 1))
        refusal = f"port {port}: .*choose another with --metrics-port"
        with pytest.raises(ConfigurationRefused, match=refusal), free_ports(settings(*flags)):
            pass
    with free_ports(settings(*flags)) as ports:
        assert ports.metrics == (port - 1, port)


def test_two_launchers_never_share_a_run_dir(tmp_path: Path) -> None:
    """The second launcher is refused with the pid of the first, until the first exits."""
    with claim(tmp_path):
        for name in ("worker-0.pid", "worker-0.log", "worker-0.sock"):
            (tmp_path / name).write_text("1\n")
        with pytest.raises(ConfigurationRefused, match=r"in use by another .*pid \d+"), claim(tmp_path):
            pass
        assert (tmp_path / "worker-0.sock").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["worker-0.log"], "files of killed services"
    with claim(tmp_path):
        assert [path.name for path in tmp_path.iterdir()] == ["launcher.pid"]


def test_a_start_that_only_looks_keeps_no_other_from_the_run_dir(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its shared lock of the default run dir is gone at the second try."""
    with (tmp_path / "launcher.pid").open("a") as looking:
        fcntl.flock(looking, fcntl.LOCK_SH)
        monkeypatch.setattr(time, "sleep", lambda _: fcntl.flock(looking, fcntl.LOCK_UN))
        with claim(tmp_path):
            pass


def test_a_run_dir_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with (
        pytest.raises(ConfigurationRefused, match="cannot write to the run dir"),
        claim(tmp_path / "file" / "run"),
    ):
        pass


@foreign_folders
def test_a_run_dir_that_others_can_write_to_is_refused(foreign: Foreign, tmp_path: Path) -> None:
    """They could replace its sockets, logs and secrets. A new one is closed to them whatever the umask is."""
    run_dir = tmp_path / "run"
    before = os.umask(0)
    try:
        with claim(run_dir):
            assert run_dir.stat().st_mode & 0o777 == 0o755
    finally:
        os.umask(before)
    words = foreign(run_dir)
    with (
        pytest.raises(ConfigurationRefused, match=f"the run dir {run_dir} belongs to {words}.*--run-dir"),
        claim(run_dir),
    ):
        pass
    assert not list(run_dir.iterdir())


def test_the_lock_is_never_a_link(tmp_path: Path) -> None:
    """The file that it names would be overwritten with a process id."""
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / "launcher.pid").symlink_to(victim)
    with pytest.raises(ConfigurationRefused, match="pid is a symbolic link"), claim(tmp_path):
        pass
    assert victim.read_text() == "precious"


def test_a_full_disk_is_one_line(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        with (
            pytest.raises(
                ConfigurationRefused, match=f"cannot write to the run dir {tmp_path}: File too large"
            ),
            claim(tmp_path),
        ):
            pass
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    with claim(tmp_path):
        pass


def test_a_long_run_dir_has_its_sockets_elsewhere(tmp_path: Path) -> None:
    """The other folder exists, fits the longest name, and is removed at the end."""
    deep = tmp_path / ("d" * 100)
    with socket_folder(deep) as folder:
        assert folder.is_dir()
        assert len(str(folder / "scheduler.sock")) <= MAX_SOCKET_PATH_BYTES
    assert not folder.exists()


def test_metrics_ports_end_with_the_last_port() -> None:
    assert settings("--gateways", "2", "--metrics-port", "65534").metrics_port == 65534
    with pytest.raises(ConfigurationRefused, match="--metrics-port 65534 leaves no port"):
        settings("--gateways", "3", "--metrics-port", "65534")
