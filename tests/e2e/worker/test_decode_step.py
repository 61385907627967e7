"""The bench of a step's kernels, where each operator is timed alone."""

import json
import subprocess
import sys

import pytest

from tests.support.paths import ROOT


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.usefixtures("smollm2")
def test_eager_steps_have_times_for_attention_and_products() -> None:
    command = [sys.executable, "-m", "tests.bench.decode_step", "--quick", "--backend", "eager"]
    output = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=True).stdout
    for step in json.loads(output.splitlines()[-1])["steps_ms"].values():
        assert 0 < step["attention"] < step["linear"]
