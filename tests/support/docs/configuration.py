"""Makes docs/configuration.md from the settings classes of the three services and of `triptych up`."""

import types
import typing
from enum import Enum
from pathlib import Path
from typing import Any

import annotated_types
from pydantic import BaseModel, SecretStr
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from deploy.launcher.process import PARENT_VARIABLE
from deploy.launcher.settings import KeepWorkerSettings, LaunchSettings
from gateway.settings import Settings as GatewaySettings
from protos.service.settings import (
    CONFIG_VARIABLE,
    Group,
    ServiceSettings,
    declared,
    fixed_fields,
    group_of,
    reference_variables,
)
from scheduler_svc.settings import Settings as SchedulerSettings
from tests.support.docs.pages import NOTICE, anchor, page, table
from worker_svc.settings import Settings as WorkerSettings
from worker_svc.vllm_platform import PLATFORM_VARIABLE

INTRODUCTION = """\
# Configuration

Every setting of a service is a flag and a variable. A flag wins over the variable of the same name, which wins over a variable that
Triptych takes over from vLLM, vLLM-RBLN or vLLM-Spyre. Last comes the file of `--config`. A setting that is unset takes its default.
Lists are written with commas. A switch is `--flag` or `--no-flag`; as a variable it is `1` or `0`. An empty value is a value where
the description says what empty means; elsewhere, an empty flag or entry of a file is refused, and an empty variable is unset.

A bad value ends the start with exit code 2 and one line that names the flag, the variable and what is wrong. `triptych up --help`
prints twenty settings, `--help-all` (and `--help` of a single service) all of them, under headings. `--help=WORD`
shows one heading ("KV memory"), or the flags with the word in their name; `--help=listgroup` lists the headings, as in vLLM.

## Write settings to a file

`--config FILE.yaml` (`TRIPTYCH_CONFIG`) reads settings from a file, for `triptych up` and `triptych serve` as well as for each single
service. Names may have dashes or underscores.

```yaml
log-level: info # above the sections: for every service that reads the file
gateway:
  port: 8000
  tool-call-parser: hermes
scheduler:
  max-num-seqs: 32
  tenant-weights: {paid: 4, trial: 0.5}
worker:
  model: Qwen/Qwen3-0.6B
  dtype: bfloat16
launcher: # what only `triptych up` and `triptych serve` have
  workers: 2
```

A service reads its own section and what stands above the sections. The launcher reads all of them; there, `port` of `scheduler` is
`--scheduler-port`. For the launcher, every setting and every flag of `vllm serve` may also stand above the sections, so a file of
`vllm serve` works as it is. An unknown name is refused with the name that was probably meant.

## Set up containers

`deploy/compose.yaml` passes the variables of one file, `.env` in the same folder, to all services. `TRIPTYCH_HOST` and
`TRIPTYCH_PORT` there are this machine's address and port, or range of ports, of the gateways.

## Look up a setting
"""

SERVICES: tuple[tuple[str, type[ServiceSettings], str], ...] = (
    ("triptych gateway", GatewaySettings, "The HTTP side. Run as many as you like; they keep no state."),
    (
        "triptych scheduler",
        SchedulerSettings,
        "Memory, batches and turns. Workers take their static shapes from the scheduler, so sizes are set here and not there.",
    ),
    ("triptych worker", WorkerSettings, "The model and its device. A worker is one process with one device."),
)

HEAD = ("setting", "value", "default", "what it does")

NAMES = {int: "integer", float: "number", str: "text", bool: "switch", Path: "path", SecretStr: "secret text"}


def configuration() -> str:
    """Returns the whole page."""
    commands = ["triptych up", *(command for command, _, _ in SERVICES), "triptych keep-worker"]
    index = [*(f"- [`{command}`](#{anchor(command)})" for command in commands), ""]
    services = [line for command, cls, text in SERVICES for line in _section(command, cls, text)]
    return page([NOTICE, "", *INTRODUCTION.splitlines(), ""], index, _launcher(), services, _keeper())


def _launcher() -> list[str]:
    """Returns the section of the launcher's own settings and of those that it sets for the services."""
    inherited = {name for _, cls, _ in SERVICES for name in cls.model_fields}
    own = [name for name in LaunchSettings.model_fields if name not in inherited]
    model = LaunchSettings.model_fields["model"].default
    text = (
        "Starts all three services on this machine. It takes every setting of the services, under the same name; where services share a"
        " name, one flag sets it for all of them. `--host` and `--port` are the gateway's, and the default of `--model` is"
        f" `{model}`. These are its own settings:"
    )
    lines = ["## triptych up", "", text, ""]
    lines += table(HEAD, [_row(LaunchSettings, name, LaunchSettings.model_fields[name]) for name in own])
    lines += ["It sets these itself, so they have neither a flag nor a variable here:", ""]
    fixed = fixed_fields(LaunchSettings)
    return lines + table(("setting", "why"), [(f"`{name}`", reason) for name, reason in fixed.items()])


def _keeper() -> list[str]:
    """Returns the section of the command of the worker's image."""
    worker = next(cls for command, cls, _ in SERVICES if command == "triptych worker")
    own = [name for name in KeepWorkerSettings.model_fields if name not in worker.model_fields]
    text = (
        "Runs one worker and restarts it when it dies; the worker's image starts it. It takes every setting of `triptych worker`,"
        " with `--port` from 1. This is its own:"
    )
    rows = [_row(KeepWorkerSettings, name, KeepWorkerSettings.model_fields[name]) for name in own]
    return ["## triptych keep-worker", "", text, "", *table(HEAD, rows)]


def _section(command: str, cls: type[ServiceSettings], text: str) -> list[str]:
    lines = [f"## {command}", "", text, ""]
    members: dict[Group | None, list[str]] = {group: [] for group in (*Group, None)}
    for name in cls.model_fields:
        members[group_of(cls, name)].append(name)
    for group, names in members.items():
        if names:
            lines += [
                f"### {command.removeprefix('triptych ').capitalize()}: {group or 'other settings'}",
                "",
            ]
            lines += table(HEAD, [_row(cls, name, cls.model_fields[name]) for name in names])
    return lines


def _row(cls: type[ServiceSettings], name: str, field: FieldInfo) -> tuple[str, str, str, str]:
    flag = f"--{name.replace('_', '-')}"
    shortcuts: dict[str, Any] = dict(cls.model_config.get("cli_shortcuts") or {})
    short = shortcuts.get(flag[2:])
    names = [flag, *([f"-{short}"] if short else []), f"TRIPTYCH_{name.upper()}"]
    opposite = declared(cls, "reference_opposites").get(name)
    shown = "<br>".join(f"`{text}`" for text in (*names, *reference_variables(cls, name)))
    if opposite:
        shown += f"<br>`{opposite}=1` turns it off"
    return shown, kind_of(field), _default(field), field.description or ""


def kind_of(field: FieldInfo) -> str:
    """Returns a field's type and bounds in words: "integer, 1 to 4096"."""
    bounds = _bounds(field.metadata)
    return ", ".join(part for part in (_type(field.annotation), bounds) if part)


def _type(annotation: Any) -> str:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_type(argument) for argument in arguments if argument is not type(None))
    if origin is typing.Annotated:
        return ", ".join(part for part in (_type(arguments[0]), _bounds(list(arguments[1:]))) if part)
    if origin is typing.Literal:
        return ", ".join(f"`{value}`" for value in arguments)
    if origin is tuple:
        return f"list of {_type(arguments[0])}s"
    if origin is dict:
        return "list of name=number"
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return ", ".join(f"`{member.value}`" for member in annotation)
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return f"JSON object of {' and '.join(f'`{name}`' for name in annotation.model_fields)}"
    if annotation not in NAMES:
        raise ValueError(f"name the type {annotation} in {__name__}.NAMES")
    return NAMES[annotation]


def _bounds(metadata: list[Any]) -> str:
    found = {
        bound: getattr(item, bound)
        for item in metadata
        for bound in ("ge", "gt", "le", "lt")
        if getattr(item, bound, None) is not None and not isinstance(item, annotated_types.Interval)
    }
    low, high = found.get("ge"), found.get("le")
    if low is not None and high is not None:
        return f"{number(low)} to {number(high)}"
    words = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}
    return ", ".join(f"{words[bound]} {number(value)}" for bound, value in found.items())


def number(value: float) -> str:
    """Returns a bound as text; large powers of two are written as powers."""
    if isinstance(value, int) and value >= 1 << 20 and value & (value - 1) == 0:
        return f"2^{value.bit_length() - 1}"
    return f"{value:,}" if isinstance(value, int) and value >= 10_000 else f"{value:g}"


def _default(field: FieldInfo) -> str:
    default = field.get_default(call_default_factory=True, validated_data={})
    if default is PydanticUndefined:
        return "required"
    if default is None or default in ("", (), {}):
        return "unset"
    if isinstance(default, bool):
        return "on" if default else "off"
    if isinstance(default, tuple):
        return f"`{','.join(map(str, default))}`"
    return f"`{default.value if isinstance(default, Enum) else default}`"


def own_variables() -> str:
    """Returns the list of our variables: those of all settings, and a few without a setting."""
    # The models' cache, messages to child processes, and the size of property tests.
    names = {CONFIG_VARIABLE, PLATFORM_VARIABLE, PARENT_VARIABLE, "TRIPTYCH_CACHE"}
    names |= {"TRIPTYCH_PROPERTY_SCALE", "TRIPTYCH_PROPERTY_SEEDS"}
    for cls in (LaunchSettings, KeepWorkerSettings):
        names |= {f"TRIPTYCH_{name.upper()}" for name in cls.model_fields}
    return "\n".join(["# Variables of Triptych; `make docs` writes this list.", *sorted(names), ""])
