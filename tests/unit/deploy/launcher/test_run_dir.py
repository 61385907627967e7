"""The launcher's folder."""

from pathlib import Path

import pytest

from deploy.launcher.run_dir import claim
from deploy.launcher.supervisor import LaunchError


def test_two_launchers_never_share_a_run_dir(tmp_path: Path) -> None:
    """The second launcher is refused with the pid of the first, until the first exits."""
    with claim(tmp_path):
        (tmp_path / "worker-0.pid").write_text("1\n")
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
