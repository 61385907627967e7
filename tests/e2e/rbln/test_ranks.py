"""Replicas of several ranks on device rbln, with the vendor's packages."""

import re
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from signal import SIGKILL

import pytest
import torch

from deploy.checks import parity
from protos.triptych.v1 import common_pb2
from tests.support import tiny_models
from tests.support.ranks.replica import Answer, Replica, replica
from tests.support.rbln.vendor_packages import environment
from tests.support.reference import Reference

# Shorter and longer than a chunk.
PROMPTS = ([3, 9, 27, 81], [40 + place % 90 for place in range(70)])
COUNT, LONG = 12, 100
# Fewer sizes are fewer graphs to compile.
SHAPES = ("--block-size", "1024", "--max-num-seqs", str(len(PROMPTS)))
CHECK = ("--rbln-backend", "rbln-check")
EXPERTS = ("--enable-expert-parallel",)
META = {"VLLM_RBLN_USE_DEVICE_TENSOR": "0"}

pytestmark = [pytest.mark.e2e, pytest.mark.npu, pytest.mark.slow, pytest.mark.timeout(400)]


@pytest.mark.parametrize(
    ("family", "tensor", "pipeline", "flags", "variables"),
    [
        ("llama", 2, 1, (), {}),
        ("llama", 2, 1, (), META),
        ("llama", 1, 2, (), {}),
        ("llama", 2, 2, CHECK, {}),
        ("gemma3", 2, 1, (), {"RBLN_USE_CUSTOM_KERNEL": "1"}),
        ("mixtral", 2, 1, EXPERTS, {}),
    ],
)
def test_ranks_answer_like_transformers(
    family: str, tensor: int, pipeline: int, flags: tuple[str, ...], variables: dict[str, str], tmp_path: Path
) -> None:
    """The fake compiler refuses collectives whose group it is not told. Float32 is summed on the hosts."""
    model = tiny_models.write(family, tmp_path / "model")
    with replica(
        model, tmp_path, tensor=tensor, pipeline=pipeline, device="rbln",
        flags=("--dtype", "float32", *flags), scheduler_flags=SHAPES, variables=environment(**variables),
    ) as running:  # fmt: skip
        answers = running.generate_all(PROMPTS, COUNT, {"temperature": 0.0})
    reference = Reference(model, torch.float32)
    for prompt, tokens in zip(PROMPTS, answers, strict=True):
        assert reference.greedy_mismatch(prompt, tokens) == ""


def test_experts_are_split_in_half_precision(tmp_path: Path) -> None:
    """Float16 is summed on the NPUs, by the vendor's group."""
    model = tiny_models.write("mixtral", tmp_path / "model")
    with half_precision(model, tmp_path, *EXPERTS, tensor=2) as running:
        answers = running.ask_all(PROMPTS, greedy(COUNT))
    assert collectives_of(tmp_path) == [{"all-reduce", "all-gather"}] * 2
    check_answers(model, answers, COUNT)


@pytest.mark.parametrize(
    ("tensor", "pipeline", "collectives"), [(2, 1, {"all-reduce", "all-gather"}), (1, 2, {"message"})]
)
def test_half_precision_survives_a_lost_rank(
    tensor: int, pipeline: int, collectives: set[str], tmp_path: Path
) -> None:
    """A lost request's tokens are computed again in chunks, which round unlike single rows.

    So another token may be the likeliest if two of them differ by less than rounding.
    """
    model = tiny_models.write("llama", tmp_path / "model")
    with half_precision(model, tmp_path, tensor=tensor, pipeline=pipeline) as running:
        started = [threading.Event() for _ in PROMPTS]
        with ThreadPoolExecutor(len(PROMPTS)) as pool:
            requests = [
                pool.submit(running.ask, prompt, greedy(LONG), started=event)
                for prompt, event in zip(PROMPTS, started, strict=True)
            ]
            assert all(event.wait(120) for event in started)
            running.lose(1, SIGKILL)
            assert not any(request.done() for request in requests)
            answers = [answer for request in requests for answer in request.result()]
    assert collectives_of(tmp_path) == [collectives] * 2
    check_answers(model, answers, LONG)


def half_precision(model: Path, logs: Path, *flags: str, **layout: int) -> AbstractContextManager[Replica]:
    return replica(
        model, logs, device="rbln", flags=("--dtype", "float16", *flags), scheduler_flags=SHAPES,
        variables=environment(), **layout,
    )  # fmt: skip


def greedy(count: int) -> common_pb2.SamplingParams:
    return common_pb2.SamplingParams(max_tokens=count, ignore_eos=True, temperature=0.0, logprobs=5)


def collectives_of(logs: Path) -> list[set[str]]:
    """Returns the kinds of collectives that each of two ranks ran in the stub."""
    return [
        {*re.findall(r"^stub rccl ran: (.*)$", (logs / f"rank{rank}.log").read_text(), re.MULTILINE)}
        for rank in range(2)
    ]


def check_answers(model: Path, answers: Sequence[Answer], count: int) -> None:
    """Compares each token and its log-probability with transformers', given the tokens before it.

    They may differ by four times the effect of float16 on transformers, as in `triptych doctor --parity`.
    """
    assert [len(answer.tokens) for answer in answers] == [count] * len(PROMPTS)
    reference = parity.Reference(model, torch.float16, trust_remote_code=False)
    reference.compare(
        [
            parity.Answer(prompt, answer.tokens, answer.logprobs)
            for prompt, answer in zip(PROMPTS, answers, strict=True)
        ]
    )
