"""Flags and variables of keys, TLS and origins."""

import pytest

from gateway.settings import Settings
from protos.errors import ConfigurationRefused
from protos.service.settings import load


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TRIPTYCH_API_KEY", "VLLM_API_KEY", "TRIPTYCH_ADMIN_API_KEY", "TRIPTYCH_ALLOWED_ORIGINS"):
        monkeypatch.delenv(name, raising=False)


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
    """A plain text is one key."""
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
    """The line names the variable and not its value."""
    monkeypatch.setenv("TRIPTYCH_API_KEY", '["hush"')
    with pytest.raises(ConfigurationRefused, match=r"TRIPTYCH_API_KEY\).*is not a JSON list") as refused:
        load(Settings, [])
    assert "hush" not in str(refused.value)


@pytest.mark.parametrize(
    "flags",
    [["--allowed-origins", "https://a", "https://b"], ["--allowed-origins", '["https://a", "https://b"]']],
)
def test_origins_are_written_as_vllms(flags: list[str]) -> None:
    """As values, or as the JSON list that vLLM takes."""
    assert load(Settings, flags).allowed_origins == ("https://a", "https://b")
