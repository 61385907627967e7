"""The table of all flags of `vllm serve`, and the translation of its command lines into our flags."""

import contextlib
import json
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.resources import files
from typing import Any, Final, Literal

from deploy.launcher.settings import LaunchSettings
from protos.errors import ConfigurationRefused
from worker_svc.vllm_settings import literal

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


_COUNT: Final = re.compile(r"(\d+(?:\.\d+)?)([kKmMgGtT]?)")
_PLACES: Final = "kmgt"
_COMPILATION_KEYS: Final = {
    "level": "level",
    "mode": "level",
    "compile_sizes": "candidate_compile_sizes",
    "candidate_compile_sizes": "candidate_compile_sizes",
}
# vLLM's modes of compilation, whose numbers are levels.
_MODES: Final = ("NONE", "STOCK_TORCH_COMPILE", "DYNAMO_TRACE_ONCE", "VLLM_COMPILE")


def convert(flag: Flag, text: str) -> list[str]:
    """Returns our arguments for a value of a mapped flag.

    Raises:
        ValueError: The value cannot be used. The message completes "--flag …".
    """
    word = flag.values.get(text.strip().lower())
    if word is not None:
        return [f"{flag.ours}={word}"] if word else []
    if flag.read == "words":
        *first, last = flag.values
        raise ValueError(f"should be {', '.join(first)} or {last}")
    return _READ[flag.read](flag.ours, text) if flag.read else [f"{flag.ours}={text}"]


def number(text: str) -> int:
    """Returns a number as vLLM reads it: lower-case suffixes are powers of 1000, upper-case of 1024.

    Raises:
        ValueError: The text is not such a number.
    """
    match = _COUNT.fullmatch(text.strip())
    if match is None:
        raise ValueError("should be a number, for example 8192, 8k (8000) or 8K (8192)")
    digits, suffix = match.groups()
    if suffix.islower():
        return int(float(digits) * 1000 ** (_PLACES.index(suffix) + 1))
    if not digits.isdecimal():
        raise ValueError("should be a whole number")
    return int(digits) * (1024 ** (_PLACES.index(suffix.lower()) + 1) if suffix else 1)


def _optimization_level(ours: str, text: str) -> list[str]:
    """Converts `-O`, which once took the whole compilation configuration."""
    if not text.lstrip().startswith("{") or _is_ours(_literal(text)):
        return [f"{ours}={text}"]
    return _compilation_config("--compilation-config", text)


def _compilation_config(ours: str, text: str) -> list[str]:
    """Converts the compilation configuration; keys about vLLM's own compiler have no effect."""
    read: Any = _literal(text)
    if not isinstance(read, dict) or _is_ours(read):
        return [f"{ours}={text}"]
    if unknown := [name for name in read if name not in {*_COMPILATION_KEYS, *names("compilation-keys")}]:
        raise ValueError(f"has no key {unknown[0]!r}; level and candidate_compile_sizes have an effect here")
    kept = {key: read[name] for name, key in _COMPILATION_KEYS.items() if read.get(name) is not None}
    if isinstance(level := kept.get("level"), str):
        if level.upper() not in _MODES:
            raise ValueError(f"should have a mode of {', '.join(_MODES)}")
        kept["level"] = _MODES.index(level.upper())
    return [f"{ours}={json.dumps(kept)}"] if kept else []


def _is_ours(read: object) -> bool:
    """Returns whether all keys of a compilation configuration are ours."""
    return isinstance(read, dict) and read.keys() <= {"level", "candidate_compile_sizes"}


def _literal(text: str) -> object:
    with contextlib.suppress(ValueError):
        return literal(text)
    return None


_READ: Final[Mapping[str, Callable[[str, str], list[str]]]] = {
    "count": lambda ours, text: [f"{ours}={number(text)}"],
    "GiB": lambda ours, text: [f"{ours}={number(text) / 2**30:.6g}"],
    "lower": lambda ours, text: [f"{ours}={text.lower()}"],
    "optimization_level": _optimization_level,
    "compilation_config": _compilation_config,
}


_LEVEL: Final = "-O"


class VllmFlags:
    """Translates flags of vLLM's, and keeps a line for each flag without its usual effect."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        """A line for each flag without effect or with another meaning."""

    @property
    def flags(self) -> Mapping[str, str]:
        """Every flag, without the short forms, and its meaning here."""
        return {name: flag.meaning for name, flag in FLAGS.items()}

    def translate(self, argv: Sequence[str]) -> list[str]:
        """Returns our flags for a command line; arguments unknown to vLLM stay.

        Raises:
            ConfigurationRefused: A flag is rejected, lacks its value, or has an unusable value.
        """
        translated: list[str] = []
        model = _model(argv)
        dotted: dict[str, Any] = {}
        rest = list(argv)
        while rest:
            name, equals, value = _name(rest.pop(0))
            base, dot, path = name.partition(".")
            if dot and base in BY_NAME:
                _put(dotted.setdefault(BY_NAME[base].name, {}), path, value if equals else _next(base, rest))
                continue
            flag, on = _row(name)
            if flag is None:
                translated.append(f"{name}{equals}{value}")
            elif flag.form == "switch":
                if equals:
                    raise ConfigurationRefused(
                        f"{name} takes no value, got {value!r}; {name} or --no-{name[2:]} is the value"
                    )
                translated += self._one(flag, name if on else f"--{name[5:]}", [], model, on=on)
            elif equals or flag.form == "value":
                translated += self._one(flag, name, [value if equals else _next(name, rest)], model)
            else:
                translated += self._one(flag, name, list(_values(name, rest)), model)
        for base, keys in dotted.items():
            translated += self._one(BY_NAME[base], base, [json.dumps(keys)], model)
        return translated

    def written(self, flag: str, value: Any) -> list[str]:
        """Returns the arguments for a flag with a value of a configuration file."""
        match value:
            case bool():
                return [flag if value else f"--no-{flag[2:]}"]
            case list() if FLAGS[flag].form == "values":
                words = [json.dumps(each) if isinstance(each, dict) else str(each) for each in value]
                return [flag, *words] if words else []
            case list() | dict():
                return [f"{flag}={json.dumps(value)}"]
            case _:
                return [f"{flag}={value}"]

    def _one(
        self, flag: Flag, written: str, values: Sequence[str], model: str | None, *, on: bool = True
    ) -> list[str]:
        """Returns our arguments for a flag with its name and values; `on` is false for a `--no-` form."""
        match flag.kind:
            case "ignored":
                self.notes.append(f"{written} has no effect here")
                return []
            case "rejected":
                accepted = [model if value == "MODEL" else value for value in flag.accepts]
                if on and not (values and all(value in accepted for value in values)):
                    raise ConfigurationRefused(f"{written} {flag.note}")
                return []
            case "native" if flag.form == "values":
                return [flag.ours, *values]
            case _ if flag.form == "switch":
                return self._switch(flag, written, on=on)
            case "native":
                return [f"{flag.ours}={values[0]}"]
            case _:
                return self._convert(flag, written, values[0])

    def _switch(self, flag: Flag, written: str, *, on: bool) -> list[str]:
        if on and flag.note:
            self.notes.append(f"{written} is {flag.ours} here: it {flag.note}")
        if on:
            return [flag.ours]
        return [] if "=" in flag.ours else [f"--no-{flag.ours[2:]}"]

    def _convert(self, flag: Flag, written: str, value: str) -> list[str]:
        try:
            ours = convert(flag, value)
        except ValueError as error:
            raise ConfigurationRefused(f"{written} {error}, got {value!r}") from error
        if ours == [f"{flag.name}={value}"]:
            self.notes += [f"{written} {value}: here it {flag.note}"] if flag.always else []
        elif flag.note:
            result = f"is {' '.join(ours)} here" if ours else "has no effect here"
            self.notes.append(f"{written} {value} {result}: it {flag.note}")
        return ours


def _model(argv: Sequence[str]) -> str | None:
    """Returns the model where vLLM expects it: before the flags, or after `--model`."""
    if argv and not argv[0].startswith("-"):
        return argv[0]
    for place, argument in enumerate(argv):
        if argument.startswith("--model="):
            return argument.partition("=")[2]
        if argument == "--model":
            return next(iter(argv[place + 1 :]), None)
    return None


def _name(argument: str) -> tuple[str, str, str]:
    """Splits an argument into a flag's name, "=" and value. Names may be written with underscores."""
    if argument.startswith(f"{_LEVEL}."):  # keys of the configuration that -O once took
        argument = f"-cc{argument[len(_LEVEL) :]}"
    if argument.startswith(_LEVEL) and argument != _LEVEL:
        return "--optimization-level", "=", argument[len(_LEVEL) :].removeprefix("=")
    if not argument.startswith("-"):
        return argument, "", ""
    name, equals, value = argument.partition("=")
    if not name.startswith("--"):
        return ("--optimization-level" if name == _LEVEL else name), equals, value
    base, dot, path = name.partition(".")
    return base.replace("_", "-") + dot + path, equals, value


def _row(name: str) -> tuple[Flag | None, bool]:
    """Returns a flag's row, and whether the flag is not the `--no-` form of a switch."""
    if name in BY_NAME:
        return BY_NAME[name], True
    flag = BY_NAME.get(f"--{name.removeprefix('--no-')}") if name.startswith("--no-") else None
    return (flag, False) if flag is not None and flag.form == "switch" else (None, True)


def _next(name: str, rest: list[str]) -> str:
    if not rest or (rest[0].startswith("--") and len(rest[0]) > len("--")):
        raise ConfigurationRefused(f"{name} expects a value")
    return rest.pop(0)


def _values(name: str, rest: list[str]) -> Iterator[str]:
    yield _next(name, rest)
    while rest and not rest[0].startswith("-"):
        yield rest.pop(0)


def _put(keys: dict[str, Any], path: str, text: str) -> None:
    """Sets a nested key, as in `--compilation-config.level 3`; a key with + at its end takes a list."""
    *parents, last = path.removesuffix("+").split(".")
    for parent in parents:
        keys = keys.setdefault(parent, {})
    if path.endswith("+"):
        keys.setdefault(last, []).extend(_value(part) for part in text.split(","))
    else:
        keys[last] = _value(text)


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
