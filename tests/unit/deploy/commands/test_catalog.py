"""`triptych catalog`: lists, verifies, prunes and exports."""

import json
from pathlib import Path

import pytest

from deploy.commands.catalog import main
from worker_svc.graphs.compile_cache import CompileCache, key_of

FIELDS = {"model": "LlamaForCausalLM 12", "dtype": "bfloat16", "level": "2", "device": "cpu: x86_64"}


@pytest.fixture
def cache(tmp_path: Path) -> CompileCache:
    """Two entries."""
    cache = CompileCache(tmp_path / "cache")
    for level in ("2", "3"):
        filling = cache.fill({**FIELDS, "level": level})
        (filling.folder / "kernel.py").write_text(f"level = {level}")
        filling.commit(["prefill of 128 tokens", "decode of 1 rows"], 3.0)
    return cache


def run(cache: CompileCache, *arguments: str) -> int:
    return main(["--compile-cache-dir", str(cache.root), *arguments])


def test_list_shows_every_entry(cache: CompileCache, capsys: pytest.CaptureFixture[str]) -> None:
    """For people and for programs."""
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
    """With the command."""
    (tmp_path / "empty").mkdir()
    assert main(["--compile-cache-dir", str(tmp_path / "empty"), "list"]) == 0
    assert "triptych compile" in capsys.readouterr().out


def test_verify_finds_damage_and_prune_removes_it(
    cache: CompileCache, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 1 for damage; whole entries stay."""
    assert run(cache, "verify") == 0
    damaged, whole = cache.entries()
    (cache.root / damaged / "kernel.py").write_text("changed")
    assert run(cache, "verify") == 1
    assert f"{damaged} damaged" in capsys.readouterr().out
    assert run(cache, "prune") == 0
    assert cache.entries() == [whole]


def test_prune_removes_what_is_named_or_old(cache: CompileCache, capsys: pytest.CaptureFixture[str]) -> None:
    """And says so; a name that is not there is a mistake."""
    first, second = cache.entries()
    assert run(cache, "prune", "--older-than-days", "1") == 0
    assert cache.entries() == [first, second]
    assert run(cache, "prune", "--entry", first) == 0
    assert cache.entries() == [second]
    assert run(cache, "prune", "--entry", "nothing") == 2
    assert "there is no entry nothing" in capsys.readouterr().err
    assert run(cache, "prune", "--older-than-days", "0") == 0
    assert cache.entries() == []


def test_export_copies_whole_entries(
    cache: CompileCache, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All, or those named; damaged ones are left out; twice is once."""
    damaged, whole = cache.entries()
    (cache.root / damaged / "kernel.py").unlink()
    target = CompileCache(tmp_path / "there")
    assert run(cache, "export", str(target.root)) == 1
    assert f"{damaged} left out" in capsys.readouterr().err
    assert target.entries() == [whole]
    assert target.verify(whole) is not None
    assert run(cache, "export", str(target.root), "--entry", whole) == 0
    assert run(cache, "export", str(target.root), "--entry", "nothing") == 2


def test_a_folder_that_is_not_there_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In one line."""
    assert main(["--compile-cache-dir", str(tmp_path / "none"), "list"]) == 2
    assert "there is no folder" in capsys.readouterr().err


def test_the_key_depends_on_every_field() -> None:
    """And not on their order."""
    assert key_of(FIELDS) == key_of(dict(reversed(FIELDS.items())))
    assert len({key_of({**FIELDS, name: "other"}) for name in FIELDS} | {key_of(FIELDS)}) == 1 + len(FIELDS)
