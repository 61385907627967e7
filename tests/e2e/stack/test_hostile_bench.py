"""The quick form of the bench of attacks."""

import json
import subprocess
import sys

import pytest

from tests.support.paths import ROOT

pytestmark = [pytest.mark.e2e, pytest.mark.stack, pytest.mark.slow, pytest.mark.timeout(480)]

# Of the bench's aims, because other processes may use the cores: stops of seconds and GiB fail.
LOOP_TO_AIM, GROWTH_TO_AIM = 20, 8


def test_attacks_of_one_tenant_hold_up_no_other() -> None:
    """No quick attack, of any kind, fails another tenant's requests, stops the loop for long or takes GiB."""
    command = [sys.executable, "-m", "tests.bench.hostile", "--quick"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout.splitlines()[-1])
    assert figures["attacks"] > 15
    assert figures["refused_to_the_other"] == 0, done.stdout
    assert figures["ratios"]["loop_ms_to_aim"] < LOOP_TO_AIM, done.stdout
    assert figures["ratios"]["growth_mib_to_aim"] < GROWTH_TO_AIM, done.stdout
