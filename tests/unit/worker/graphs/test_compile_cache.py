"""Compiled code is kept in entries that are complete or absent, and compilers find folders to write."""

import contextlib
import json
import multiprocessing
import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from protos.errors import ConfigurationRefused
from tests.support.foreign import Foreign, foreign_folders
from worker_svc.graphs.compile_cache import (
    MANIFEST,
    CompileCache,
    CompiledCode,
    DamagedEntry,
    VerificationCache,
    key_of,
    replace_unusable_cache_dirs,
)

FIELDS = {"model": "Llama 1234", "dtype": "bfloat16", "chunk": "128"}


def store(root: Path, fields: dict[str, str] | None = None) -> str:
    """Stores an entry of two files; returns its key."""
    fields = fields or FIELDS
    folder = CompileCache(root).begin(fields)
    (folder / "inductor").mkdir()
    (folder / "inductor" / "kernel.so").write_bytes(b"code")
    (folder / "kernel.py").write_text("x = " + "1" * 32)
    CompileCache(root).commit(folder, fields, ["decode of 1 rows"], 2.5)
    return key_of(fields)


def test_an_entry_describes_itself(tmp_path: Path) -> None:
    """The manifest has the fields, the graphs, and every file with its checksum."""
    key = store(tmp_path)
    manifest = CompileCache(tmp_path).verify(key)
    assert manifest is not None
    assert (manifest.fields, manifest.graphs, manifest.seconds) == (FIELDS, ["decode of 1 rows"], 2.5)
    assert sorted(manifest.files) == ["inductor/kernel.so", "kernel.py"]
    assert CompileCache(tmp_path).entries() == [key]


def test_a_killed_process_leaves_no_entry(tmp_path: Path) -> None:
    """An abandoned folder is never an entry and is removed once it is old."""

    def fill_and_die() -> None:
        (CompileCache(tmp_path).begin(FIELDS) / "kernel.py").write_text("x")
        os.kill(os.getpid(), signal.SIGKILL)

    process = multiprocessing.get_context("fork").Process(target=fill_and_die)
    process.start()
    process.join(20)
    assert process.exitcode == -signal.SIGKILL
    cache = CompileCache(tmp_path)
    assert len(list(tmp_path.iterdir())) == 1
    assert (cache.entries(), cache.read(key_of(FIELDS))) == ([], None)
    assert cache.remove_abandoned() == 0
    assert cache.remove_abandoned(older_than=0) == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "damage", ["changed", "truncated", "missing", "added", "linked", "manifest", "foreign"]
)
def test_damage_is_found(tmp_path: Path, damage: str) -> None:
    """A changed, missing, added or linked file is found, and a broken manifest or that of another entry."""
    key = store(tmp_path)
    victim = tmp_path / key / "inductor" / "kernel.so"
    if damage == "changed":
        victim.write_bytes(b"cOde")
    elif damage == "truncated":
        victim.write_bytes(b"")
    elif damage == "missing":
        victim.unlink()
    elif damage == "added":
        (tmp_path / key / "inductor" / "fxgraph").mkdir()
        (tmp_path / key / "inductor" / "fxgraph" / "pickle").write_bytes(b"code")
    elif damage == "linked":
        victim.rename(tmp_path / "elsewhere")
        (tmp_path / key / "inductor").rmdir()
        (tmp_path / "folder").mkdir()
        (tmp_path / "elsewhere").rename(tmp_path / "folder" / "kernel.so")
        (tmp_path / key / "inductor").symlink_to(tmp_path / "folder")
    elif damage == "manifest":
        (tmp_path / key / MANIFEST).write_text('{"fields": ')
    else:
        data = json.loads((tmp_path / key / MANIFEST).read_text())
        data["fields"]["dtype"] = "float32"
        (tmp_path / key / MANIFEST).write_text(json.dumps(data))
    with pytest.raises(DamagedEntry, match=key):
        CompileCache(tmp_path).verify(key)


def test_a_damaged_entry_is_replaced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    key = store(tmp_path)
    (tmp_path / key / "kernel.py").write_text("y = 2")
    code = CompiledCode(CompileCache(tmp_path), FIELDS, required=False)
    assert not code.is_warm
    assert "[PRECOMPILED_WARN]" in capsys.readouterr().out
    (code.folder / "kernel.py").write_text("x = 1")
    code.commit(["decode of 1 rows"], 1.0)
    assert CompiledCode(CompileCache(tmp_path), FIELDS, required=True).is_warm
    assert code.folder == tmp_path / key


def test_a_found_entry_never_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compilers work on a copy, which is removed; what they make while serving goes where it went before."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "before")
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    key = store(tmp_path)
    code = CompiledCode(CompileCache(tmp_path), FIELDS, required=True)
    code.activate()
    assert (code.folder / "inductor" / "kernel.so").read_bytes() == b"code"
    (code.folder / "inductor" / "late.so").write_bytes(b"late")
    copy = code.folder
    code.commit(["decode of 1 rows"], 1.0)
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "before"
    assert "TRITON_CACHE_DIR" not in os.environ
    assert not copy.exists()
    assert [path.name for path in tmp_path.iterdir()] == [key]
    assert code.folder == tmp_path / key
    assert CompileCache(tmp_path).verify(key) is not None


@contextlib.contextmanager
def full_disk() -> Iterator[None]:
    """Lets this process write no more than a few bytes to any file."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (16, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_cache_that_cannot_be_written_costs_what_it_would_have_saved(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The code is compiled into a private folder, which is removed, and a warning names the setting."""
    (tmp_path / "file").write_text("")
    code = CompiledCode(CompileCache(tmp_path / "file" / "cache"), FIELDS, required=False)
    code.activate()
    (code.folder / "kernel.py").write_text("x = 1")
    code.commit(["decode of 1 rows"], 1.0)
    assert not code.is_warm
    assert not code.folder.exists()
    assert "--compile-cache-dir" in capsys.readouterr().out


def test_a_full_disk_keeps_no_entry(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A disk that is full at the start, or that fills up while compiling, costs a warning."""
    cache = CompileCache(tmp_path)
    with full_disk():
        code = CompiledCode(cache, FIELDS, required=False)
        assert code.folder.parent != tmp_path
        code.commit(["decode of 1 rows"], 1.0)
    assert "compiled_code_not_kept" in capsys.readouterr().out
    code = CompiledCode(cache, FIELDS, required=False)
    assert code.folder.parent == tmp_path
    (code.folder / "kernel.py").write_text("x = 1")
    with full_disk():
        code.commit(["decode of 1 rows"], 1.0)
    assert "compiled_code_not_kept" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


def test_found_code_is_used_in_place_on_a_full_disk(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without room for a copy, compilers read the entry itself."""
    store(tmp_path)
    with full_disk():
        code = CompiledCode(CompileCache(tmp_path), FIELDS, required=True)
    assert (code.is_warm, code.folder) == (True, tmp_path / key_of(FIELDS))
    assert "compiled_code_not_copied" in capsys.readouterr().out
    code.discard()
    assert code.folder.exists()


def test_the_first_of_two_equal_entries_wins(tmp_path: Path) -> None:
    """When two processes fill the same entry, the second one's files are dropped."""
    cache = CompileCache(tmp_path)
    folders = [cache.begin(FIELDS), cache.begin(FIELDS)]
    for index, folder in enumerate(folders):
        (folder / "kernel.py").write_text(str(index))
    for folder in folders:
        cache.commit(folder, FIELDS, ["a"], 1.0)
    assert (tmp_path / key_of(FIELDS) / "kernel.py").read_text() == "0"
    assert [path.name for path in tmp_path.iterdir()] == [key_of(FIELDS)]


def test_a_copied_folder_is_valid(tmp_path: Path) -> None:
    """A cache works in another place, because entries contain no absolute paths."""
    store(tmp_path / "here")
    (tmp_path / "here").rename(tmp_path / "there")
    assert CompiledCode(CompileCache(tmp_path / "there"), FIELDS, required=True).is_warm


@foreign_folders
def test_code_that_others_could_change_is_not_used(foreign: Foreign, tmp_path: Path) -> None:
    """A foreign cache is refused before anything is read; a foreign entry in our cache counts as damaged."""
    key = store(tmp_path / "cache")
    cache = CompileCache(tmp_path / "cache")
    for part in (cache.root / key / MANIFEST, cache.root / key):
        words = foreign(part)
        with pytest.raises(DamagedEntry, match=f"{part} belongs to {words}"):
            cache.verify(key)
        os.chown(part, os.geteuid(), 0)
        part.chmod(0o700)
    assert cache.verify(key) is not None
    words = foreign(cache.root)
    for use in (CompileCache, lambda root: VerificationCache(root, FIELDS)):
        with pytest.raises(ConfigurationRefused, match=f"the compile cache {cache.root} belongs to {words}"):
            use(cache.root)


def test_missing_required_code_is_explained_field_by_field(tmp_path: Path) -> None:
    """The refusal lists the differences from the nearest entry and the remedy."""
    store(tmp_path)
    store(tmp_path, {"model": "Gemma", "dtype": "float32", "chunk": "512"})
    wanted = {**FIELDS, "chunk": "256", "version:torch": "2.13"}
    with pytest.raises(ConfigurationRefused) as caught:
        CompiledCode(CompileCache(tmp_path), wanted, required=True)
    assert "chunk: 256 is needed, 128 is precompiled" in caught.value.message
    assert "version:torch: 2.13 is needed, (none) is precompiled" in caught.value.message
    assert "dtype" not in caught.value.message
    assert "triptych compile" in caught.value.message
    with pytest.raises(ConfigurationRefused, match="nothing is precompiled"):
        CompiledCode(CompileCache(tmp_path / "empty"), FIELDS, required=True)


def test_without_a_cache_nothing_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "before")
    monkeypatch.setenv("TRITON_CACHE_DIR", "before")
    code = CompiledCode(None, FIELDS, required=False)
    code.activate()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"].startswith(str(code.folder))
    code.commit(["decode"], 1.0)
    assert not list(tmp_path.iterdir())


_NAMES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")


@pytest.fixture
def no_folder(tmp_path: Path) -> Path:
    """A path that cannot become a folder, for root neither."""
    (tmp_path / "file").write_text("")
    return tmp_path / "file" / "home"


@pytest.fixture(autouse=True)
def temporary(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder for temporary files; compilers' variables are unset."""
    for name in (*_NAMES, "TRITON_HOME"):
        # Set before it is removed: whatever a test does to it, it is as before afterwards.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    folder = tmp_path_factory.mktemp("temporary")
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    return folder


def variables() -> dict[str, str | None]:
    return {name: os.environ.get(name) for name in _NAMES}


def test_a_home_that_may_not_be_searched_is_replaced(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, temporary: Path
) -> None:
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
    replace_unusable_cache_dirs()
    assert Path(os.environ["TRITON_CACHE_DIR"]).parent.parent == temporary


def test_a_user_without_a_home_is_no_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HOME")

    def unknown(_: int) -> None:
        raise KeyError

    monkeypatch.setattr("pwd.getpwuid", unknown)
    before = variables()
    replace_unusable_cache_dirs()
    assert variables() == before


def test_folders_that_can_be_written_stay(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nothing is created and no variable is set, even where the folders do not exist yet."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    before = variables()
    replace_unusable_cache_dirs()
    assert variables() == before
    assert not (tmp_path / "home").exists()


@pytest.mark.parametrize("variable", ["HOME", "TRITON_HOME", "TRITON_CACHE_DIR"])
def test_kernels_go_to_a_private_folder(
    variable: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, no_folder: Path, temporary: Path
) -> None:
    """Only the compiler whose folder cannot be written gets another one, which only this user can read."""
    monkeypatch.setenv(variable, str(no_folder))
    replace_unusable_cache_dirs()
    folder = Path(os.environ["TRITON_CACHE_DIR"])
    assert folder.parent.parent == temporary
    assert folder.parent.stat().st_mode & 0o777 == 0o700
    assert "TORCHINDUCTOR_CACHE_DIR" not in os.environ


def test_pytorchs_folder_is_replaced_too(monkeypatch: pytest.MonkeyPatch, no_folder: Path) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(no_folder))
    replace_unusable_cache_dirs()
    Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]).mkdir(parents=True)


@foreign_folders
@pytest.mark.parametrize("name", _NAMES)
def test_a_compilers_folder_that_others_can_write_to_is_replaced(
    name: str,
    foreign: Foreign,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    temporary: Path,
    no_folder: Path,
) -> None:
    """Without a private one in its place, the start is refused: others would decide what we run."""
    folder = tmp_path / "folder"
    folder.mkdir(0o700)
    words = foreign(folder)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv(name, str(folder))
    with monkeypatch.context() as patch:
        patch.setattr("tempfile.tempdir", str(no_folder))
        with pytest.raises(ConfigurationRefused, match=f"{folder} belongs to {words}"):
            replace_unusable_cache_dirs()
    replace_unusable_cache_dirs()
    assert Path(os.environ[name]).parent.parent == temporary


def test_pytorchs_own_choice_is_taken_before_strangers_take_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, temporary: Path
) -> None:
    """Its name among the temporary files of all users can be guessed."""
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    monkeypatch.setenv("HOME", str(tmp_path))
    temporary.chmod(0o1777)
    choice = Path(default_cache_dir())
    assert choice.parent == temporary
    # The import may have made it, and set the variable.
    shutil.rmtree(choice, ignore_errors=True)
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    replace_unusable_cache_dirs()
    assert choice.stat().st_mode & 0o777 == 0o700
    assert "TORCHINDUCTOR_CACHE_DIR" not in os.environ
    choice.chmod(0o777)
    replace_unusable_cache_dirs()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] != str(choice)


def test_a_full_folder_for_temporary_files_costs_no_start(
    monkeypatch: pytest.MonkeyPatch, no_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Most workers compile nothing while they serve."""
    monkeypatch.setenv("HOME", str(no_folder))
    monkeypatch.setattr("tempfile.tempdir", str(no_folder))
    replace_unusable_cache_dirs()
    assert variables() == dict.fromkeys(_NAMES)
    assert "compiler_folders_not_writable" in capsys.readouterr().out


def test_the_private_folder_goes_with_the_process(tmp_path: Path, no_folder: Path, temporary: Path) -> None:
    code = (
        "import os, pathlib\n"
        "from worker_svc.graphs.compile_cache import replace_unusable_cache_dirs\n"
        "replace_unusable_cache_dirs()\n"
        "folder = pathlib.Path(os.environ['TRITON_CACHE_DIR'])\n"
        "folder.mkdir()\n"
        "(folder / 'kernel').write_text('code')\n"
    )
    environment = os.environ | {"HOME": str(no_folder), "TMPDIR": str(temporary)}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    subprocess.run([sys.executable, "-c", code], env=environment, check=True, capture_output=True, timeout=60)
    assert list(temporary.iterdir()) == []


GRAPH_FIELDS = {"model": "a", "version:torch": "2"}
SIGNATURES = frozenset({"decode of 1 rows", "prefill of 128 tokens"})


def test_checked_graphs_are_remembered_for_the_same_fields(tmp_path: Path) -> None:
    assert VerificationCache(tmp_path, GRAPH_FIELDS).read() == frozenset()
    VerificationCache(tmp_path, GRAPH_FIELDS).write(SIGNATURES)
    assert VerificationCache(tmp_path, GRAPH_FIELDS).read() == SIGNATURES
    assert VerificationCache(tmp_path, {**GRAPH_FIELDS, "version:torch": "3"}).read() == frozenset()


def test_nothing_is_remembered_without_a_compile_cache() -> None:
    graphs = VerificationCache(None, GRAPH_FIELDS)
    graphs.write(SIGNATURES)
    assert graphs.read() == frozenset()


@pytest.mark.parametrize("content", ["", "{", "5", '{"a": 1}', "\xff"])
def test_a_damaged_file_counts_as_missing(tmp_path: Path, content: str) -> None:
    graphs = VerificationCache(tmp_path, GRAPH_FIELDS)
    graphs.write(SIGNATURES)
    (file,) = (tmp_path / "checked").iterdir()
    file.write_text(content, encoding="latin-1")
    assert graphs.read() == frozenset()
    graphs.write(SIGNATURES)
    assert graphs.read() == SIGNATURES


def test_a_cache_that_cannot_be_written_costs_nothing_but_time(tmp_path: Path) -> None:
    (tmp_path / "checked").write_text("not a folder")
    graphs = VerificationCache(tmp_path, GRAPH_FIELDS)
    graphs.write(SIGNATURES)
    assert graphs.read() == frozenset()
