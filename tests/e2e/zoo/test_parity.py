"""Every architecture of docs/models.md equals transformers in float32.

Prompts run in chunks, decode steps in every bucket, with garbage in all padding.
"""

from pathlib import Path

import pytest
import torch

from tests.support import tiny_models
from tests.support.reference import Reference
from tests.support.worker import parity_process
from tests.support.worker.parity_process import Job, differences
from tests.support.zoo import families
from worker_svc.settings import Backend

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore"),  # importing vLLM and transformers
]

BACKENDS: tuple[Backend, ...] = ("eager", "compiled")
# Another file tests the older families.
FAMILIES = [family for family in families.FAMILIES if family not in tiny_models.FAMILIES]
# One quick test for each kind of attention that only these models have.
QUICK = ("gpt-oss",)
ON_NPU = [family for family in (*FAMILIES, *families.MULTIMODAL) if family not in families.NOT_ON_NPU]
# Below and above the windows of 64 tokens and the chunks of 128.
LENGTHS = (3, 63, 64, 130, 200)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, tiny_models.VOCAB_SIZE, (n,), generator=generator).tolist() for n in LENGTHS]


@pytest.mark.parametrize(
    "family",
    [pytest.param(family, marks=[] if family in QUICK else [pytest.mark.slow]) for family in FAMILIES],
)
def test_the_cpu_equals_the_reference(tmp_path: Path, prompts: list[list[int]], family: str) -> None:
    """On the CPU, eager steps and graphs give the reference's outputs, which differ from prompt to prompt."""
    folder = families.write(family, tmp_path)
    reference = Reference(folder, torch.float32)
    for backend in BACKENDS:
        answers = parity_process.run(Job(str(folder), prompts, backend=backend))
        assert differences(reference, prompts, answers) == []
        assert len({tuple(answer.tokens[-4:]) for answer in answers}) == len(answers)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gpt-oss", "deepseek-v2-lite"])
def test_generated_kernels_equal_the_reference(tmp_path: Path, prompts: list[list[int]], family: str) -> None:
    """With -O 2, the kernels between attention layers are generated code."""
    folder = families.write(family, tmp_path)
    answers = parity_process.run(Job(str(folder), prompts, backend="compiled", level=2))
    assert differences(Reference(folder, torch.float32), prompts, answers) == []


@pytest.mark.slow
def test_the_npu_equals_the_reference(tmp_path: Path, prompts: list[list[int]]) -> None:
    """An NPU's operators give the reference's outputs, eagerly and in graphs; windows slide in place."""
    folders = {family: families.write(family, tmp_path / family) for family in ON_NPU}
    jobs = {
        (family, backend): Job(
            str(folder), prompts, device="rbln", backend=backend, window_kind="in_place_window", block_size=1024,
            max_model_len=1536, language_model_only=family in families.MULTIMODAL,
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


@pytest.mark.slow
@pytest.mark.parametrize("family", families.NOT_ON_NPU)
def test_an_npu_refuses_by_name(tmp_path: Path, prompts: list[list[int]], family: str) -> None:
    """The line names what an NPU does not run."""
    job = Job(
        str(families.write(family, tmp_path)), prompts, device="rbln", backend="compiled", block_size=1024,
        max_model_len=1536, language_model_only=family in families.MULTIMODAL,
    )  # fmt: skip
    with pytest.raises(AssertionError, match=f"ConfigurationRefused: .*{families.NOT_ON_NPU[family]}"):
        parity_process.run_apart([job])
