"""The documents speak of files that exist and have no holes."""

import re

import pytest

from tests.support.paths import ROOT

DOCUMENTS = [
    "README.md", "CONTRIBUTING.md", "CHANGELOG.md",
    "docs/architecture.md", "docs/benchmarks.md", "docs/kv-events.md", "docs/metrics.md", "docs/scheduling.md",
    "docs/graphs.md", "docs/sampling.md", "docs/structured-output.md", "docs/tools.md",
]  # fmt: skip


@pytest.mark.parametrize("name", DOCUMENTS)
def test_a_document_has_no_placeholders(name: str) -> None:
    """Every figure was filled in."""
    assert re.findall(r"@[A-Z]+@|TODO|FIXME", (ROOT / name).read_text()) == []


def test_the_files_that_the_architecture_names_exist() -> None:
    """The walk through the files can be walked."""
    text = (ROOT / "docs" / "architecture.md").read_text()
    paths = set(re.findall(r"`((?:protos|scheduler_svc|worker_svc|gateway|deploy|tests)/[\w./]+)`", text))
    assert len(paths) > 10
    assert [path for path in sorted(paths) if not (ROOT / path).exists()] == []


def test_the_benches_that_the_documents_quote_exist() -> None:
    """A figure comes from a command in the repository."""
    texts = [(ROOT / name).read_text() for name in DOCUMENTS]
    quoted = {bench for text in texts for bench in re.findall(r"python -m tests\.bench\.(\w+)", text)}
    assert quoted
    assert all((ROOT / "tests" / "bench" / f"{bench}.py").exists() for bench in quoted)
