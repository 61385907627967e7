"""Errors about a command line repeat no secrets."""

import pytest

from gateway.settings import Settings
from protos.command_line.hiding import without_secrets
from protos.errors import ConfigurationRefused
from protos.settings import load


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        (["--api-ky", "sk-1", "sk-2", "--max-tokens", "5"], "--api-ky ******** ******** --max-tokens 5"),
        (["--service_token=sk-1", "--tokenizer", "x"], "--service_token=******** --tokenizer x"),
        (["--proxy", "http://me:pw@proxy:1"], "--proxy http://********@proxy:1"),
    ],
)
def test_values_of_secret_flags_are_hidden(arguments: list[str], shown: str) -> None:
    """Flags whose names sound like secrets keep their names, and others their values."""
    assert without_secrets(arguments) == shown


@pytest.mark.parametrize("flags", [["--api-ky", "hush"], ["--otlp-traces-endpoint", "http://me:hush@host"]])
def test_a_refusal_shows_no_secret(flags: list[str]) -> None:
    """A misspelled flag is named without its value, and a URL without its user."""
    with pytest.raises(ConfigurationRefused, match=flags[0]) as refused:
        load(Settings, flags)
    assert "hush" not in str(refused.value)
