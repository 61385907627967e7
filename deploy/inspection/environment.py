"""What variables of the environment are understood as."""

from collections.abc import Collection, Mapping, Sequence

from deploy.diagnosis.findings import Missing, Remark
from deploy.launcher.parent import PARENT_VARIABLE
from deploy.launcher.settings import KeepWorkerSettings, LaunchSettings
from gateway.settings import Settings as GatewaySettings
from protos.command_line.suggestions import similar
from protos.environment.table import Kind, Reading, is_service_link
from protos.settings import CONFIG_VARIABLE
from scheduler_svc.settings import Settings as SchedulerSettings
from worker_svc.settings import Settings as WorkerSettings
from worker_svc.vllm_platform import PLATFORM_VARIABLE

_OWN = "TRIPTYCH_"
# Variables that are not settings: the models' cache, what processes tell their children, the scale of tests.
_OTHERS = {CONFIG_VARIABLE, PLATFORM_VARIABLE, PARENT_VARIABLE, "TRIPTYCH_CACHE", "TRIPTYCH_PROPERTY_SCALE"}
_CLASSES = (LaunchSettings, KeepWorkerSettings, GatewaySettings, SchedulerSettings, WorkerSettings)


def variables() -> set[str]:
    """Returns our own variables: those of all settings, and a few more."""
    return {f"{_OWN}{name.upper()}" for cls in _CLASSES for name in cls.model_fields} | _OTHERS


def other_stacks(readings: Sequence[Reading]) -> str:
    """Returns in words what the variables of other stacks do here.

    Raises:
        Missing: a variable is refused.
        Remark: some have no effect.
    """
    refused = _named(readings, {Kind.REJECTED})
    if refused:
        raise Missing(f"{', '.join(refused)}: no service starts; change what is said above")
    ignored = _named(readings, {Kind.IGNORED, Kind.UNKNOWN})
    if ignored:
        raise Remark(
            f"{len(ignored)} of {len(readings)} variables of other stacks have no effect, as said above"
        )
    if not readings:
        return "no variables of other stacks are set"
    return f"{len(readings)} variables of other stacks are understood"


def own_variables(environment: Mapping[str, str]) -> str:
    """Checks that each variable of ours exists.

    Raises:
        Remark: some do not, and what was probably meant.
    """
    if unknown := unknown_variables(environment):
        raise Remark("; ".join(unknown))
    count = len(_set(environment))
    return f"{count} set, all known" if count else "none set"


def unknown_variables(environment: Mapping[str, str]) -> list[str]:
    """Returns a line for each variable of ours that is set and does not exist."""
    known = variables()
    return [_unknown(name, known) for name in sorted(_set(environment) - known)]


def _set(environment: Mapping[str, str]) -> set[str]:
    return {
        name
        for name, value in environment.items()
        if name.startswith(_OWN) and value and (name in variables() or not is_service_link(name))
    }


def _unknown(name: str, known: Collection[str]) -> str:
    meant = similar(name, known)
    return f"{name} is not a setting and has no effect" + (f"; did you mean {meant}?" if meant else "")


def _named(readings: Sequence[Reading], kinds: Collection[Kind]) -> list[str]:
    return [reading.name for reading in readings if reading.kind in kinds]
