"""A comparison of a graph with its model is made once, not at every start."""

from pathlib import Path

import pytest

from worker_svc.graphs.compile_cache import VerificationCache

FIELDS = {"model": "a", "version:torch": "2"}
SIGNATURES = frozenset({"decode of 1 rows", "prefill of 128 tokens"})


def test_checked_graphs_are_remembered_for_the_same_fields(tmp_path: Path) -> None:
    """Another process finds them, with equal fields only."""
    assert VerificationCache(tmp_path, FIELDS).read() == frozenset()
    VerificationCache(tmp_path, FIELDS).write(SIGNATURES)
    assert VerificationCache(tmp_path, FIELDS).read() == SIGNATURES
    assert VerificationCache(tmp_path, {**FIELDS, "version:torch": "3"}).read() == frozenset()


def test_nothing_is_remembered_without_a_compile_cache() -> None:
    """Without a folder, every start compares its graphs."""
    graphs = VerificationCache(None, FIELDS)
    graphs.write(SIGNATURES)
    assert graphs.read() == frozenset()


@pytest.mark.parametrize("content", ["", "{", "5", '{"a": 1}', "\xff"])
def test_a_damaged_file_counts_as_missing(tmp_path: Path, content: str) -> None:
    """The graphs are compared again, and the file is written anew."""
    graphs = VerificationCache(tmp_path, FIELDS)
    graphs.write(SIGNATURES)
    (file,) = (tmp_path / "checked").iterdir()
    file.write_text(content, encoding="latin-1")
    assert graphs.read() == frozenset()
    graphs.write(SIGNATURES)
    assert graphs.read() == SIGNATURES


def test_a_cache_that_cannot_be_written_costs_nothing_but_time(tmp_path: Path) -> None:
    """The start goes on, and leaves no file behind."""
    (tmp_path / "checked").write_text("not a folder")
    graphs = VerificationCache(tmp_path, FIELDS)
    graphs.write(SIGNATURES)
    assert graphs.read() == frozenset()
