"""The gateway's flags and variables."""

import pytest

from gateway.__main__ import main
from gateway.settings import Settings
from protos.errors import ConfigurationRefused
from protos.service.settings import load


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in Settings.model_fields:
        monkeypatch.delenv(f"TRIPTYCH_{name.upper()}", raising=False)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--port", "x"], "--port"), (["--port", "70000"], "--port"), (["--port", "-1"], "--port"), (["--port"], "--port"),
        (["--bogus"], "--bogus"), (["stray"], "stray"), (["--log-level", "loud"], "--log-level"),
        (["--scheduler-address", "nowhere"], "--scheduler-address"), (["--scheduler-address", "a:0"], "host:port"),
        (["--scheduler-address", "a:70000"], "host:port"), (["--max-body-bytes", "1"], "--max-body-bytes"),
        (["--drain-timeout-s", "-1"], "--drain-timeout-s"), (["--tool-call-parser", "x"], "--tool-call-parser"),
        (["--reasoning-parser", "vllm:"], "--reasoning-parser"),
    ],
)  # fmt: skip
def test_a_bad_setting_is_one_clear_line(
    argv: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The service exits with 2 and names the setting."""
    with pytest.raises(ConfigurationRefused, match=words):
        load(Settings, argv)
    assert main(argv) == 2
    printed = capsys.readouterr().err
    assert printed.count("\n") == 1
    assert words in printed


def test_an_empty_variable_is_unset(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compose files and scripts pass on variables without a value."""
    monkeypatch.setenv("TRIPTYCH_PORT", "")
    monkeypatch.setenv("TRIPTYCH_SCHEDULER_ADDRESS", "")
    assert load(Settings, ["--host", ""]) == Settings.model_construct()


@pytest.mark.parametrize("address", ["[::1]:50051", "scheduler:1", "10.0.0.1:65535"])
def test_addresses(address: str) -> None:
    """Names, IPv4 and bracketed IPv6 addresses are accepted."""
    assert load(Settings, ["--scheduler-address", address]).scheduler_address == address


def test_every_setting_is_described() -> None:
    """--help describes each setting."""
    assert all(field.description for field in Settings.model_fields.values())
