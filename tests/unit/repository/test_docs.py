"""The pages name files, commands and links that exist, and have no placeholders."""

import re
from functools import cache
from pathlib import Path

import pytest

from tests.support.docs import __main__ as generated
from tests.support.docs.pages import anchor
from tests.support.paths import ROOT

PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    ROOT / "tests" / "README.md",
    ROOT / "examples" / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
FOLDERS = (
    "protos",
    "scheduler_svc",
    "worker_svc",
    "gateway",
    "deploy",
    "tests",
    "docs",
    "examples",
    ".ci",
    ".github",
)

# Extensions of the files that a page may name; a bare name with another one (`config.json`) is a user's file.
SOURCES = ("py", "proto", "md", "svg", "cpp", "h", "yaml", "Dockerfile")
NAMED = re.compile(rf"^[\w.*-]+(?:/[\w.*-]+)*\.(?:{'|'.join(SOURCES)})$")
TEST = re.compile(r"`([\w/.-]+\.py)::(\w+)`")
FOLDER = re.compile(rf"^(?:{'|'.join(map(re.escape, FOLDERS))})(?:/[\w.*-]+)*/?$")


def pages() -> pytest.MarkDecorator:
    return pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


@cache
def every_file() -> tuple[str, ...]:
    """Paths of all first-party files and folders, from the repository's root."""
    found = [
        path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if "__pycache__" not in path.parts
    ]
    return tuple(str(path.relative_to(ROOT)) for path in (*found, *ROOT.iterdir()))


def exists(name: str) -> bool:
    """Whether a name means a file: a path from the root, or the end of one (`kv/cache.py`, `cache.py`)."""
    name = name.rstrip("/")
    if "*" in name:
        return any(Path(path).match(name) for path in every_file())
    return any(path == name or path.endswith(f"/{name}") for path in every_file())


@cache
def text_of(page: Path) -> str:
    return page.read_text()


def prose_of(page: Path) -> str:
    return re.sub(r"^```.*?^```", "", text_of(page), flags=re.MULTILINE | re.DOTALL)


def anchors_of(page: Path) -> set[str]:
    return {anchor(heading) for heading in re.findall(r"^#+ (.+)$", prose_of(page), re.MULTILINE)}


@pages()
def test_a_page_has_no_placeholders(page: Path) -> None:
    assert re.findall(r"@[A-Z]+@|TODO|FIXME|TBD", text_of(page)) == []


@pages()
def test_the_files_that_a_page_names_exist(page: Path) -> None:
    """A page names files by full path, end of path or bare name, and folders by their path from the root."""
    quoted = {word.partition(":")[0] for word in re.findall(r"`([^`\n]+)`", prose_of(page))}
    named = {word for word in quoted if NAMED.match(word) or FOLDER.match(word)}
    assert [name for name in sorted(named) if not exists(name)] == []


@pages()
def test_the_tests_that_a_page_names_exist(page: Path) -> None:
    for name, test in TEST.findall(page.read_text()):
        (file,) = (ROOT / path for path in every_file() if path.endswith(f"/{name}"))
        assert f"def {test}(" in file.read_text(), f"{page.name} names {name}::{test}"


@pages()
def test_the_links_of_a_page_resolve(page: Path) -> None:
    """A relative link names a file, and its anchor a heading of that file."""
    broken = []
    for target in re.findall(r"(?:\]\(|src=\"|srcset=\")([^)\"\s]+)", prose_of(page)):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, mark = target.partition("#")
        file = page.parent / name if name else page
        if not file.exists() or (mark and mark not in anchors_of(file)):
            broken.append(target)
    assert broken == []


@pages()
def test_the_make_targets_that_a_page_names_exist(page: Path) -> None:
    """Each `make` target in prose and in code blocks is in the Makefile."""
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"(?:`|^|&& )make ([a-z-]+)", text_of(page), re.MULTILINE))
    assert named - targets == set()


@pages()
def test_the_modules_that_a_page_runs_exist(page: Path) -> None:
    """Each `python -m` with a module of ours names a module or a package with a `__main__.py`."""
    named = re.findall(rf"python -m ((?:{'|'.join(FOLDERS[:6])})[\w.]*)", text_of(page))
    places = {module: ROOT / module.rstrip(".").replace(".", "/") for module in named}
    missing = [
        module
        for module, place in places.items()
        if not place.with_suffix(".py").exists() and not (place / "__main__.py").exists()
    ]
    assert missing == []


def test_every_page_is_in_the_index() -> None:
    linked = set(re.findall(r"\]\(([\w-]+\.md)", text_of(ROOT / "docs" / "README.md")))
    assert {page.name for page in PAGES if page.parent.name == "docs"} - linked == {"README.md"}


def test_a_term_is_in_the_glossary_once() -> None:
    terms = re.findall(r"^\| \*\*(.+?)\*\*", text_of(ROOT / "docs" / "glossary.md"), re.MULTILINE)
    assert len(terms) > 20
    assert len(set(terms)) == len(terms)


def test_a_stale_page_fails_the_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The check names the page and shows a line that differs; writing it makes the check pass."""
    page = tmp_path / "page.md"
    page.write_text("old\n")
    monkeypatch.setattr(generated, "PAGES", {page: lambda: "new\n"})
    assert generated.main(["--check"]) == 1
    assert "+new" in (text := capsys.readouterr().err)
    assert "docs out of date: page.md" in text
    assert page.read_text() == "old\n"
    assert generated.main([]) == 0
    assert generated.main(["--check"]) == 0
