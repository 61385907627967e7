"""Errors about a command line repeat no secrets."""

import pytest

from deploy import cli
from gateway.settings import Settings
from protos.errors import ConfigurationRefused
from protos.service.settings import load


@pytest.mark.parametrize("flags", [["--api-ky", "hush"], ["--otlp-traces-endpoint", "http://me:hush@host"]])
def test_a_refusal_shows_no_secret(flags: list[str]) -> None:
    """A misspelled flag is named without its value, and a URL without its user."""
    with pytest.raises(ConfigurationRefused, match=flags[0]) as refused:
        load(Settings, flags)
    assert "hush" not in str(refused.value)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("serve m --apikey hush", "unrecognized arguments: --apikey; did you mean --api-key?"),
        ("serve m --hftoken=hush", "--hftoken; did you mean --hf-token?"),
        ("serve m --api.key hush", "--api.key"),
        ("serve m --bearer hush", "--bearer; --help lists the flags"),
        ("serve m --sesame -- hush", "--sesame"),
        ("serve m --admin-api-key one hush", "unrecognized arguments: ********; m is the model"),
        ("serve --model m --admin-api-key one hush", "the model is given twice: ******** and --model m"),
        ("gateway --admin-api-key one hush", "unrecognized arguments: ********"),
        ("chat --apikey hush", "unrecognized arguments: --apikey; did you mean --api-key?"),
        ("chat --api-key one hush", "triptych chat: unrecognized arguments: ********"),
        ("chat --m=hush", "ambiguous option: --m could match --"),
    ],
)
def test_no_command_repeats_a_secret(line: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Unknown flags are named without their values, and words behind a secret's flag are hidden."""
    try:
        code: object = cli.main(line.split())
    except SystemExit as stopped:
        code = stopped.code
    assert code == 2
    error = capsys.readouterr().err
    assert said in error
    assert "hush" not in error
    assert error.count("\n") == 1
