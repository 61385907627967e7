"""Turns a command line for `vllm serve` into one for our launcher."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from deploy.vllm_flags.flag import VllmFlag
from deploy.vllm_flags.model import TOKENIZER
from deploy.vllm_flags.table import BY_NAME
from protos.errors import ConfigurationRefused

_LEVEL = "-O"


@dataclass
class Translation:
    """A command line in our flags."""

    argv: list[str] = field(default_factory=list)
    """Our flags. Arguments that vLLM does not know stay as they are."""
    notes: list[str] = field(default_factory=list)
    """A line for each flag that has no effect or another meaning."""
    model: str | None = None
    """The model that the command line names."""

    def add(self, flag: VllmFlag, written: str, values: Sequence[str], *, on: bool = True) -> None:
        """Adds one flag of vLLM's.

        Args:
            flag: its row.
            written: its name as the user wrote it, without `no-`.
            values: what follows it.
            on: false for the `--no-` form of a switch.

        Raises:
            ConfigurationRefused: The flag is refused, or its value.
        """
        match flag.kind:
            case "moot":
                self.notes.append(f"{written} has no effect: {flag.reason}")
            case "refused":
                harmless = (*flag.harmless, self.model) if flag.name == TOKENIZER else flag.harmless
                if on and not (values and all(value in harmless for value in values)):
                    raise ConfigurationRefused(f"{written} {flag.reason}")
            case "alias" if flag.form == "switch":
                self.argv.append(flag.ours if on else f"--no-{flag.ours[2:]}")
            case "alias" if flag.form == "value":
                self.argv.append(f"{flag.ours}={values[0]}")
            case "alias":
                self.argv += [flag.ours, *values]
            case "mapped":
                self._convert(flag, written, (values[0] if values else "1") if on else "")

    def _convert(self, flag: VllmFlag, written: str, value: str) -> None:
        assert flag.convert is not None
        try:
            ours = flag.convert(value)
        except ValueError as error:
            raise ConfigurationRefused(f"{written} {error}, got {value!r}") from error
        self.argv += ours
        given = f"{written} {value}" if flag.form == "value" else written
        if ours == [f"{flag.name}={value}"]:
            self.notes += [f"{given}: here it {flag.reason}"] if flag.noted else []
        elif value:
            result = f"is {' '.join(ours)} here" if ours else "has no effect"
            self.notes.append(f"{given} {result}: it {flag.reason}")


def translate(argv: Sequence[str]) -> Translation:
    """Translates a command line; flags of ours may be among vLLM's.

    Raises:
        ConfigurationRefused: A flag is refused, has a value that cannot be used, or lacks its value.
    """
    translation = Translation(model=_model(argv))
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
            translation.argv.append(f"{name}{equals}{value}")
        elif flag.form == "switch":
            translation.add(flag, f"--{name.removeprefix('--no-')}" if not on else name, [], on=on)
        elif equals or flag.form == "value":
            translation.add(flag, name, [value if equals else _next(name, rest)])
        else:
            translation.add(flag, name, list(_values(name, rest)))
    for base, keys in dotted.items():
        translation.add(BY_NAME[base], base, [json.dumps(keys)])
    return translation


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


def _row(name: str) -> tuple[VllmFlag | None, bool]:
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
    """Sets a nested key, as in `--compilation-config.level 3`; a key that ends in + takes a list."""
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
