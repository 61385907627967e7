"""Writes the generated pages of docs/ and the list of our variables: ``python -m tests.support.docs``.

``--check`` compares instead, and names each page that is out of date.
"""

import argparse
import difflib
import sys
from collections.abc import Callable
from pathlib import Path

from tests.support.docs.configuration import configuration, own_variables
from tests.support.docs.grpc_api import grpc_api
from tests.support.docs.http_api import http_api
from tests.support.docs.migration import migration
from tests.support.docs.models_page import models
from tests.support.docs.rooms import architecture
from tests.support.paths import ROOT

# The function that makes each file's text.
PAGES: dict[Path, Callable[[], str]] = {
    ROOT / "docs" / "configuration.md": configuration,
    ROOT / "docs" / "api-http.md": http_api,
    ROOT / "docs" / "api-grpc.md": grpc_api,
    ROOT / "docs" / "architecture.md": architecture,
    ROOT / "docs" / "migration.md": migration,
    ROOT / "docs" / "models.md": models,
    ROOT / "protos" / "service" / "variable_names" / "triptych.txt": own_variables,
}


def main(argv: list[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.support.docs", description=__doc__)
    parser.add_argument(
        "--check", action="store_true", help="compare only; exit code 1 if a page is out of date"
    )
    parser.add_argument("pages", nargs="*", help="names of pages; default: all")
    arguments = parser.parse_args(argv)
    stale = []
    for path, make in PAGES.items():
        if arguments.pages and path.name not in arguments.pages:
            continue
        old, new = path.read_text() if path.exists() else "", make()
        if old == new:
            continue
        if arguments.check:
            stale.append(path.name)
            changes = difflib.unified_diff(
                old.splitlines(), new.splitlines(), path.name, path.name, n=0, lineterm=""
            )
            sys.stderr.writelines(f"{line}\n" for line, _ in zip(changes, range(12), strict=False))
        else:
            path.write_text(new)
    if stale:
        print(f"docs out of date: {', '.join(stale)}; run `make docs`", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
