"""The folders of PyTorch's and Triton's compilers, where these cannot be written."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from worker_svc.graphs.precompiled import (
    replace_unwritable_cache_dirs,
)

_NAMES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")


@pytest.fixture
def no_folder(tmp_path: Path) -> Path:
    """A path that cannot become a folder, for root neither."""
    (tmp_path / "file").write_text("")
    return tmp_path / "file" / "home"


@pytest.fixture(autouse=True)
def _private_variables(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in (*_NAMES, "TRITON_HOME"):
        # Set before it is removed: whatever a test does to it, it is as before afterwards.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))


def variables() -> dict[str, str | None]:
    return {name: os.environ.get(name) for name in _NAMES}


def test_a_home_that_may_not_be_searched_is_replaced(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Another user's, for example: asking what is in it raises an error."""
    home = tmp_path / "home"
    monkeypatch.setenv("HOME", str(home))
    stat = os.stat

    def refuse(path: Any, **options: Any) -> os.stat_result:
        if str(path).startswith(f"{home}/"):
            raise PermissionError(path)
        return stat(path, **options)

    home.mkdir()
    monkeypatch.setattr(os, "stat", refuse)
    monkeypatch.setattr(os, "access", lambda path, _: path != home)
    replace_unwritable_cache_dirs()
    assert Path(os.environ["TRITON_CACHE_DIR"]).parent.parent == tmp_path / "temporary"


def test_a_user_without_a_home_is_no_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A container may run as a user that has no entry and no HOME."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HOME")

    def unknown(_: int) -> None:
        raise KeyError

    monkeypatch.setattr("pwd.getpwuid", unknown)
    before = variables()
    replace_unwritable_cache_dirs()
    assert variables() == before


def test_folders_that_can_be_written_stay(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nothing is created and no variable is set, even where the folders do not exist yet."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    before = variables()
    replace_unwritable_cache_dirs()
    assert variables() == before
    assert not (tmp_path / "home").exists()


@pytest.mark.parametrize("variable", ["HOME", "TRITON_HOME", "TRITON_CACHE_DIR"])
def test_kernels_go_to_a_private_folder(
    variable: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, no_folder: Path
) -> None:
    """Only the compiler whose folder cannot be written gets another one, which only this user can read."""
    monkeypatch.setenv(variable, str(no_folder))
    replace_unwritable_cache_dirs()
    folder = Path(os.environ["TRITON_CACHE_DIR"])
    assert folder.parent.parent == tmp_path / "temporary"
    assert folder.parent.stat().st_mode & 0o777 == 0o700
    assert "TORCHINDUCTOR_CACHE_DIR" not in os.environ


def test_pytorchs_folder_is_replaced_too(monkeypatch: pytest.MonkeyPatch, no_folder: Path) -> None:
    """Its variable may name a read-only volume."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(no_folder))
    replace_unwritable_cache_dirs()
    Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]).mkdir(parents=True)


def test_a_full_folder_for_temporary_files_costs_no_start(
    monkeypatch: pytest.MonkeyPatch, no_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Most workers compile nothing while they serve."""
    monkeypatch.setenv("HOME", str(no_folder))
    monkeypatch.setattr("tempfile.tempdir", str(no_folder))
    replace_unwritable_cache_dirs()
    assert variables() == dict.fromkeys(_NAMES)
    assert "compiler_folders_not_writable" in capsys.readouterr().out


def test_the_private_folder_goes_with_the_process(tmp_path: Path, no_folder: Path) -> None:
    """Nothing is left after a worker has ended."""
    code = (
        "import os, pathlib\n"
        "from worker_svc.graphs.precompiled import replace_unwritable_cache_dirs\n"
        "replace_unwritable_cache_dirs()\n"
        "folder = pathlib.Path(os.environ['TRITON_CACHE_DIR'])\n"
        "folder.mkdir()\n"
        "(folder / 'kernel').write_text('code')\n"
    )
    environment = os.environ | {"HOME": str(no_folder), "TMPDIR": str(tmp_path / "temporary")}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    subprocess.run([sys.executable, "-c", code], env=environment, check=True, capture_output=True, timeout=60)
    assert list((tmp_path / "temporary").iterdir()) == []
