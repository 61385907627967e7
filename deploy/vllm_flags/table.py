"""The table of all flags of vLLM's."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib.resources import files
from typing import Any, Final, Literal

from deploy.launcher.settings import LaunchSettings

Kind = Literal["native", "mapped", "rejected", "ignored"]
"""native: our flag of the same name and meaning. mapped: another name or meaning of ours. rejected: ignoring
the flag would change answers. ignored: without effect."""


@dataclass(frozen=True)
class Flag:
    """A flag of vLLM's."""

    name: str
    """With its dashes, as in `vllm serve --help=all`."""
    form: Literal["value", "values", "switch"]
    """A value, several values, or none, as for a flag with a `--no-` form."""
    short: tuple[str, ...] = ()
    """Other names of the flag."""
    kind: Kind = "ignored"
    ours: str = ""
    """Our flag, which for a switch may include its value."""
    note: str = ""
    """The end of a sentence that starts with the flag."""
    always: bool = False
    """Whether the note is said even if the value stays as it is."""
    values: Mapping[str, str] = field(default_factory=dict)
    """Words with another spelling here."""
    read: str = ""
    """How other values are converted."""
    accepts: tuple[str, ...] = ()
    """Values of a rejected flag for the only behaviour there is."""

    @property
    def meaning(self) -> str:
        """The end of a sentence that starts with the flag."""
        if self.kind == "ignored":
            return "has no effect here"
        if self.kind == "rejected":
            return self.note
        return f"is {self.ours} here" + (f": it {self.note}" if self.note else "")


def names(peer: str) -> list[str]:
    """Returns the lines of a list: `vllm`, for example."""
    text = (files("deploy.vllm_flags") / "names" / f"{peer}.txt").read_text()
    return [line for line in text.splitlines() if not line.startswith("#")]


def _listed(line: str) -> Flag:
    """Reads a line such as `--api-key VALUE...`."""
    words = line.split()
    if words[-1] == "VALUE":
        return Flag(words[0], "value", tuple(words[1:-1]))
    if words[-1] == "VALUE...":
        return Flag(words[0], "values", tuple(words[1:-1]))
    return Flag(words[0], "switch", tuple(words[1:]))


def _table() -> dict[str, Flag]:
    flags = {flag.name: flag for peer in ("vllm", "vllm-rbln", "older") for flag in map(_listed, names(peer))}
    for setting in (*LaunchSettings.model_fields, "config"):
        if (name := f"--{setting.replace('_', '-')}") in flags:
            flags[name] = replace(flags[name], kind="native", ours=name)
    data: dict[str, Any] = tomllib.loads((files("deploy.vllm_flags") / "flags.toml").read_text())
    for row in data["mapped"]:
        name, ours = row.pop("name"), row.pop("flag")
        flags[name] = replace(flags[name], kind="mapped", ours=ours, **row)
    for row in data["rejected"]:
        for name in row["names"]:
            accepts = tuple(row.get("accepts", ()))
            flags[name] = replace(flags[name], kind="rejected", ours="", note=row["note"], accepts=accepts)
    return flags


FLAGS: Final[Mapping[str, Flag]] = _table()
"""Every flag, under its long name."""
BY_NAME: Final[Mapping[str, Flag]] = {
    name: flag for flag in FLAGS.values() for name in (flag.name, *flag.short)
}
"""Every flag, under all of its names."""
