"""Makes the tables of docs/migration.md from the tables of flags and of variables."""

from collections.abc import Iterable, Sequence

from deploy.vllm_flags.flag import VllmFlag
from deploy.vllm_flags.older import OLDER
from deploy.vllm_flags.rbln import RBLN
from deploy.vllm_flags.table import FLAGS
from gateway.routes.operations.unserved import UNSERVED
from protos.environment.table import STACKS
from protos.environment.variable import Kind, Variable
from tests.support.docs.pages import table, with_region
from tests.support.paths import ROOT

PAGE = ROOT / "docs" / "migration.md"

_REFUSED = {"on": "refused if it is on", "off": "refused if it is off"}


def migration() -> str:
    """Returns the page with new tables."""
    text = PAGE.read_text()
    regions = {
        "taken flags": _taken(FLAGS),
        "refused flags": _refused(FLAGS),
        "moot flags": _moot(FLAGS),
        "flags of vLLM-RBLN": [*_taken(RBLN), *_refused(RBLN), *_moot(RBLN)],
        "flags of earlier releases": [*_taken(OLDER), *_refused(OLDER), *_moot(OLDER)],
        "unserved routes": _routes(),
        **{f"variables of {stack}": _variables(rows) for stack, rows in STACKS.items()},
    }
    for name, lines in regions.items():
        text = with_region(text, name, "\n".join(lines))
    return text


def _taken(flags: Iterable[VllmFlag]) -> list[str]:
    """Returns the table of flags that set something."""
    rows = [
        (
            _names(flag),
            f"`{flag.ours}`",
            _sentence(f"it {flag.reason}" if flag.kind == "mapped" else flag.reason),
        )
        for flag in flags
        if flag.kind in {"alias", "mapped"}
    ]
    return table(("flag", "here", "what differs"), rows)


def _refused(flags: Iterable[VllmFlag]) -> list[str]:
    """Returns the table of refused flags; those with one reason share a row."""
    groups: dict[tuple[str, tuple[str, ...]], list[VllmFlag]] = {}
    for flag in flags:
        if flag.kind == "refused":
            groups.setdefault((flag.reason, flag.harmless), []).append(flag)
    rows = [
        (
            _several(group),
            f"It {reason}",
            ", ".join(f"`{value}`" if value else "empty" for value in harmless),
        )
        for (reason, harmless), group in groups.items()
    ]
    return table(("refused flag", "why, and what to do", "accepted values"), rows)


def _moot(flags: Iterable[VllmFlag]) -> list[str]:
    """Returns the table of flags without effect; those with one reason share a row."""
    groups: dict[str, list[VllmFlag]] = {}
    for flag in flags:
        if flag.kind == "moot":
            groups.setdefault(flag.reason, []).append(flag)
    return table(
        ("flag without effect", "why"),
        [(_several(group), _sentence(reason)) for reason, group in groups.items()],
    )


def _routes() -> list[str]:
    """Returns the table of vLLM's routes that are not served; those with one reason share a row."""
    groups: dict[str, list[str]] = {}
    for path, reason in UNSERVED.items():
        groups.setdefault(reason, []).append(f"`{path}`")
    rows = [("<br>".join(paths), _sentence(reason)) for reason, paths in groups.items()]
    return table(("route that is not served", "why, and what to do"), rows)


def _variables(rows: Sequence[Variable]) -> list[str]:
    """Returns the table of a stack's variables; those with one meaning share a row."""
    groups: dict[tuple[Kind, str, str, str], list[str]] = {}
    for row in rows:
        groups.setdefault((row.kind, row.ours, row.refused, row.reason), []).append(row.name)
    order = list(Kind)
    lines = [
        ("<br>".join(f"`{name}`" for name in names), _effect(kind, ours, refused), _sentence(reason))
        for (kind, ours, refused, reason), names in sorted(
            groups.items(), key=lambda item: (order.index(item[0][0]), not item[0][2])
        )
    ]
    return table(("variable", "here", "why, or what differs"), lines)


def _effect(kind: Kind, ours: str, refused: str) -> str:
    if kind is Kind.MAPPED:
        return f"sets `{ours}`"
    words = {Kind.HONOURED: "honoured", Kind.MOOT: "no effect", Kind.REFUSED: "refused"}
    return "; ".join([*([] if refused == "on" else [words[kind]]), *([_REFUSED[refused]] if refused else [])])


def _several(flags: Iterable[VllmFlag]) -> str:
    return "<br>".join(map(_names, flags))


def _names(flag: VllmFlag) -> str:
    return ", ".join(f"`{name}`" for name in (flag.name, *flag.short))


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:] if not text.startswith(("vLLM", "sendnn", "`")) else text
