"""Every architecture of docs/models.md, and some older ones, equals transformers in float32.

Prompts run in chunks, decode steps in every bucket, with garbage in all padding.
"""

from pathlib import Path

import pytest
import torch

from tests.support import tiny_models
from tests.support.reference import Reference
from tests.support.worker import parity_process
from tests.support.worker.harness import Harness, load
from tests.support.worker.parity_process import Job, differences
from tests.support.zoo import families
from worker_svc.execution.memory_budget import working_bytes
from worker_svc.model_files.checkpoint import Checkpoint
from worker_svc.settings import Backend

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore"),  # importing vLLM and transformers
]

BACKENDS: tuple[Backend, ...] = ("eager", "compiled")
FAMILIES = tuple(families.FAMILIES)
# In the quick tests: full attention, windows, sinks, and experts with a bias.
QUICK = ("llama", "gemma3", "gpt-oss", "glm4-moe")


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return parity_process.random_prompts()


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
@pytest.mark.parametrize("family", families.CPU_ONLY)
def test_older_families_run_as_graphs(tmp_path: Path, prompts: list[list[int]], family: str) -> None:
    """Graphs of models with dropout, or from transformers' own code, give the reference's outputs."""
    folder = families.write(family, tmp_path)
    # vLLM changes transformers' classes, so the reference runs in another process.
    (answers,) = parity_process.run_apart([Job(str(folder), prompts, backend="compiled")])
    assert differences(Reference(folder, torch.float32), prompts, answers) == []


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gpt-oss", "deepseek-v2-lite"])
def test_generated_kernels_equal_the_reference(tmp_path: Path, prompts: list[list[int]], family: str) -> None:
    folder = families.write(family, tmp_path)
    answers = parity_process.run(Job(str(folder), prompts, backend="compiled", level=2))
    assert differences(Reference(folder, torch.float32), prompts, answers) == []


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(family, marks=[] if family in QUICK else [pytest.mark.slow])
        for family in tiny_models.FAMILIES
    ],
)
def test_memory_is_estimated(tmp_path: Path, family: str) -> None:
    folder = families.write(family, tmp_path)
    model = load(folder, "float32")
    harness = Harness(model, max_num_seqs=8, decode_buckets=parity_process.BUCKETS)
    taken = harness.runner.graphs.num_bytes
    estimated = working_bytes(model.size, (harness.shapes.chunk, *parity_process.BUCKETS), 0, recorded=True)
    # The CPU's expert kernels use less memory: they do not store what single experts compute.
    assert taken <= estimated <= (6 if family in tiny_models.EXPERT_FAMILIES else 3) * taken
    # Beside the stored weights there is a table of rotary embeddings for each kind of layer.
    # GLM rotates half of each head.
    table = 4 * (16 if family == "glm4-moe" else 32) * tiny_models.CONTEXT
    beside = model.size.weight_bytes - Checkpoint.open(folder).num_bytes()
    assert beside // table == (2 if family == "gemma3" else 1)
    assert beside % table < 100
