"""The settings classes of all services: grouped help and complete tables."""

import re
from typing import ClassVar

import pytest

from deploy.commands.compile import CompileSettings
from deploy.commands.up import ServeSettings
from deploy.launcher.settings import KeepWorkerSettings, LaunchSettings
from gateway.settings import Settings as GatewaySettings
from protos.errors import ConfigurationRefused
from protos.service.settings import Group, ServiceSettings, group_of, load
from scheduler_svc.settings import Settings as SchedulerSettings
from worker_svc.settings import Settings as WorkerSettings

SERVICES = [GatewaySettings, SchedulerSettings, WorkerSettings]


@pytest.mark.parametrize("cls", SERVICES, ids=lambda cls: cls.__module__)
def test_every_field_has_one_heading(cls: type[ServiceSettings]) -> None:
    """The groups name each field once, and nothing else."""
    named = [
        field for base in cls.__mro__ for fields in vars(base).get("groups", {}).values() for field in fields
    ]
    assert sorted(named) == sorted(cls.model_fields)


@pytest.mark.parametrize("cls", SERVICES, ids=lambda cls: cls.__module__)
def test_reference_names_belong_to_fields(cls: type[ServiceSettings]) -> None:
    assert cls.reference_names.keys() | cls.reference_opposites.keys() <= cls.model_fields.keys()


@pytest.mark.parametrize("cls", SERVICES, ids=lambda cls: cls.__module__)
def test_help_prints_each_flag_under_its_heading(
    cls: type[ServiceSettings], capsys: pytest.CaptureFixture[str]
) -> None:
    """The headings come in their order, and each flag has a description."""
    with pytest.raises(SystemExit) as stopped:
        load(cls, ["--help"])
    assert stopped.value.code == 0
    text = capsys.readouterr().out
    headings = [
        Group(heading) for heading in re.findall(r"^(\w.*):$", text, re.MULTILINE) if heading != "options"
    ]
    assert headings == [
        group for group in Group if group in {group_of(cls, name) for name in cls.model_fields}
    ]
    for name in cls.model_fields:
        flag = f"\n  --{name.replace('_', '-')}"
        group = group_of(cls, name)
        assert text.index(f"\n{group}:\n") < text.index(flag), name


class _Base(ServiceSettings):
    groups: ClassVar = {Group.ADDRESSES: ("host", "port"), Group.COMPILATION: ("cache",)}
    reference_names: ClassVar = {"host": "OTHER_HOST", "port": "OTHER_PORT", "cache": "OTHER_CACHE"}
    reference_opposites: ClassVar = {"cache": "OTHER_NO_CACHE"}
    host: str = "here"
    port: int = 1
    cache: bool = True


class _Derived(_Base):
    """The same service, run by something that chooses the port."""

    groups: ClassVar = {Group.LAUNCHER: ("workers",)}
    fixed: ClassVar = {"port": "any free one"}
    workers: int = 1


@pytest.mark.parametrize(
    ("environment", "flags", "expected"),
    [
        ({}, [], True),
        ({"OTHER_NO_CACHE": "1"}, [], False),
        ({"OTHER_NO_CACHE": "true", "OTHER_CACHE": "1"}, [], False),
        ({"OTHER_NO_CACHE": "0"}, [], True),
        ({"OTHER_NO_CACHE": "0", "OTHER_CACHE": "0"}, [], False),
        ({"OTHER_NO_CACHE": ""}, [], True),
        ({"OTHER_NO_CACHE": "1"}, ["--cache"], True),
        ({"OTHER_NO_CACHE": "1", "TRIPTYCH_CACHE": "1"}, [], True),
    ],
)
def test_a_reference_opposite_turns_a_field_off(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], flags: list[str], expected: bool
) -> None:
    """If true, it sets the field to false; flags and TRIPTYCH_ variables come first."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert load(_Derived, flags).cache is expected


def test_a_reference_opposite_must_be_a_boolean(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTHER_NO_CACHE", "maybe")
    with pytest.raises(ConfigurationRefused, match="OTHER_NO_CACHE should be 0 or 1, got 'maybe'"):
        load(_Base, [])


def test_a_fixed_field_has_neither_flag_nor_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its default holds, whatever the environment says."""
    monkeypatch.setenv("TRIPTYCH_PORT", "2")
    monkeypatch.setenv("OTHER_PORT", "3")
    monkeypatch.setenv("OTHER_HOST", "there")
    settings = load(_Derived, [])
    assert (settings.host, settings.port) == ("there", 1)
    assert settings.model_fields_set == {"host"}
    with pytest.raises(ConfigurationRefused, match="--port cannot be set here: any free one"):
        load(_Derived, ["--port", "4"])


def test_an_address_that_kubernetes_sets_is_no_port(monkeypatch: pytest.MonkeyPatch) -> None:
    """A service that is called triptych changes nothing in the pods beside it."""
    monkeypatch.setenv("TRIPTYCH_PORT", "tcp://10.0.0.1:8000")
    assert load(SchedulerSettings, []).port == SchedulerSettings.model_fields["port"].default


COMMANDS = [
    GatewaySettings, SchedulerSettings, WorkerSettings, KeepWorkerSettings, LaunchSettings, ServeSettings,
    CompileSettings,
]  # fmt: skip


@pytest.mark.parametrize("cls", COMMANDS, ids=lambda cls: cls.__name__ + cls.__module__)
def test_the_help_says_what_it_can(cls: type[ServiceSettings], capsys: pytest.CaptureFixture[str]) -> None:
    """No default is shown that says nothing, and every flag has a description."""
    with pytest.raises(SystemExit):
        load(cls, ["--help-all"])
    text = capsys.readouterr().out
    for nothing in ("null", "None", "()", "{}"):
        assert f"(default: {nothing})" not in text
    assert [name for name, field in cls.model_fields.items() if not field.description] == []
