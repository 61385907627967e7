"""The meaning of environment variables of vLLM and its NPU plugins, and of misspelled names of ours."""

import difflib
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from importlib.resources import files
from typing import Any, Final

from protos.service.redaction import shown

FAMILIES: Final = ("VLLM_", "RBLN_", "TORCH_RBLN_", "SENDNN_INFERENCE_", "TORCH_SENDNN_")
"""Prefixes of the other programs' names."""

_FALSE: Final = frozenset({"", "0", "false", "f", "no", "n", "off"})
# What Kubernetes sets in every pod for a service that is called vllm, for example.
_SERVICE_LINK: Final = re.compile(
    r"_(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)$"
)


class Kind(StrEnum):
    """The effect of a variable."""

    MAPPED = "mapped"
    """It sets a setting of ours."""
    NATIVE = "native"
    """It keeps its meaning, without a setting of ours."""
    REJECTED = "rejected"
    """It would change answers: no service starts."""
    IGNORED = "ignored"
    """Nothing here reads it; a service logs it once."""
    UNKNOWN = "unknown"
    """It is on no list."""


@dataclass(frozen=True)
class Variable:
    """A known variable."""

    kind: Kind
    note: str = "it has no effect here"
    """Advice, or a difference."""
    flag: str = ""
    """The flag of a mapped variable's setting."""
    when: str = ""
    """"on" or "off" if only such values of a switch are rejected: others ask for the only behaviour."""

    def kind_of(self, value: str) -> Kind:
        """Returns the effect of a value."""
        if self.when and (value.strip().lower() in _FALSE) != (self.when == "off"):
            return Kind.NATIVE
        return self.kind


def names(peer: str) -> list[str]:
    """Returns the names of a list: `vllm`, for example."""
    text = (files("protos.service") / "variable_names" / f"{peer}.txt").read_text()
    return [line for line in text.splitlines() if not line.startswith("#")]


def _variables() -> dict[str, Variable]:
    data: dict[str, Any] = tomllib.loads((files("protos.service") / "variables.toml").read_text())
    device = Variable(Kind.NATIVE, "the NPU's software reads it in the worker")
    known = {
        name: Variable(Kind.IGNORED)
        for peer in ("older", "vllm", "vllm-rbln", "vllm-spyre")
        for name in names(peer)
    }
    known |= dict.fromkeys(names("torch-rbln"), device)
    known |= dict.fromkeys(data["ignored"], Variable(Kind.IGNORED))
    for kind in (Kind.NATIVE, Kind.MAPPED, Kind.REJECTED):
        for row in data[kind]:
            variable = Variable(kind, row.get("note", ""), row.get("flag", ""), row.get("when", ""))
            known |= dict.fromkeys(row["names"], variable)
    return known


VARIABLES: Final[Mapping[str, Variable]] = _variables()
"""All known variables of other programs, by name."""
OWN: Final = frozenset(names("triptych"))
"""The variables of all our services: a container may set those of every service."""
_OWN_FAMILY: Final = "TRIPTYCH_"


@dataclass(frozen=True)
class Reading:
    """The meaning of a variable of an environment."""

    name: str
    value: str
    """As it is set; a secret is hidden."""
    kind: Kind
    ours: str
    """The flag of a mapped variable, or the known name most like an unknown variable."""
    reason: str

    def __str__(self) -> str:
        """A line for people."""
        match self.kind:
            case Kind.MAPPED:
                note = f" ({self.reason})" if self.reason else ""
                return f"{self.name}={self.value} sets {self.ours}{note}"
            case Kind.NATIVE:
                return f"{self.name}={self.value} keeps its meaning: {self.reason}"
            case Kind.REJECTED:
                return f"{self.name}={self.value} is not supported: {self.reason}"
            case Kind.IGNORED:
                return f"{self.name}={self.value} has no effect here"
            case _:
                return f"{self.name} is unknown and has no effect here; {self.reason}"


def read(environment: Mapping[str, str]) -> list[Reading]:
    """Returns the meanings of the other programs' variables and of our unknown variables, sorted by name.

    Omits empty variables, and those set by Kubernetes for a service of such a name.
    """
    return [
        _read(name, value)
        for name, value in sorted(environment.items())
        if name.startswith((*FAMILIES, _OWN_FAMILY)) and value and name not in OWN
        if name in VARIABLES or not _SERVICE_LINK.search(name)
    ]


def check(environment: Mapping[str, str], report: Callable[[Reading], None]) -> None:
    """Reports each ignored or unknown variable. Refuses a rejected variable, before any report."""
    readings = read(environment)
    for reading in readings:
        if reading.kind is Kind.REJECTED:
            # Imported here: the command line reads this table before gRPC is installed.
            from protos.errors import ConfigurationRefused

            raise ConfigurationRefused(str(reading))
    for reading in readings:
        if reading.kind in (Kind.IGNORED, Kind.UNKNOWN):
            report(reading)


def check_for_service(environment: Mapping[str, str]) -> None:
    """Logs a warning for each ignored or unknown variable; refuses a rejected variable."""
    # Imported here, as above.
    from protos.service.logs import get_logger

    log = get_logger()
    check(
        environment,
        lambda reading: log.warning("variable_ignored", variable=reading.name, reason=reading.reason),
    )


def _read(name: str, value: str) -> Reading:
    variable = VARIABLES.get(name)
    if variable is not None:
        kind = variable.kind_of(value)
        note = variable.note if kind is variable.kind else "there is no other behaviour"
        return Reading(name, shown(name, value), kind, variable.flag, note)
    known = OWN if name.startswith(_OWN_FAMILY) else VARIABLES
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.85)
    advice = f"did you mean {close[0]}?" if close else "unset it if nothing else reads it"
    if not close and name.startswith(("RBLN_", "TORCH_RBLN_")):
        advice = "an NPU's runtime may know it"
    return Reading(name, shown(name, value), Kind.UNKNOWN, close[0] if close else "", advice)
