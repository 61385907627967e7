"""Every supported family equals transformers, in every decode bucket, with garbage in padding."""

from pathlib import Path

import pytest
import torch

from tests.support import tiny_models
from tests.support.reference import Reference
from tests.support.worker import parity_process
from tests.support.worker.harness import Harness, load
from tests.support.worker.parity_process import Answer, Job, differences
from worker_svc.execution.memory_budget import working_bytes
from worker_svc.model_files.checkpoint import Checkpoint
from worker_svc.settings import Backend

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore"),  # importing vLLM and transformers
]

BACKENDS: tuple[Backend, ...] = ("eager", "compiled")
# Families that run Triton kernels on an NPU; the others run the compiler's own kernels.
TRITON = ("qwen3", "gemma3")
# Below and above the windows of 64 tokens and the chunks of 128.
LENGTHS = (3, 63, 64, 130, 200)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The folder of a random model of each family."""
    base = tmp_path_factory.mktemp("families")
    return {family: tiny_models.write(family, base / family) for family in tiny_models.FAMILIES}


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, tiny_models.VOCAB_SIZE, (n,), generator=generator).tolist() for n in LENGTHS]


@pytest.fixture(scope="module")
def references(folders: dict[str, Path]) -> dict[str, Reference]:
    return {family: Reference(folder, torch.float32) for family, folder in folders.items()}


@pytest.fixture(scope="module")
def on_npu(folders: dict[str, Path], prompts: list[list[int]]) -> dict[tuple[str, Backend], list[Answer]]:
    """The answers of backend rbln-check for all families; windows slide in place there."""
    jobs = {
        (family, backend): Job(
            str(folder), prompts, device="rbln", backend=backend, window_kind="in_place_window", block_size=1024,
            max_model_len=1536, triton=family in TRITON,
        )
        for family, folder in folders.items()
        for backend in BACKENDS
    }  # fmt: skip
    return dict(zip(jobs, parity_process.run_apart(list(jobs.values())), strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("family", tiny_models.FAMILIES)
def test_the_cpu_equals_the_reference(
    folders: dict[str, Path], references: dict[str, Reference], prompts: list[list[int]], family: str,
    backend: Backend,
) -> None:  # fmt: skip
    """In float32 on the CPU, eager steps and graphs give the reference's outputs."""
    answers = parity_process.run(Job(str(folders[family]), prompts, backend=backend))
    assert differences(references[family], prompts, answers) == []


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("family", tiny_models.FAMILIES)
def test_the_npu_equals_the_reference(
    references: dict[str, Reference], on_npu: dict[tuple[str, Backend], list[Answer]], prompts: list[list[int]],
    family: str, backend: Backend,
) -> None:  # fmt: skip
    """In float32, an NPU's operators give the reference's outputs, eagerly and in graphs."""
    assert differences(references[family], prompts, on_npu[family, backend]) == []


@pytest.mark.parametrize("family", tiny_models.FAMILIES)
def test_memory_is_estimated(folders: dict[str, Path], family: str) -> None:
    """Graphs use at most the estimated memory, and not much less; the estimate of weights is exact."""
    model = load(folders[family], "float32")
    harness = Harness(model, max_num_seqs=8, decode_buckets=parity_process.BUCKETS)
    taken = harness.runner.graphs.num_bytes
    estimated = working_bytes(model.size, (harness.shapes.chunk, *parity_process.BUCKETS), 0, recorded=True)
    # The CPU's expert kernels use less memory: they do not store what single experts compute.
    assert taken <= estimated <= (6 if family in tiny_models.EXPERT_FAMILIES else 3) * taken
    # Beside the stored weights there is a table of rotary embeddings for each kind of layer.
    # GLM rotates half of each head.
    table = 4 * (16 if family == "glm4-moe" else 32) * tiny_models.CONTEXT
    beside = model.size.weight_bytes - Checkpoint.open(folders[family]).num_bytes()
    assert beside // table == (2 if family == "gemma3" else 1)
    assert beside % table < 100


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", *tiny_models.EXPERT_FAMILIES])
def test_answers_vary(on_npu: dict[tuple[str, Backend], list[Answer]], family: str) -> None:
    """The random models give different tokens for different prompts."""
    tokens = [tuple(answer.tokens[-4:]) for answer in on_npu[family, "compiled"]]
    assert len(set(tokens)) == len(tokens)
