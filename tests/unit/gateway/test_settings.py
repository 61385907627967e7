"""The gateway's flags and variables, those of keys, TLS and origins too."""

import pytest

from gateway.__main__ import main
from gateway.settings import Settings
from protos.errors import ConfigurationRefused
from protos.service.settings import load


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("VLLM_API_KEY", *(f"TRIPTYCH_{name.upper()}" for name in Settings.model_fields)):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--port", "x"], "--port"), (["--port", "70000"], "--port"), (["--port", "-1"], "--port"), (["--port"], "--port"),
        (["--bogus"], "--bogus"), (["stray"], "stray"), (["--log-level", "loud"], "--log-level"),
        (["--scheduler-address", "nowhere"], "--scheduler-address"), (["--scheduler-address", "a:0"], "host:port"),
        (["--scheduler-address", "a:70000"], "host:port"), (["--max-body-bytes", "1"], "--max-body-bytes"),
        (["--drain-s", "-1"], "--drain-s"), (["--tool-call-parser", "x"], "--tool-call-parser"),
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


@pytest.mark.parametrize("name", ["openai_gptoss", "gpt_oss", "vllm:openai_gptoss"])
def test_names_of_gpt_oss(name: str) -> None:
    """Its thinking and its calls have one format."""
    assert load(Settings, ["--reasoning-parser", name]).reasoning_parser == "openai"
    assert load(Settings, ["--tool-call-parser", "vllm:openai"]).tool_call_parser == "openai"


@pytest.mark.parametrize("address", ["[::1]:50051", "scheduler:1", "10.0.0.1:65535"])
def test_addresses(address: str) -> None:
    """Names, IPv4 and bracketed IPv6 addresses are accepted."""
    assert load(Settings, ["--scheduler-address", address]).scheduler_address == address


def keys_of(*flags: str) -> list[str]:
    return [key.get_secret_value() for key in load(Settings, [*flags]).api_key]


@pytest.mark.parametrize(
    ("flags", "keys"),
    [
        ([], []),
        (["--api-key", "a"], ["a"]),
        (["--api-key", "a", "b,c", "--api-key", 'd"'], ["a", "b,c", 'd"']),
        (["--api-key=["], ["["]),
    ],
)
def test_keys_follow_one_another(flags: list[str], keys: list[str]) -> None:
    """As vLLM's: behind one flag or several, whatever characters they have."""
    assert keys_of(*flags) == keys


@pytest.mark.parametrize(
    ("name", "text", "keys"),
    [
        ("VLLM_API_KEY", "a,b c", ["a,b c"]),
        ("TRIPTYCH_API_KEY", "a", ["a"]),
        ("TRIPTYCH_API_KEY", '["a", "b,c"]', ["a", "b,c"]),
        ("TRIPTYCH_API_KEY", "", []),
    ],
)
def test_a_variable_has_one_key_or_a_list(
    monkeypatch: pytest.MonkeyPatch, name: str, text: str, keys: list[str]
) -> None:
    monkeypatch.setenv(name, text)
    assert keys_of() == keys
    assert keys_of("--api-key", "flag") == ["flag"]


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--api-key", ""], "has an empty key"),
        (["--api-key", "hush", ""], "has an empty key"),
        (["--ssl-keyfile", "hush"], "need --ssl-certfile"),
        (["--ssl-certfile", "hush", "--ssl-cert-reqs", "1"], "--ssl-cert-reqs 1 needs --ssl-ca-certs"),
        (["--ssl-certfile", "hush", "--ssl-cert-reqs", "3"], "should be 0, 1 or 2"),
    ],
)
def test_a_bad_setting_is_refused_without_secrets(flags: list[str], reason: str) -> None:
    """An empty key would let everyone in, so it is refused."""
    with pytest.raises(ConfigurationRefused) as refused:
        load(Settings, flags)
    assert reason in str(refused.value)
    assert "hush" not in str(refused.value)


def test_a_bad_variable_is_refused_without_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRIPTYCH_API_KEY", '["hush"')
    with pytest.raises(ConfigurationRefused, match=r"TRIPTYCH_API_KEY\).*is not a JSON list") as refused:
        load(Settings, [])
    assert "hush" not in str(refused.value)


@pytest.mark.parametrize(
    "flags",
    [["--allowed-origins", "https://a", "https://b"], ["--allowed-origins", '["https://a", "https://b"]']],
)
def test_origins_are_written_as_vllms(flags: list[str]) -> None:
    assert load(Settings, flags).allowed_origins == ("https://a", "https://b")
