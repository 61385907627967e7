"""Commands in the Makefile and in strings of the code name modules that exist; no type checker sees them."""

import re

import pytest

from tests.support.paths import ROOT

FOLDERS = ("deploy", "gateway", "protos", "scheduler_svc", "worker_svc", "tests")
# `-m deploy.cli` in a command line, `"-m", "deploy.cli"` in a list of arguments.
RUN = re.compile(rf'-m(?: |", ?")((?:{"|".join(FOLDERS)})(?:\.\w+)*)\b')
SOURCES = [ROOT / "Makefile", *(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))]
MODULES = sorted({module for source in SOURCES for module in RUN.findall(source.read_text())})


@pytest.mark.parametrize("module", MODULES)
def test_a_module_that_a_command_runs_exists(module: str) -> None:
    """The name is that of a module, or of a package with a `__main__.py`."""
    place = ROOT / module.replace(".", "/")
    assert place.with_suffix(".py").exists() or (place / "__main__.py").exists()


def test_the_commands_are_found() -> None:
    assert {"deploy.cli", "worker_svc.grammars.compile_server"} <= set(MODULES)
