"""The launcher's folder."""

import resource
from pathlib import Path

import pytest

from deploy.launcher.stack_plan import claim, socket_folder
from deploy.launcher.supervisor import LaunchError
from protos.service.grpc_options import MAX_SOCKET_PATH_BYTES


def test_two_launchers_never_share_a_run_dir(tmp_path: Path) -> None:
    """The second launcher is refused with the pid of the first, until the first exits."""
    with claim(tmp_path):
        for name in ("worker-0.pid", "worker-0.log", "worker-0.sock"):
            (tmp_path / name).write_text("1\n")
        with pytest.raises(LaunchError, match=r"in use by another .*pid \d+"), claim(tmp_path):
            pass
    with claim(tmp_path):
        assert [path.name for path in tmp_path.iterdir()] == ["launcher.pid"]


def test_a_run_dir_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    """The message names the folder; the exit code says that a setting is wrong."""
    (tmp_path / "file").touch()
    with (
        pytest.raises(LaunchError, match="cannot write to the run dir") as refused,
        claim(tmp_path / "file" / "run"),
    ):
        pass
    assert refused.value.exit_code == 2


def test_a_full_disk_is_one_line(tmp_path: Path) -> None:
    """The folder can be made, and nothing be written into it."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        with (
            pytest.raises(LaunchError, match=f"cannot write to the run dir {tmp_path}: File too large"),
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
