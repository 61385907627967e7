"""`triptych run-batch --model` when its stack does not start."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.contract


def test_a_stack_that_does_not_start_is_named(tmp_path: Path) -> None:
    """`triptych up` says what is wrong with the flags that it got, and the batch does not begin."""
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.touch()
    command = (
        *(sys.executable, "-m", "deploy.cli", "run-batch", "-i", str(source), "-o", str(output)),
        *("--model", str(tmp_path), "--max-num-seqs", "0"),
    )
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    first, second = done.stderr.splitlines()
    assert first.startswith("triptych up: --max-num-seqs ")
    assert second == "triptych run-batch: the stack did not start, see above"
    assert not output.exists()
