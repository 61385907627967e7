"""The quick form of the bench of attacks."""

import json
import subprocess
import sys

import pytest

from tests.support.paths import ROOT

pytestmark = [pytest.mark.e2e, pytest.mark.stack, pytest.mark.slow, pytest.mark.timeout(900)]


def test_attacks_of_one_tenant_refuse_no_request_of_another() -> None:
    """Not one of the quick form's attacks, of every kind, makes the other tenant's small requests fail."""
    command = [sys.executable, "-m", "tests.bench.hostile", "--quick"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout.splitlines()[-1])
    assert figures["attacks"] > 15
    assert figures["refused_to_the_other"] == 0, done.stdout
