"""Model families that the ranks of a stage split in their own ways; `test_layouts.py` has the layouts."""

from pathlib import Path

import pytest
import torch

from tests.support import tiny_models
from tests.support.ranks.replica import Replica, replica
from tests.support.reference import Reference

# Shorter and longer than a chunk, and two that share a prefix of two chunks.
SHARED = [5 + place * 7 % 200 for place in range(140)]
PROMPTS = ([3, 9, 27, 81], SHARED + [11] * 20, SHARED + [12] * 9, [40 + place % 90 for place in range(70)])
COUNT = 24
GREEDY = {"temperature": 0.0}
SEEDED = {"temperature": 0.9, "top_p": 0.9, "seed": 7}
FLOAT32 = ("--dtype", "float32")

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(240)]


def answers(running: Replica) -> list[list[int]]:
    """Returns greedy and seeded answers, of one sequence and of three."""
    greedy = running.generate_all(PROMPTS, COUNT, GREEDY)
    seeded = running.generate_all(PROMPTS, COUNT, SEEDED)
    return [*greedy, *seeded, *running.generate(PROMPTS[1], COUNT, SEEDED, n=3)]


@pytest.mark.parametrize(
    ("family", "flags"),
    [("qwen3", ()), ("mixtral", ()), ("qwen2-moe", ("--enable-expert-parallel",))],
)
def test_ranks_answer_like_one(family: str, flags: tuple[str, ...], tmp_path: Path) -> None:
    """Greedy answers are those of transformers, and seeded ones those of a replica of one rank."""
    model = tiny_models.write(family, tmp_path / "model")
    with replica(model, tmp_path, tensor=2, flags=(*FLOAT32, *flags)) as running:
        divided = answers(running)
    reference = Reference(model, torch.float32)
    for prompt, tokens in zip(PROMPTS, divided, strict=False):
        assert reference.greedy_mismatch(prompt, tokens) == ""
    with replica(model, tmp_path, flags=FLOAT32) as running:
        assert answers(running) == divided
