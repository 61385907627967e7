"""Every architecture of docs/models.md, and some older ones, equal transformers in float32.

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


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(family, marks=[] if family == "gpt2" else [pytest.mark.slow])
        for family in families.CPU_ONLY
    ],
)
def test_older_families_run_as_graphs(tmp_path: Path, prompts: list[list[int]], family: str) -> None:
    """Graphs of models with dropout, or from transformers' own code, give the reference's outputs."""
    folder = families.write(family, tmp_path)
    # vLLM changes transformers' classes, so the reference runs in another process.
    (answers,) = parity_process.run_apart([Job(str(folder), prompts, backend="compiled")])
    assert differences(Reference(folder, torch.float32), prompts, answers) == []
