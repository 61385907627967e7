"""Programs that `torch.export` makes of a model's graphs, as the vendor's compiler does, follow its rules."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT
from tests.support.rbln.graph_process import Job, Result
from tests.support.rbln.vendor_packages import environment, printed_json
from tests.support.zoo import families

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.npu,
    pytest.mark.slow,
    pytest.mark.timeout(240),
    pytest.mark.filterwarnings("ignore"),  # importing transformers
]


@pytest.mark.parametrize("triton", [False, True])
def test_exported_programs_keep_attention_and_write_caches_in_place(triton: bool, tmp_path: Path) -> None:
    """The vendor's Triton operators declare no write, so a functional form keeps them as they are.

    The compiler's own declare it: a functional form returns the caches of both layers, and would copy them.
    """
    families.write("gemma3", tmp_path)
    job = Job(str(tmp_path), [[5, 6, 7]], 3, triton=triton, block_size=64, max_model_len=64, exports=True)
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.rbln.graph_process", json.dumps([dataclasses.asdict(job)])],
        check=False, capture_output=True, text=True, cwd=ROOT, timeout=200, env=environment(),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (fields,) = printed_json(done.stdout)
    result = Result(**fields)
    assert result.exported == result.operators
    assert len(result.operators) == 4  # both kinds of layers, chunks and decode steps
    assert len(result.written) == (0 if triton else 2)
