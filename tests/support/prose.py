"""Counts words that mark translated prose: ``python -m tests.support.prose``, a part of ``make check``.

Plain English has a noun ("unread output") where translated prose has a clause ("what waits for clients").
The counts are per 1,000 words, over the docstrings of the product and the hand-written pages of docs/. The
aims are a little above the counts of httpx, starlette, temporal, structlog, attrs and vLLM's core.
"""

import argparse
import ast
import itertools
import re
import sys
from collections.abc import Iterable, Iterator

from tests.support.paths import ROOT

SERVICES = ("deploy", "gateway", "protos", "scheduler_svc", "worker_svc")
AIMS = {"what": 1.5, "that": 14.0, "has|have": 5.0, "one|ones": 4.0, "behind|beside": 0.3}
GENERATED_PAGES = ("api-", "configuration")
# Rooms whose code is rewritten next; their prose is counted with it.
NOT_YET = (
    *(f"scheduler_svc/{room}" for room in ("policy", "replica", "workers")),
    "worker_svc/api",
    "worker_svc/execution",
)


def docstrings(source: str) -> Iterator[str]:
    """Yields the docstrings of modules, classes and functions, and the strings below attributes."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module) and (
            text := ast.get_docstring(node)
        ):
            yield text
        body = getattr(node, "body", None)
        for above, below in itertools.pairwise(body) if isinstance(body, list) else ():
            match above, below:
                case ast.Assign() | ast.AnnAssign(), ast.Expr(ast.Constant(str() as text)):
                    yield text


def rates(texts: Iterable[str]) -> tuple[int, dict[str, float]]:
    """The number of words, and how often each marker occurs in 1,000 of them."""
    text = "\n".join(texts)
    words = len(text.split())
    found = {marker: len(re.findall(rf"\b({marker})\b", text, re.IGNORECASE)) for marker in AIMS}
    return words, {marker: 1000 * count / max(words, 1) for marker, count in found.items()}


def rooms() -> dict[str, list[str]]:
    """The docstrings of each room; a service's own files count as a room of its name."""
    found: dict[str, list[str]] = {}
    for service in SERVICES:
        for path in sorted((ROOT / service).rglob("*.py")):
            if "_pb2" not in path.name:
                name = "/".join(path.relative_to(ROOT).parent.parts[:2])
                found.setdefault(name, []).extend(docstrings(path.read_text(encoding="utf-8")))
    return found


def pages() -> Iterator[str]:
    """Yields the pages of docs/ without their code."""
    for path in (ROOT / "docs").glob("*.md"):
        if not path.name.startswith(GENERATED_PAGES):
            yield re.sub(r"```.*?```|`[^`]*`", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)


def main(argv: list[str] | None = None) -> int:
    """Prints the counts; returns 1 if one is above its aim."""
    parser = argparse.ArgumentParser(prog="python -m tests.support.prose", description=__doc__)
    parser.add_argument("--rooms", action="store_true", help="print the counts of each room")
    arguments = parser.parse_args(argv)
    by_room = rooms()
    counts = {
        "docstrings": rates(text for room, texts in by_room.items() if room not in NOT_YET for text in texts),
        "docs": rates(pages()),
    }
    shown = {room: rates(texts) for room, texts in by_room.items()} if arguments.rooms else {}
    for name, (words, found) in {**shown, **counts}.items():
        print(f"{name:32}{words:7}  " + "  ".join(f"{marker} {rate:.2f}" for marker, rate in found.items()))
    over = [
        f"{name}: {marker} {rate:.2f}, aim {AIMS[marker]}"
        for name, (_, found) in counts.items()
        for marker, rate in found.items()
        if rate > AIMS[marker]
    ]
    for line in over:
        print(line, file=sys.stderr)
    return int(bool(over))


if __name__ == "__main__":
    sys.exit(main())
