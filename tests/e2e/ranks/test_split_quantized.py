"""Ranks split quantized weights by outputs, and by whole groups of inputs."""

from pathlib import Path

import pytest
import torch

from tests.support import quantized_models, tiny_models
from tests.support.quantized_models import Stored
from tests.support.ranks.questions import PROMPTS, answers
from tests.support.ranks.replica import replica
from tests.support.reference import Reference
from worker_svc.quantized.codes import Scheme

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(240)]


@pytest.mark.parametrize(
    ("stored", "scheme"), [("gptq", Scheme(4, 32)), ("compressed-tensors", Scheme(8, None))]
)
def test_ranks_answer_like_dequantized_weights(stored: Stored, scheme: Scheme, tmp_path: Path) -> None:
    """Two ranks' greedy answers are those of transformers with the dequantized weights."""
    source = tiny_models.write("llama", tmp_path / "source")
    model = quantized_models.write(source, tmp_path / "model", stored, scheme)
    with replica(model, tmp_path, tensor=2, flags=("--dtype", "float32")) as running:
        divided = answers(running)
    plain = quantized_models.write(source, tmp_path / "float", "float", scheme)
    reference = Reference(plain, torch.float32)
    for prompt, tokens in zip(PROMPTS, divided, strict=False):
        assert reference.greedy_mismatch(prompt, tokens) == ""
