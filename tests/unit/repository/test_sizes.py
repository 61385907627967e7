"""Functions are short, each package says what lives in it, and tests lie where make runs them."""

import ast
from pathlib import Path

import pytest

from tests.support.paths import PACKAGES, ROOT, sources

FUNCTION_LINES = 60
# A kernel cannot call functions of its own, so it is long.
KERNELS = {"attend_kernel"}


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_functions_are_short() -> None:
    """A product function has at most 60 lines, so that it fits on a screen."""
    long = {
        f"{relative(path)}: {node.name}": node.end_lineno - node.lineno + 1
        for path in sources(*PACKAGES)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.end_lineno is not None
        and node.end_lineno - node.lineno + 1 > FUNCTION_LINES
        and node.name not in KERNELS
    }
    assert long == {}


@pytest.mark.parametrize("package", PACKAGES)
def test_each_package_says_what_lives_in_it(package: str) -> None:
    """Each package has a docstring of three lines or more: its contents, its importers and its imports."""
    undescribed = []
    for path in sources(package):
        if path.name == "__init__.py" and "triptych" not in path.parts[-3:]:
            docstring = ast.get_docstring(ast.parse(path.read_text())) or ""
            if len(docstring.splitlines()) < 3:
                undescribed.append(relative(path))
    assert undescribed == []


def test_tests_of_stacks_lie_together() -> None:
    """`make test` looks for tests with the mark `stack` in a single folder."""
    stray = [
        relative(path)
        for path in (ROOT / "tests").rglob("test_*.py")
        if "mark.stack" in path.read_text() and "tests/e2e/stack" not in relative(path)
    ]
    assert stray == [relative(Path(__file__))]
