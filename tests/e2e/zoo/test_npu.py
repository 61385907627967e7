"""The column NPU of docs/models.md: what equals transformers there, and what is refused by name."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from tests.support.reference import Reference
from tests.support.worker import parity_process
from tests.support.worker.parity_process import Job, differences
from tests.support.zoo import families
from worker_svc.settings import Backend

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore"),  # importing vLLM and transformers
]

BACKENDS: tuple[Backend, ...] = ("eager", "compiled")
ON_NPU = [
    family for family in (*families.FAMILIES, *families.MULTIMODAL) if family not in families.NOT_ON_NPU
]
# Families that run Triton kernels; the others run the compiler's own kernels.
TRITON = ("qwen3", "gemma3")
# Processes that share the families.
PARTS = 6


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return parity_process.random_prompts()


@pytest.mark.parametrize("part", [ON_NPU[first::PARTS] for first in range(PARTS)], ids=" ".join)
def test_the_npu_equals_the_reference(tmp_path: Path, prompts: list[list[int]], part: Sequence[str]) -> None:
    """An NPU's operators give the reference's outputs, eagerly and in graphs; windows slide in place."""
    folders = {family: families.write(family, tmp_path / family) for family in part}
    jobs = {
        (family, backend): Job(
            str(folder), prompts, device="rbln", backend=backend, window_kind="in_place_window", block_size=1024,
            max_model_len=1536, language_model_only=family in families.MULTIMODAL, triton=family in TRITON,
        )
        for family, folder in folders.items()
        for backend in BACKENDS
    }  # fmt: skip
    answers = dict(zip(jobs, parity_process.run_apart(list(jobs.values())), strict=True))
    wrong = {
        job: found
        for job, answer in answers.items()
        if (found := differences(Reference(folders[job[0]], torch.float32), prompts, answer))
    }
    assert wrong == {}


def test_rbln_cr13_equals_the_reference(
    tmp_path: Path, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Windows are in paged blocks there, and rows are sorted by length."""
    monkeypatch.setenv("RBLN_TARGET_SOC", "RBLN-CR13")
    folder = families.write("gemma3", tmp_path)
    (answer,) = parity_process.run_apart(
        [
            Job(
                str(folder), prompts, device="rbln", backend="compiled", window_kind="paged_window", block_size=1024,
                max_model_len=1536,
            )
        ]
    )  # fmt: skip
    assert not differences(Reference(folder, torch.float32), prompts, answer)


@pytest.mark.parametrize("family", families.NOT_ON_NPU)
def test_an_npu_refuses_by_name(tmp_path: Path, prompts: list[list[int]], family: str) -> None:
    job = Job(
        str(families.write(family, tmp_path)), prompts, device="rbln", backend="compiled", block_size=1024,
        max_model_len=1536, language_model_only=family in families.MULTIMODAL,
    )  # fmt: skip
    with pytest.raises(AssertionError, match=f"ConfigurationRefused: .*{families.NOT_ON_NPU[family]}"):
        parity_process.run_apart([job])
