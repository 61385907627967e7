"""`triptych env`."""

import json
import subprocess
import sys
from importlib.metadata import version

import pytest

from deploy import cli
from deploy.commands.env import packages, variables
from protos.service.redaction import HIDDEN
from tests.support.lockfile import LOCK_FILES, read

SECRETS = {
    "OPENAI_API_KEY": "sk-word",
    "TRIPTYCH_API_KEY": "word",
    "TRIPTYCH_ADMIN_API_KEY": "word",
    "VLLM_API_KEY": "word",
    "HF_TOKEN": "hf_word",
    "OTEL_EXPORTER_OTLP_HEADERS": "authorization=word",
    "https_proxy": "http://me:word@proxy:3128",
    "HTTP_PROXY": "http://word@proxy:3128",
    "SSL_KEY_PASSWORD": "word",
}


def test_secrets_are_hidden() -> None:
    """Their variables are named, and no value is there, also none of a URL."""
    found = variables(SECRETS)
    assert found.keys() == SECRETS.keys()
    assert "word" not in json.dumps(found)
    assert found["https_proxy"] == f"http://{HIDDEN}@proxy:3128"


def test_variables_that_may_matter_are_there() -> None:
    """Settings, other stacks and libraries count; variables of other programs do not, nor empty ones."""
    given = {
        "TRIPTYCH_MAX_NUM_SEQS": "8",
        "TRIPTYCH_SERVICE_TOKEN_FILE": "/secrets/token",
        "RBLN_TARGET_SOC": "RBLN-CA25",
        "OMP_NUM_THREADS": "1",
        "LD_LIBRARY_PATH": "/lib",
    }
    assert variables(given | {"HOME": "/root", "VLLM_PLUGINS": "", "DATABASE_URL": "word"}) == given


def test_packages_are_those_of_the_locks() -> None:
    found = packages()
    for lock in LOCK_FILES:
        for name, tested in read(lock.path).items():
            assert found[name]["tested"] == tested
            assert lock.name in found[name]["locks"]
    assert found["grpcio"]["installed"] == version("grpcio")


def test_the_text_shows_sections_and_no_secret(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRIPTYCH_API_KEY", "word")
    assert cli.main(["env"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert {"Versions:", "CPU:", "Memory:", "Devices:", "Variables:"} < set(lines)
    assert f"  grpcio {version('grpcio')}" in lines
    assert f"  TRIPTYCH_API_KEY={HIDDEN}" in lines


def test_it_runs_with_the_base_packages_alone() -> None:
    """Where a report is made, torch and the packages of clients may be missing or broken."""
    code = (
        "import sys; sys.modules |= dict.fromkeys(['torch', 'vllm', 'httpx', 'fastapi', 'numpy'])\n"
        "from deploy import cli\n"
        "sys.exit(cli.main(['env', '--json']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["versions"]["triptych"] == version("triptych")
    assert found["cpu"]["usable_cores"] >= 1
    assert found["memory"]["total_gib"] > 0
