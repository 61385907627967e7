"""The folder and the ports of a stack."""

import os
import resource
import socket
from pathlib import Path

import pytest

from deploy.launcher.settings import LaunchSettings
from deploy.launcher.stack_plan import claim, free_ports, socket_folder
from protos.errors import ConfigurationRefused
from protos.service.grpc_options import MAX_SOCKET_PATH_BYTES
from protos.service.settings import load
from tests.support.foreign import Foreign, foreign_folders


def settings(*flags: str) -> LaunchSettings:
    return load(LaunchSettings, ["--port", "0", "--scheduler-port", "0", *flags])


def test_ports_are_all_different() -> None:
    """The gateways share a port and have one each; the scheduler and every worker have one."""
    with free_ports(settings("--workers", "4", "--gateways", "3")) as ports:
        assert len({ports.http, ports.scheduler, *ports.workers, *ports.metrics}) == 2 + 4 + 3


def test_one_gateway_needs_no_second_port() -> None:
    """It has one if it was given one."""
    with free_ports(settings()) as ports:
        assert ports.metrics == (None,)
        free = ports.http
    with free_ports(settings("--metrics-port", str(free))) as ports:
        assert ports.metrics == (free,)


def test_gateways_have_consecutive_metrics_ports() -> None:
    """A taken one is refused with the flag to change."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
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


def test_a_run_dir_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    """The message names the folder."""
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
    """The folder can be made, and nothing be written into it."""
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


def test_sockets_are_in_the_run_dir(tmp_path: Path) -> None:
    """Their folder is absolute, wherever the launcher was started."""
    with socket_folder(tmp_path) as folder:
        assert folder == tmp_path
    with socket_folder(Path("run")) as folder:
        assert folder == Path.cwd() / "run"


def test_a_long_run_dir_has_its_sockets_elsewhere(tmp_path: Path) -> None:
    """The other folder exists, fits the longest name, and is removed at the end."""
    deep = tmp_path / ("d" * 100)
    with socket_folder(deep) as folder:
        assert folder.is_dir()
        assert len(str(folder / "scheduler.sock")) <= MAX_SOCKET_PATH_BYTES
    assert not folder.exists()
