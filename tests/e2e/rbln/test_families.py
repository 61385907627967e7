"""Every supported family runs on device rbln with the vendor's fakes, and gives what rbln-check gives."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Literal

import pytest

from tests.support.paths import ROOT
from tests.support.rbln.graph_process import Job, Result
from tests.support.rbln.vendor_packages import environment, printed_json
from tests.support.tiny_models import FAMILIES as OLDER
from tests.support.zoo import families

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.npu,
    pytest.mark.slow,
    pytest.mark.timeout(420),
    pytest.mark.filterwarnings("ignore"),  # importing transformers
]

# Longer than a chunk and than a window, and shorter than both.
PROMPTS = [list(range(3, 203)), [5, 6, 7]]
NUM_TOKENS = 6
FAMILIES = (*OLDER, "mistral", "gpt-oss", "deepseek-v2")


def run_all(folder: Path, backend: Literal["rbln", "rbln-check"]) -> dict[str, Result]:
    """Generates with every family in one process; Gemma 3 runs Triton kernels."""
    jobs = [
        Job(
            str(folder / family), PROMPTS, NUM_TOKENS, triton=family == "gemma3", block_size=1024, max_model_len=1024,
            backend=backend,
        )
        for family in FAMILIES
    ]  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.rbln.graph_process", json.dumps([dataclasses.asdict(job) for job in jobs])],
        check=False, capture_output=True, text=True, cwd=ROOT, timeout=200, env=environment(),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    results = [Result(**fields) for fields in printed_json(done.stdout)]
    return dict(zip(FAMILIES, results, strict=True))


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Result], dict[str, Result]]:
    """By family, the results with the vendor's fakes, and those with rbln-check."""
    folder = tmp_path_factory.mktemp("families")
    for family in FAMILIES:
        families.write(family, folder / family)
    return run_all(folder, "rbln"), run_all(folder, "rbln-check")


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_runs_on_device_tensors(
    results: tuple[dict[str, Result], dict[str, Result]], family: str
) -> None:
    """Tokens are those of rbln-check, which other tests compare with transformers; caches are on the NPU."""
    on_npu, on_host = (each[family] for each in results)
    assert on_npu.tokens == on_host.tokens
    assert [len(tokens) for tokens in on_npu.tokens] == [NUM_TOKENS] * len(PROMPTS)
    assert on_npu.cache_devices == ["rbln"]
    # Prefill and decode, each with an output head and an argmax.
    assert on_host.graphs == 6
    namespace = "rbln_triton_ops" if family == "gemma3" else "rbln_custom_ops"
    assert {name.partition(".")[0] for name in on_host.operators} == {namespace}
