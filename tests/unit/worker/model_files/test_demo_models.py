"""Demo models are fetched once, completely, and by one process at a time."""

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from protos.errors import ConfigurationRefused
from worker_svc.model_files import loader


@pytest.fixture
def catalog(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A catalog with one model: a folder of an installed package (pip's own)."""
    packaged = loader._PackagedModel((f"pip=={_pip_version()}",), ("pip/_internal/network",))
    monkeypatch.setattr(loader, "_CATALOG", {"tiny": packaged})
    return tmp_path / "cache"


def _pip_version() -> str:
    import importlib.metadata

    return importlib.metadata.version("pip")


def test_fetch_makes_a_folder_once(catalog: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The second call returns the same folder without making it again."""
    folder = loader.fetch("tiny", catalog)
    assert folder == catalog / "tiny"
    assert (folder / "session.py").is_file()
    marker = folder / "session.py"
    marker.write_text("untouched")
    assert loader.fetch("tiny", catalog) == folder
    assert marker.read_text() == "untouched"
    assert capsys.readouterr().out == ""  # progress goes to standard error


def test_interrupted_fetch_is_cleaned_up(catalog: Path) -> None:
    """A killed process' leftovers are removed, and an incomplete folder is made again."""
    (catalog / ".tiny-abc").mkdir(parents=True)
    (catalog / ".tiny-abc" / "half").write_text("a file")
    (catalog / "tiny").mkdir()
    folder = loader.fetch("tiny", catalog)
    assert (folder / "session.py").is_file()
    assert sorted(path.name for path in catalog.iterdir()) == [".tiny.lock", "tiny"]


def test_failed_fetch_leaves_nothing(catalog: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failure halfway leaves no files; the next call succeeds."""

    def fail(*_: object) -> None:
        raise ConfigurationRefused("the power went out")

    with monkeypatch.context() as patch:
        patch.setattr("shutil.copytree", fail)
        with pytest.raises(ConfigurationRefused, match="power"):
            loader.fetch("tiny", catalog)
    assert [path.name for path in catalog.iterdir()] == [".tiny.lock"]
    assert loader.fetch("tiny", catalog).is_dir()


def test_concurrent_fetches_make_one(catalog: Path) -> None:
    """Later calls wait and get the first call's folder."""
    folders: list[Path] = []
    threads = [
        threading.Thread(target=lambda: folders.append(loader.fetch("tiny", catalog))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert folders == [catalog / "tiny"] * 4


def test_unknown_name_lists_the_names(catalog: Path) -> None:
    """The error lists the known names."""
    with pytest.raises(ConfigurationRefused, match="unknown model 'nope'; choose one of"):
        loader.fetch("nope", catalog)


def test_unwritable_cache_is_one_line(tmp_path: Path, catalog: Path) -> None:
    """A cache path that is a file is refused in one line."""
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(ConfigurationRefused, match="cannot write the model cache"):
        loader.fetch("tiny", blocked)


def test_cache_dir_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """TRIPTYCH_CACHE wins over the user's cache folder."""
    monkeypatch.setenv("TRIPTYCH_CACHE", str(tmp_path))
    assert loader.default_cache_dir() == tmp_path
    monkeypatch.delenv("TRIPTYCH_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert loader.default_cache_dir() == tmp_path / "triptych" / "models"


def test_catalog_imports_no_torch() -> None:
    """The launcher fetches models and must stay small."""
    code = "import sys, worker_svc.model_files.loader; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout == "False\n"


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A conversion that lacks a package fails in one line that names the package and how to install it."""
    monkeypatch.setattr(loader, "find_spec", lambda name: None if name == "gguf" else object())
    file = tmp_path / "tiny.gguf"
    file.touch()
    with pytest.raises(ConfigurationRefused) as caught:
        loader.convert(file, tmp_path / "cache")
    assert str(caught.value) == (
        "converting a GGUF file needs gguf, which is not installed; run `triptych install worker`"
    )
    assert [path.suffix for path in (tmp_path / "cache" / "gguf").iterdir()] == [".lock"]
