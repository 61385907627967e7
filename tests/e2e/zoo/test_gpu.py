"""Every architecture of docs/models.md equals transformers on a GPU."""

from pathlib import Path

import pytest
import torch

from tests.support import tiny_models
from tests.support.reference import Reference
from tests.support.worker import parity_process
from tests.support.worker.parity_process import Job, differences
from tests.support.zoo import families

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU, and CI has none"),
]

SMALL = [family for family in (*families.FAMILIES, *families.MULTIMODAL) if family not in families.NOT_ON_GPU]
LENGTHS = (3, 63, 64, 130, 200)


def test_gpus_equal_the_reference(tmp_path: Path) -> None:
    """Steps run in CUDA graphs, and caches start as NaN."""
    generator = torch.Generator().manual_seed(1)
    prompts = [
        torch.randint(3, tiny_models.VOCAB_SIZE - 6, (n,), generator=generator).tolist() for n in LENGTHS
    ]
    folders = {family: families.write(family, tmp_path / family) for family in SMALL}
    jobs = [
        Job(
            str(folder), prompts, device="cuda", backend="compiled", level=1,
            language_model_only=family in families.MULTIMODAL,
        )
        for family, folder in folders.items()
    ]  # fmt: skip
    answers = parity_process.run_apart(jobs)
    wrong = {
        family: found
        for (family, folder), answer in zip(folders.items(), answers, strict=True)
        if (found := differences(Reference(folder, torch.float32), prompts, answer))
    }
    assert wrong == {}
