"""`triptych catalog` lists, verifies, prunes and exports entries."""

import json
from pathlib import Path

import pytest

from deploy.commands.catalog import main
from worker_svc.graphs.compile_cache import CompileCache, key_of

FIELDS = {"model": "LlamaForCausalLM 12", "dtype": "bfloat16", "level": "2", "device": "cpu: x86_64"}


@pytest.fixture
def cache(tmp_path: Path) -> CompileCache:
    """A cache with two entries."""
    cache = CompileCache(tmp_path / "cache")
    for level in ("2", "3"):
        fields = {**FIELDS, "level": level}
        folder = cache.begin(fields)
        (folder / "kernel.py").write_text(f"level = {level}")
        cache.commit(folder, fields, ["prefill of 128 tokens", "decode of 1 rows"], 3.0)
    return cache


def run(cache: CompileCache, *arguments: str) -> int:
    return main(["--compile-cache-dir", str(cache.root), *arguments])


def test_list_shows_every_entry(cache: CompileCache, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(cache, "list") == 0
    shown = capsys.readouterr().out
    assert all(key in shown for key in cache.entries())
    assert "decode of 1 rows" in shown
    assert run(cache, "list", "--json") == 0
    entries = json.loads(capsys.readouterr().out)
    assert [entry["fields"]["level"] for entry in entries] == [
        cache.read(key).fields["level"]  # type: ignore[union-attr]
        for key in cache.entries()
    ]


def test_an_empty_cache_says_how_to_fill_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    assert main(["--compile-cache-dir", str(tmp_path / "empty"), "list"]) == 0
    assert "triptych compile" in capsys.readouterr().out


def test_verify_finds_damage_and_prune_removes_it(
    cache: CompileCache, capsys: pytest.CaptureFixture[str]
) -> None:
    """Damage makes the exit code 1; pruning keeps intact entries."""
    assert run(cache, "verify") == 0
    damaged, intact = cache.entries()
    (cache.root / damaged / "kernel.py").write_text("changed")
    assert run(cache, "verify") == 1
    assert f"{damaged} damaged" in capsys.readouterr().out
    assert run(cache, "prune") == 0
    assert cache.entries() == [intact]


def test_prune_removes_selected_and_old_entries(
    cache: CompileCache, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = cache.entries()
    assert run(cache, "prune", "--older-than-days", "1") == 0
    assert cache.entries() == [first, second]
    assert run(cache, "prune", "--entry", first) == 0
    assert cache.entries() == [second]
    assert run(cache, "prune", "--entry", "nothing") == 2
    assert "no such entry: nothing" in capsys.readouterr().err
    assert run(cache, "prune", "--older-than-days", "0") == 0
    assert cache.entries() == []


def test_export_copies_intact_entries(
    cache: CompileCache, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damaged, intact = cache.entries()
    (cache.root / damaged / "kernel.py").unlink()
    target = CompileCache(tmp_path / "there")
    assert run(cache, "export", str(target.root)) == 1
    assert f"{damaged} left out" in capsys.readouterr().err
    assert target.entries() == [intact]
    assert target.verify(intact) is not None
    assert run(cache, "export", str(target.root), "--entry", intact) == 0
    assert run(cache, "export", str(target.root), "--entry", "nothing") == 2


def test_a_missing_folder_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One line names the folder; the exit code is 2."""
    assert main(["--compile-cache-dir", str(tmp_path / "none"), "list"]) == 2
    assert "is not a folder" in capsys.readouterr().err


def test_the_key_depends_on_every_field() -> None:
    assert key_of(FIELDS) == key_of(dict(reversed(FIELDS.items())))
    assert len({key_of({**FIELDS, name: "other"}) for name in FIELDS} | {key_of(FIELDS)}) == 1 + len(FIELDS)
