"""Replicas of several ranks, as real processes that talk through gloo, behind a real scheduler."""

import signal
import threading
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

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]


def answers(running: Replica) -> list[list[int]]:
    """Returns greedy and seeded answers, of one sequence and of three."""
    greedy = running.generate_all(PROMPTS, COUNT, GREEDY)
    seeded = running.generate_all(PROMPTS, COUNT, SEEDED)
    return [*greedy, *seeded, *running.generate(PROMPTS[1], COUNT, SEEDED, n=3)]


@pytest.mark.parametrize(
    ("family", "tensor", "pipeline", "experts"),
    [
        ("llama", 2, 1, False),
        ("llama", 1, 2, False),
        pytest.param("llama", 2, 2, False, marks=pytest.mark.slow),
        pytest.param("qwen3", 2, 1, False, marks=pytest.mark.slow),
        pytest.param("gemma3", 2, 1, False, marks=pytest.mark.slow),
        pytest.param("gemma3", 1, 2, False, marks=pytest.mark.slow),
        pytest.param("mixtral", 2, 1, False, marks=pytest.mark.slow),
        pytest.param("mixtral", 2, 1, True, marks=pytest.mark.slow),
        pytest.param("qwen2-moe", 2, 1, True, marks=pytest.mark.slow),
    ],
)
def test_ranks_answer_like_one(
    family: str, tensor: int, pipeline: int, experts: bool, tmp_path: Path
) -> None:
    """Greedy answers are those of transformers, and seeded ones those of a replica of one rank."""
    model = tiny_models.write(family, tmp_path / "model")
    flags = (*FLOAT32, "--enable-expert-parallel") if experts else FLOAT32
    with replica(model, tmp_path, tensor=tensor, pipeline=pipeline, flags=flags) as running:
        divided = answers(running)
    reference = Reference(model, torch.float32)
    for prompt, tokens in zip(PROMPTS, divided, strict=False):
        assert reference.greedy_mismatch(prompt, tokens) == ""
    with replica(model, tmp_path, flags=FLOAT32) as running:
        assert answers(running) == divided


@pytest.mark.parametrize(
    ("rank", "with_signal"),
    [
        pytest.param(1, signal.SIGKILL, marks=pytest.mark.slow),
        pytest.param(0, signal.SIGKILL, marks=pytest.mark.slow),
        pytest.param(0, signal.SIGSTOP, marks=pytest.mark.slow),
        pytest.param(1, signal.SIGSTOP, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize(("tensor", "pipeline"), [(2, 1), pytest.param(1, 2, marks=pytest.mark.slow)])
def test_a_lost_rank_loses_no_request(
    rank: int, with_signal: signal.Signals, tensor: int, pipeline: int, tmp_path: Path
) -> None:
    """The other rank ends by itself, the group forms again, and running requests go on with equal tokens."""
    model = tiny_models.write("llama", tmp_path / "model")
    with replica(model, tmp_path, tensor=tensor, pipeline=pipeline, flags=FLOAT32) as running:
        expected = running.generate(PROMPTS[0], 300, GREEDY)
        started, got = threading.Event(), []
        request = threading.Thread(
            target=lambda: got.append(running.generate(PROMPTS[0], 300, GREEDY, started=started))
        )
        request.start()
        assert started.wait(60)
        lost, other = running.ranks[rank], running.ranks[1 - rank]
        lost.send_signal(with_signal)
        assert other.wait(60) == 1
        if with_signal == signal.SIGSTOP:
            lost.send_signal(signal.SIGCONT)
        assert lost.wait(60) != 0
        for each in (0, 1):
            running.start_rank(each)
        request.join(110)
        assert got == [expected]
