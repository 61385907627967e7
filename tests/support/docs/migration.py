"""Makes the tables of docs/migration.md from the tables of flags and of variables."""

from collections.abc import Iterable

from deploy.vllm_flags.translate import FLAGS, Flag
from gateway.operations.routes import UNSERVED
from protos.service.environment import VARIABLES, Kind, Variable
from tests.support.docs.pages import table, with_region
from tests.support.paths import ROOT

PAGE = ROOT / "docs" / "migration.md"


def migration() -> str:
    """Returns the page with new tables."""
    text = PAGE.read_text()
    regions = {
        "native flags": _list(_names(flag) for flag in FLAGS.values() if flag.kind == "native"),
        "mapped flags": _mapped_flags(),
        "rejected flags": _rejected_flags(),
        "mapped variables": _variables(Kind.MAPPED),
        "native variables": _variables(Kind.NATIVE),
        "rejected variables": _variables(Kind.REJECTED),
        "unserved routes": _routes(),
    }
    for name, lines in regions.items():
        text = with_region(text, name, "\n".join(lines))
    return text


def _list(names: Iterable[str]) -> list[str]:
    return [", ".join(names)]


def _mapped_flags() -> list[str]:
    rows = [
        (_names(flag), f"`{flag.ours}`", f"It {flag.note}" if flag.note else "")
        for flag in FLAGS.values()
        if flag.kind == "mapped"
    ]
    return table(("flag", "here", "difference"), rows)


def _rejected_flags() -> list[str]:
    """Returns the table of rejected flags; those with one reason share a row."""
    groups: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for flag in FLAGS.values():
        if flag.kind == "rejected":
            groups.setdefault((flag.note, flag.accepts), []).append(_names(flag))
    rows = [
        ("<br>".join(names), f"It {note}", ", ".join(f"`{value}`" if value else "empty" for value in accepts))
        for (note, accepts), names in groups.items()
    ]
    return table(("rejected flag", "reason and advice", "accepted values"), rows)


def _variables(kind: Kind) -> list[str]:
    """Returns the table of one kind of variables; those with one meaning share a row."""
    groups: dict[Variable, list[str]] = {}
    for name, variable in VARIABLES.items():
        if variable.kind is kind:
            groups.setdefault(variable, []).append(f"`{name}`")
    heads = {Kind.MAPPED: ("variable", "sets", "note"), Kind.REJECTED: ("variable", "if it is", "note")}
    rows = [
        ("<br>".join(names), f"`{row.flag}`" if row.flag else row.when or "set", _sentence(row.note))
        for row, names in groups.items()
    ]
    if kind in heads:
        return table(heads[kind], rows)
    return table(("variable", "note"), [(names, note) for names, _, note in rows])


def _routes() -> list[str]:
    """Returns the table of vLLM's routes that are not served; those with one reason share a row."""
    groups: dict[str, list[str]] = {}
    for path, reason in UNSERVED.items():
        groups.setdefault(reason, []).append(f"`{path}`")
    rows = [("<br>".join(paths), _sentence(reason)) for reason, paths in groups.items()]
    return table(("route that is not served", "reason and advice"), rows)


def _names(flag: Flag) -> str:
    return ", ".join(f"`{name}`" for name in (flag.name, *flag.short))


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:] if not text.startswith(("vLLM", "sendnn", "`")) else text
