"""Families and quantized weights that ranks split in their own ways; `test_layouts.py` has the layouts."""

from pathlib import Path

import pytest
import torch

from tests.support import quantized_models, tiny_models
from tests.support.quantized_models import Stored
from tests.support.ranks.questions import COUNT, GREEDY, PROMPTS
from tests.support.ranks.replica import replica
from tests.support.reference import Reference
from tests.support.zoo import families
from worker_svc.quantized.codes import Scheme

EXPERTS = ("--enable-expert-parallel",)

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(240)]


@pytest.mark.parametrize(
    ("family", "pipeline", "flags"),
    [
        ("qwen3", 1, ()),
        ("mixtral", 1, ()),
        ("mixtral", 2, EXPERTS),
        ("qwen2-moe", 1, EXPERTS),
        ("glm4-moe", 1, EXPERTS),
        ("ernie-moe", 1, EXPERTS),
        ("gpt-oss", 1, ()),
        ("deepseek-v2", 1, EXPERTS),
    ],
)
def test_ranks_answer_like_one(family: str, pipeline: int, flags: tuple[str, ...], tmp_path: Path) -> None:
    model = families.write(family, tmp_path / "model")
    check(model, Reference(model, torch.float32), tmp_path, pipeline, flags)


@pytest.mark.parametrize(
    ("stored", "scheme"), [("gptq", Scheme(4, 32)), ("compressed-tensors", Scheme(8, None))]
)
def test_ranks_answer_like_dequantized_weights(stored: Stored, scheme: Scheme, tmp_path: Path) -> None:
    source = tiny_models.write("llama", tmp_path / "source")
    model = quantized_models.write(source, tmp_path / "model", stored, scheme)
    plain = quantized_models.write(source, tmp_path / "float", "float", scheme)
    check(model, Reference(plain, torch.float32), tmp_path)


def check(
    model: Path, reference: Reference, logs: Path, pipeline: int = 1, flags: tuple[str, ...] = ()
) -> None:
    """Compares the greedy answers of two ranks a stage with the reference's."""
    with replica(model, logs, tensor=2, pipeline=pipeline, flags=("--dtype", "float32", *flags)) as running:
        answers = running.generate_all(PROMPTS, COUNT, GREEDY)
    for prompt, tokens in zip(PROMPTS, answers, strict=True):
        assert reference.greedy_mismatch(prompt, tokens) == ""
