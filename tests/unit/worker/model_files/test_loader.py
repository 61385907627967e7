"""The --model setting accepts folders, GGUF files and names; everything else is refused in one line.

Demo models are fetched once, completely, by one process.
"""

import subprocess
import sys
import threading
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from protos.errors import ConfigurationRefused
from tests.support.checkpoints.gguf_cases import V, put, write
from tests.support.foreign import Foreign, foreign_folders
from worker_svc.model_files import loader
from worker_svc.model_files.checkpoint import Checkpoint
from worker_svc.settings import LoadFormat

pytestmark = pytest.mark.usefixtures("cache")


def refusal(model: Path | str, **options: Any) -> str:
    """The one line that refuses a model."""
    with pytest.raises(ConfigurationRefused) as caught:
        loader.resolve(str(model), **options)
    assert "\n" not in caught.value.message
    return caught.value.message


@pytest.mark.usefixtures("in_process")
def test_a_gguf_file_is_converted_once(
    tmp_path: Path, cache: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A file passed by path or by folder is converted once, and again after it changes."""
    file = write("llama", [], tmp_path)
    folder = loader.resolve(str(file))
    assert folder.parent == cache / "gguf"
    assert Checkpoint.open(folder).num_bytes() > 0
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.encode("abcab").tokens == ["abc", "ab"]
    assert loader.display_name(str(file)) == "tiny"
    capfd.readouterr()
    assert loader.resolve(str(tmp_path)) == folder
    assert loader.resolve(str(file), load_format="gguf") == folder
    assert capfd.readouterr().err == ""  # nothing was converted
    write("llama", [], tmp_path)
    assert loader.resolve(str(file)) == folder
    assert "is ready" in capfd.readouterr().err


@pytest.mark.usefixtures("in_process")
def test_safetensors_come_before_gguf(tmp_path: Path) -> None:
    """In a folder with both, GGUF is used only if --load-format says so; without safetensors it is used."""
    write("llama", [], tmp_path)
    (tmp_path / "config.json").write_text("{}")
    for name in ("mmproj-tiny.gguf", "imatrix.gguf"):  # no models
        (tmp_path / name).touch()
    assert loader.resolve(str(tmp_path)).name.startswith("tiny-")
    (tmp_path / "model.safetensors").touch()
    assert loader.resolve(str(tmp_path)) == tmp_path
    assert loader.resolve(str(tmp_path), load_format="gguf") != tmp_path


def test_an_unsupported_gguf_file_is_refused_in_one_line(tmp_path: Path, cache: Path) -> None:
    """The converter's process says why, and leaves a lock alone."""
    file = write("llama", [put("general.architecture", "qwen2", V.STRING)], tmp_path)
    assert f"cannot convert {file}: GGUF files of the architecture qwen2 are not supported" in refusal(file)
    assert [path.suffix for path in (cache / "gguf").iterdir()] == [".lock"]


@pytest.mark.parametrize(
    ("make", "load_format", "expected"),
    [
        (["x.txt"], "auto", "has no config.json"),
        (["a.gguf", "b.gguf"], "auto", "has 2 GGUF files; pass one of them as --model"),
        (["config.json", "a.safetensors"], "gguf", "has no GGUF file; check --model"),
        ([], "dummy", "has no config.json"),
    ],
)
def test_unsuitable_folders_are_refused(
    tmp_path: Path, make: list[str], load_format: LoadFormat, expected: str
) -> None:
    for name in make:
        (tmp_path / name).touch()
    assert f"the folder {tmp_path} {expected}" in refusal(tmp_path, load_format=load_format)


def test_unsuitable_files_and_names_are_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    assert "pass a Hugging Face folder or id, or a .gguf file as --model" in refusal(
        tmp_path / "model.safetensors"
    )
    (tmp_path / "model.gguf").touch()
    assert "is a GGUF file; omit --load-format dummy" in refusal(tmp_path / "model.gguf", load_format="dummy")
    assert refusal("missing.gguf") == "there is no file missing.gguf; check --model"
    assert "needs a local .gguf file" in refusal("some/model", load_format="gguf")


@pytest.mark.parametrize(
    ("load_format", "trust", "weights", "code"),
    [("auto", False, True, False), ("dummy", False, False, False), ("safetensors", True, True, True)],
)
def test_only_needed_files_are_fetched_from_a_hub(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    load_format: LoadFormat,
    trust: bool,
    weights: bool,
    code: bool,
) -> None:
    """Made-up weights and untrusted code are skipped, and pickles are never fetched."""
    (tmp_path / "config.json").write_text("{}")
    patterns: list[str] = []

    def snapshot_download(model: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        del model, revision
        patterns.extend(allow_patterns)
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    assert loader.resolve("some/model", load_format=load_format, trust_remote_code=trust) == tmp_path
    assert ("*.safetensors" in patterns, "*.py" in patterns) == (weights, code)
    assert not {"*.bin", "*.pt", "*"} & set(patterns)


def test_demo_models_keep_their_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "fetch", lambda name: tmp_path / name)
    (tmp_path / "smollm2").mkdir()
    (tmp_path / "smollm2" / "config.json").touch()
    assert loader.resolve("smollm2") == tmp_path / "smollm2"
    assert "no GGUF file" in refusal("smollm2", load_format="gguf")


@pytest.fixture
def catalog(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A catalog with one model: a folder of an installed package (pip's own)."""
    packaged = loader._PackagedModel((f"pip=={version('pip')}",), ("pip/_internal/network",))
    monkeypatch.setattr(loader, "_CATALOG", {"tiny": packaged})
    return tmp_path / "cache"


def test_fetch_makes_a_folder_once(catalog: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = loader.fetch("tiny", catalog)
    assert folder == catalog / "tiny"
    assert (folder / "session.py").is_file()
    marker = folder / "session.py"
    marker.write_text("untouched")
    assert loader.fetch("tiny", catalog) == folder
    assert marker.read_text() == "untouched"
    assert capsys.readouterr().out == ""  # progress goes to standard error


@foreign_folders
def test_models_that_others_could_change_are_refused(
    foreign: Foreign, tmp_path: Path, catalog: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So is the folder from which transformers loads models' code, where that may run."""
    folder = loader.fetch("tiny", catalog)
    (folder / "config.json").touch()
    words = foreign(catalog)
    monkeypatch.setenv("TRIPTYCH_CACHE", str(catalog))
    line = f"^the model cache {catalog} belongs to {words}.*TRIPTYCH_CACHE$"
    with pytest.raises(ConfigurationRefused, match=line):
        loader.fetch("tiny")
    modules = tmp_path / "modules"
    modules.mkdir()
    monkeypatch.setattr("transformers.utils.HF_MODULES_CACHE", str(modules))
    assert loader.resolve(str(folder), trust_remote_code=True) == folder
    words = foreign(modules)
    with pytest.raises(ConfigurationRefused, match=f"code {modules} belongs to {words}.*HF_MODULES_CACHE"):
        loader.resolve(str(folder), trust_remote_code=True)


def test_interrupted_fetch_is_cleaned_up(catalog: Path) -> None:
    """A killed process' leftovers are removed, and an incomplete folder is made again."""
    (catalog / ".tiny-abc").mkdir(parents=True)
    (catalog / ".tiny-abc" / "half").write_text("a file")
    (catalog / "tiny").mkdir()
    folder = loader.fetch("tiny", catalog)
    assert (folder / "session.py").is_file()
    assert sorted(path.name for path in catalog.iterdir()) == [".tiny.lock", "tiny"]


def test_failed_fetch_leaves_nothing(catalog: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise ConfigurationRefused("the power went out")

    with monkeypatch.context() as patch:
        patch.setattr("shutil.copytree", fail)
        with pytest.raises(ConfigurationRefused, match="power"):
            loader.fetch("tiny", catalog)
    assert [path.name for path in catalog.iterdir()] == [".tiny.lock"]
    assert loader.fetch("tiny", catalog).is_dir()


def test_concurrent_fetches_make_one(catalog: Path) -> None:
    folders: list[Path] = []
    threads = [
        threading.Thread(target=lambda: folders.append(loader.fetch("tiny", catalog))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert folders == [catalog / "tiny"] * 4


def test_fetches_that_cannot_work_are_refused(tmp_path: Path, catalog: Path) -> None:
    """The line lists the known names, or says that the cache's path is a file."""
    with pytest.raises(ConfigurationRefused, match="unknown model 'nope'; choose one of"):
        loader.fetch("nope", catalog)
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(ConfigurationRefused, match="cannot write the model cache"):
        loader.fetch("tiny", blocked)


def test_cache_dir_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRIPTYCH_CACHE", str(tmp_path))
    assert loader.default_cache_dir() == tmp_path
    monkeypatch.delenv("TRIPTYCH_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert loader.default_cache_dir() == tmp_path / "triptych" / "models"


def test_catalog_imports_no_torch() -> None:
    code = "import sys, worker_svc.model_files.loader; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout == "False\n"


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(loader, "find_spec", lambda name: None if name == "gguf" else object())
    file = tmp_path / "tiny.gguf"
    file.touch()
    with pytest.raises(ConfigurationRefused) as caught:
        loader.convert(file, tmp_path / "cache")
    assert str(caught.value) == (
        "converting a GGUF file needs gguf, which is not installed; run `triptych install worker`"
    )
    assert [path.suffix for path in (tmp_path / "cache" / "gguf").iterdir()] == [".lock"]
