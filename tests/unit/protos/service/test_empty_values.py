"""Empty values in flags, variables and files, for every setting of every service."""

from pathlib import Path

import pytest
from pydantic import ValidationError

from deploy.checks.check_results import setting_sources
from deploy.commands.up import ServeSettings
from deploy.launcher.settings import KeepWorkerSettings, LaunchSettings
from deploy.vllm_flags.translate import VllmFlags
from gateway.settings import Settings as GatewaySettings
from protos.errors import ConfigurationRefused
from protos.service.settings import ServiceSettings, fixed_fields, given_flags, load, may_be_empty
from scheduler_svc.settings import Settings as SchedulerSettings
from worker_svc.settings import Settings as WorkerSettings

CLASSES: list[type[ServiceSettings]] = [
    GatewaySettings,
    SchedulerSettings,
    WorkerSettings,
    LaunchSettings,
    ServeSettings,
    KeepWorkerSettings,
]
# An empty key or name is a mistake, and an empty text is no JSON.
NEVER_EMPTY = {
    "api_key", "served_model_name", "default_chat_template_kwargs", "override_generation_config", "reasoning_effort_budgets",
}  # fmt: skip

every_class = pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)


def fields(cls: type[ServiceSettings]) -> list[str]:
    """Returns the fields with a value; a switch has none."""
    fixed = fixed_fields(cls)
    return [
        name for name, field in cls.model_fields.items() if name not in fixed and field.annotation is not bool
    ]


def takes_empty(cls: type[ServiceSettings], name: str) -> bool:
    """Whether a field is a text that may be empty, or has several values, of which there may be none."""
    default = cls.model_fields[name].get_default(call_default_factory=True)
    return may_be_empty(cls, name) or (isinstance(default, tuple | dict) and name not in NEVER_EMPTY)


@every_class
def test_no_empty_flag_is_dropped(cls: type[ServiceSettings]) -> None:
    flags = [f"--{name.replace('_', '-')}=" for name in fields(cls)]
    assert given_flags(cls, flags) == set(fields(cls))


@every_class
def test_an_empty_value_is_refused_unless_it_has_a_meaning(cls: type[ServiceSettings]) -> None:
    """The refusal names the field; a list or a mapping may be empty."""
    with pytest.raises(ValidationError) as refused:
        cls.model_validate(dict.fromkeys(fields(cls), ""))
    bad = {str(error["loc"][0]) for error in refused.value.errors()}
    assert bad == {name for name in fields(cls) if not takes_empty(cls, name)}


@every_class
def test_an_empty_variable_counts_if_empty_has_a_meaning(
    cls: type[ServiceSettings], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others count as unset: Compose passes what its user left unset as an empty variable."""
    flags = ["--model=x", "--socket=/run/x.sock"] if "socket" in fields(cls) else ["--model=x"]
    flags = [flag for flag in flags if flag[2:].partition("=")[0] in fields(cls)]
    unset = load(cls, flags)
    for name in cls.model_fields:
        monkeypatch.setenv(f"TRIPTYCH_{name.upper()}", "")
    empty = {name: "" for name in fields(cls) if may_be_empty(cls, name)}
    assert load(cls, flags) == unset.model_copy(update=empty)


def test_an_entry_of_a_file_counts_like_a_flag(tmp_path: Path) -> None:
    """`name:` without a value says nothing; an empty text is a value."""
    file = tmp_path / "settings.yaml"
    file.write_text("worker:\n  model: x\n  scheduler-address: ''\n  revision:\n")
    settings = load(WorkerSettings, ["--config", str(file)])
    assert (settings.scheduler_address, settings.revision) == ("", None)
    file.write_text("worker:\n  model: x\n  revision: ''\n")
    with pytest.raises(ConfigurationRefused, match="revision is empty"):
        load(WorkerSettings, ["--config", str(file)])


@pytest.mark.parametrize("flag", ["--trust-remote-code", "--enable-lora", "--enable-prefix-caching"])
@pytest.mark.parametrize("value", ["", "false"])
def test_a_value_does_not_turn_a_switch_on(flag: str, value: str) -> None:
    """A switch has no value, neither for our parser nor for that of vLLM's flags."""
    for foreign in (None, VllmFlags()):
        with pytest.raises(ConfigurationRefused, match=flag):
            load(LaunchSettings, [f"{flag}={value}"], foreign)


@every_class
def test_descriptions_tell_the_meaning_of_empty(cls: type[ServiceSettings]) -> None:
    """A description speaks of an empty value exactly if the setting takes one."""
    for name, field in cls.model_fields.items():
        described = "Empty:" in (field.description or "")
        assert described == may_be_empty(cls, name), name


def test_a_worker_with_an_empty_address_registers_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """A flag, and a variable under another one; doctor names the source."""
    assert load(WorkerSettings, ["--model=x", "--scheduler-address", ""]).scheduler_address == ""
    monkeypatch.setenv("TRIPTYCH_SCHEDULER_ADDRESS", "")
    settings = load(WorkerSettings, ["--model=x"])
    assert settings.scheduler_address == ""
    sources = {source.flag: source.source for source in setting_sources(settings, {"model"})}
    assert sources["--scheduler-address"] == "TRIPTYCH_SCHEDULER_ADDRESS"
    assert load(WorkerSettings, ["--model=x", "--scheduler-address=a:1"]).scheduler_address == "a:1"


@pytest.mark.parametrize(
    "flag", ["--api-key", "--api-key-file", "--service-token", "--service-token-file", "--ssl-certfile"]
)
def test_an_unset_shell_variable_turns_no_protection_off(flag: str) -> None:
    with pytest.raises(ConfigurationRefused, match="empty"):
        load(GatewaySettings, [flag, ""])


def test_an_unset_shell_variable_lets_in_no_other_model() -> None:
    """An empty default is what counts without the flag, not a value of it."""
    with pytest.raises(ConfigurationRefused, match=r"--expect-model .* is empty"):
        load(SchedulerSettings, ["--expect-model", ""])


def test_an_empty_name_of_a_file_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not fall back to the variable; an empty variable names none."""
    monkeypatch.setenv("TRIPTYCH_CONFIG", "")
    assert load(SchedulerSettings, []) == SchedulerSettings()
    with pytest.raises(ConfigurationRefused, match="--config"):
        load(SchedulerSettings, ["--config", ""])
