"""Every architecture of docs/models.md equals transformers on a GPU."""

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
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU, and CI has none"),
]

SMALL = [family for family in (*families.FAMILIES, *families.MULTIMODAL) if family not in families.NOT_ON_GPU]


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("family", SMALL)
def test_gpus_equal_the_reference(tmp_path: Path, family: str, level: int) -> None:
    """Steps run in CUDA graphs, and caches start as NaN."""
    prompts = parity_process.random_prompts(tiny_models.VOCAB_SIZE - 6)
    folder = families.write(family, tmp_path / family)
    backend: Backend = "eager" if family in families.NO_GRAPHS_ON_GPU else "compiled"
    job = Job(
        str(folder), prompts, device="cuda", backend=backend, level=level,
        language_model_only=family in families.MULTIMODAL,
    )  # fmt: skip
    (answers,) = parity_process.run_apart([job])
    assert differences(Reference(folder, torch.float32), prompts, answers) == []
