"""The table of all variables, and what an environment means by it."""

import difflib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from protos.environment import npu, vllm_kernels, vllm_serving
from protos.environment.variable import HIDDEN, Kind, Variable
from protos.errors import ConfigurationRefused
from protos.logs import get_logger

FAMILIES: Final = ("VLLM_", "RBLN_", "SENDNN_INFERENCE_", "TORCH_SENDNN_")
"""Beginnings of the names that belong to the other stacks."""

STACKS: Final[Mapping[str, tuple[Variable, ...]]] = {
    "vLLM": tuple(vllm_serving.ROWS + vllm_kernels.ROWS + vllm_serving.OLDER),
    "vLLM-RBLN": tuple(npu.RBLN),
    "vLLM-Spyre": tuple(npu.SPYRE),
}
"""The rows of each stack."""

VARIABLES: Final[Mapping[str, Variable]] = {row.name: row for rows in STACKS.values() for row in rows}
"""All rows, by name."""

# What Kubernetes sets in every pod for a service that is called vllm, for example.
_SERVICE_LINK = re.compile(
    r"_(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)$"
)
_SECRET = re.compile(r"(API|ACCESS|PRIVATE)_KEY|SECRET|PASSWORD|CREDENTIAL|TOKEN$")


@dataclass(frozen=True)
class Reading:
    """What one variable of an environment means."""

    name: str
    value: str
    """As it is set; a secret is hidden."""
    kind: Kind
    ours: str
    """The flag that a mapped variable sets, or the name that an unknown one resembles."""
    reason: str

    def __str__(self) -> str:
        """One line for people."""
        match self.kind:
            case Kind.MAPPED:
                return f"{self.name}={self.value} sets {self.ours}" + (
                    f" ({self.reason})" if self.reason else ""
                )
            case Kind.HONOURED:
                return f"{self.name}={self.value} has its meaning: {self.reason}"
            case Kind.MOOT:
                return f"{self.name}={self.value} has no effect: {self.reason}"
            case Kind.REFUSED:
                return f"{self.name}={self.value} is not supported: {self.reason}"
            case _:
                return f"{self.name} is unknown and has no effect here; {self.reason}"


def read(environment: Mapping[str, str]) -> list[Reading]:
    """Returns what each variable of the other stacks means that is set and not empty, by name."""
    return [
        _read(name, value)
        for name, value in sorted(environment.items())
        if name.startswith(FAMILIES) and value and (name in VARIABLES or not is_service_link(name))
    ]


def check(environment: Mapping[str, str], report: Callable[[Reading], None]) -> None:
    """Reports each set variable that is ignored or unknown.

    Raises:
        ConfigurationRefused: a variable is refused; nothing is reported then.
    """
    readings = read(environment)
    for reading in readings:
        if reading.kind is Kind.REFUSED:
            raise ConfigurationRefused(str(reading))
    for reading in readings:
        if reading.kind in (Kind.MOOT, Kind.UNKNOWN):
            report(reading)


def check_for_service(environment: Mapping[str, str]) -> None:
    """Logs a warning for each set variable that is ignored or unknown.

    Raises:
        ConfigurationRefused: a variable is refused.
    """
    log = get_logger()
    check(
        environment,
        lambda reading: log.warning("variable_ignored", variable=reading.name, reason=reading.reason),
    )


def is_service_link(name: str) -> bool:
    """Whether Kubernetes may have set a variable, for a service whose name begins like a setting's."""
    return _SERVICE_LINK.search(name) is not None


def shown(name: str, value: str) -> str:
    """Returns a variable's value for people: a secret is hidden."""
    return HIDDEN if _SECRET.search(name) else value


def _read(name: str, value: str) -> Reading:
    row = VARIABLES.get(name)
    if row is not None:
        return Reading(name, shown(name, value), row.kind_of(value), row.ours, row.reason)
    close = difflib.get_close_matches(name, VARIABLES, n=1, cutoff=0.85)
    if close:
        return Reading(name, shown(name, value), Kind.UNKNOWN, close[0], f"did you mean {close[0]}?")
    advice = (
        "an NPU's runtime may know it" if name.startswith("RBLN_") else "unset it if nothing else reads it"
    )
    return Reading(name, shown(name, value), Kind.UNKNOWN, "", advice)
