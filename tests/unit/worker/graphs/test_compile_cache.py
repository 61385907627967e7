"""The cache of compiled code: complete entries or none, whoever is killed, damages or copies what."""

import json
import multiprocessing
import os
import signal
from pathlib import Path

import pytest

from protos.errors import ConfigurationRefused
from worker_svc.graphs.compile_cache import MANIFEST, CompileCache, DamagedEntry, differences, key_of
from worker_svc.graphs.precompiled import CompiledCode

FIELDS = {"model": "Llama 1234", "dtype": "bfloat16", "chunk": "128"}


def made(root: Path, fields: dict[str, str] | None = None) -> str:
    """An entry of two files; returns its key."""
    filling = CompileCache(root).fill(fields or FIELDS)
    (filling.folder / "inductor").mkdir()
    (filling.folder / "inductor" / "kernel.so").write_bytes(b"code")
    (filling.folder / "kernel.py").write_text("x = 1")
    filling.commit(["decode of 1 rows"], 2.5)
    return key_of(fields or FIELDS)


def test_an_entry_says_what_it_holds(tmp_path: Path) -> None:
    """Fields, graphs, and every file with its checksum."""
    key = made(tmp_path)
    manifest = CompileCache(tmp_path).verify(key)
    assert manifest is not None
    assert (manifest.fields, manifest.graphs, manifest.seconds) == (FIELDS, ["decode of 1 rows"], 2.5)
    assert sorted(manifest.files) == ["inductor/kernel.so", "kernel.py"]
    assert CompileCache(tmp_path).entries() == [key]


def test_nobody_sees_an_entry_that_is_being_made(tmp_path: Path) -> None:
    """Not before it is complete, and not at all if it never is."""
    cache = CompileCache(tmp_path)
    filling = cache.fill(FIELDS)
    (filling.folder / "kernel.py").write_text("x")
    assert cache.entries() == []
    assert cache.read(key_of(FIELDS)) is None
    filling.discard()
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_process_left_is_no_entry_and_goes(tmp_path: Path) -> None:
    """It is removed once it is old; a young one may be somebody's work."""

    def fill_and_die() -> None:
        filling = CompileCache(tmp_path).fill(FIELDS)
        (filling.folder / "kernel.py").write_text("x")
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


@pytest.mark.parametrize("damage", ["changed", "truncated", "missing", "manifest", "foreign"])
def test_damage_is_found(tmp_path: Path, damage: str) -> None:
    """Whatever happened to a file, and a manifest that is another entry's."""
    key = made(tmp_path)
    victim = tmp_path / key / "inductor" / "kernel.so"
    if damage == "changed":
        victim.write_bytes(b"cOde")
    elif damage == "truncated":
        victim.write_bytes(b"")
    elif damage == "missing":
        victim.unlink()
    elif damage == "manifest":
        (tmp_path / key / MANIFEST).write_text('{"fields": ')
    else:
        said = json.loads((tmp_path / key / MANIFEST).read_text())
        said["fields"]["dtype"] = "float32"
        (tmp_path / key / MANIFEST).write_text(json.dumps(said))
    with pytest.raises(DamagedEntry, match=key):
        CompileCache(tmp_path).verify(key)


def test_a_damaged_entry_is_made_anew(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With a warning; what is made takes its place."""
    key = made(tmp_path)
    (tmp_path / key / "kernel.py").write_text("y = 2")
    code = CompiledCode(CompileCache(tmp_path), FIELDS, required=False)
    assert not code.is_warm
    assert "[PRECOMPILED_WARN]" in capsys.readouterr().out
    (code.folder / "kernel.py").write_text("x = 1")
    code.keep(["decode of 1 rows"], 1.0)
    assert CompiledCode(CompileCache(tmp_path), FIELDS, required=True).is_warm
    assert code.folder == tmp_path / key


def test_the_first_of_two_that_make_the_same_wins(tmp_path: Path) -> None:
    """The other's work goes; nothing is mixed."""
    cache = CompileCache(tmp_path)
    first, second = cache.fill(FIELDS), cache.fill(FIELDS)
    for index, filling in enumerate((first, second)):
        (filling.folder / "kernel.py").write_text(str(index))
    first.commit(["a"], 1.0)
    second.commit(["a"], 1.0)
    assert (tmp_path / key_of(FIELDS) / "kernel.py").read_text() == "0"
    assert [path.name for path in tmp_path.iterdir()] == [key_of(FIELDS)]
    assert second.folder == tmp_path / key_of(FIELDS)


def test_a_copied_folder_is_as_good(tmp_path: Path) -> None:
    """No absolute path is in an entry."""
    made(tmp_path / "here")
    (tmp_path / "here").rename(tmp_path / "there")
    assert CompiledCode(CompileCache(tmp_path / "there"), FIELDS, required=True).is_warm


def test_what_is_required_and_not_there_is_told_field_by_field(tmp_path: Path) -> None:
    """Against the nearest entry, and with the way out."""
    made(tmp_path)
    made(tmp_path, {"model": "Gemma", "dtype": "float32", "chunk": "512"})
    wanted = {**FIELDS, "chunk": "256", "version:torch": "2.13"}
    with pytest.raises(ConfigurationRefused) as caught:
        CompiledCode(CompileCache(tmp_path), wanted, required=True)
    assert "chunk: 256 is wanted, 128 is precompiled" in caught.value.message
    assert "version:torch: 2.13 is wanted, (none) is precompiled" in caught.value.message
    assert "dtype" not in caught.value.message
    assert "triptych compile" in caught.value.message
    with pytest.raises(ConfigurationRefused, match="nothing is precompiled"):
        CompiledCode(CompileCache(tmp_path / "empty"), FIELDS, required=True)
    with pytest.raises(ConfigurationRefused, match="VLLM_DISABLE_COMPILE_CACHE"):
        CompiledCode(None, FIELDS, required=True)


def test_without_a_cache_nothing_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compilers get a folder that goes with the process."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "before")
    monkeypatch.setenv("TRITON_CACHE_DIR", "before")
    code = CompiledCode(None, FIELDS, required=False)
    code.use()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"].startswith(str(code.folder))
    code.keep(["decode"], 1.0)
    assert not list(tmp_path.iterdir())


def test_a_cache_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    """In one line that names the setting."""
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigurationRefused, match="--compile-cache-dir"):
        CompileCache(tmp_path / "file" / "cache").fill(FIELDS)


def test_differences_are_sorted_by_field() -> None:
    """One line each."""
    assert differences({"b": "1", "a": "1"}, {"b": "2", "a": "2"}) == [
        "a: 1 is wanted, 2 is precompiled",
        "b: 1 is wanted, 2 is precompiled",
    ]
