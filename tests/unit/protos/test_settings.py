"""What every service's settings class promises: grouped help and complete tables."""

import re
from typing import ClassVar

import pytest

from gateway.settings import Settings as GatewaySettings
from protos.errors import ConfigurationRefused
from protos.settings import Group, ServiceSettings, declared, group_of, load
from scheduler_svc.settings import Settings as SchedulerSettings
from worker_svc.settings import Settings as WorkerSettings

SERVICES = [GatewaySettings, SchedulerSettings, WorkerSettings]


@pytest.mark.parametrize("cls", SERVICES, ids=lambda cls: cls.__module__)
def test_every_field_has_one_heading(cls: type[ServiceSettings]) -> None:
    """The groups name each field once, and nothing else."""
    named = [field for fields in cls.groups.values() for field in fields]
    assert sorted(named) == sorted(cls.model_fields)


@pytest.mark.parametrize("cls", SERVICES, ids=lambda cls: cls.__module__)
def test_reference_names_belong_to_fields(cls: type[ServiceSettings]) -> None:
    """A variable of another stack sets a field that exists."""
    assert cls.reference_names.keys() <= cls.model_fields.keys()


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
    assert headings == [group for group in Group if group in cls.groups]
    for name, field in cls.model_fields.items():
        flag = f"\n  --{name.replace('_', '-')}"
        group = group_of(cls, name)
        assert text.index(f"\n{group}:\n") < text.index(flag), name
        assert field.description, name
        assert field.description.split()[0] in text[text.index(flag) :], name
    assert "(default: null)" not in text


class _Base(ServiceSettings):
    """A service."""

    groups: ClassVar = {Group.ADDRESSES: ("host", "port")}
    reference_names: ClassVar = {"host": "OTHER_HOST", "port": "OTHER_PORT"}
    host: str = "here"
    port: int = 1


class _Derived(_Base):
    """The same service, run by something that chooses the port."""

    groups: ClassVar = {Group.LAUNCHER: ("workers",)}
    fixed: ClassVar = {"port": "any free one"}
    workers: int = 1


def test_a_subclass_inherits_groups_and_reference_names() -> None:
    """Each class declares what belongs to its own fields."""
    assert group_of(_Derived, "host") is Group.ADDRESSES
    assert group_of(_Derived, "workers") is Group.LAUNCHER
    assert declared(_Derived, "reference_names") == _Base.reference_names


def test_a_fixed_field_has_neither_flag_nor_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its default holds, whatever the environment says."""
    monkeypatch.setenv("TRIPTYCH_PORT", "2")
    monkeypatch.setenv("OTHER_PORT", "3")
    monkeypatch.setenv("OTHER_HOST", "there")
    settings = load(_Derived, [])
    assert (settings.host, settings.port) == ("there", 1)
    assert settings.model_fields_set == {"host"}
    with pytest.raises(ConfigurationRefused, match="unrecognized arguments: --port 4"):
        load(_Derived, ["--port", "4"])
