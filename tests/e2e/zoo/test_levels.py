"""Models of docs/models.md in generated code equal transformers in float32."""

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
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore"),  # importing vLLM and transformers
]

# Below and above the windows of 64 tokens and the chunks of 128.
LENGTHS = (3, 63, 64, 130, 200)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, tiny_models.VOCAB_SIZE, (n,), generator=generator).tolist() for n in LENGTHS]


@pytest.mark.parametrize("family", ["gpt-oss", "deepseek-v2-lite"])
def test_generated_kernels_equal_the_reference(tmp_path: Path, prompts: list[list[int]], family: str) -> None:
    """With -O 2, the kernels between attention layers are generated code."""
    folder = families.write(family, tmp_path)
    answers = parity_process.run(Job(str(folder), prompts, backend="compiled", level=2))
    assert differences(Reference(folder, torch.float32), prompts, answers) == []
