"""The reference of `triptych doctor --parity` finds what is wrong with an answer."""

from pathlib import Path

import pytest
import torch

from deploy.checks.check_results import CheckFailed
from deploy.checks.parity import Answer, Reference
from tests.support import reference, tiny_models
from tests.support.sampling_params import token_logprobs

PROMPT = [11, 40, 7, 99]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model."""
    return tiny_models.write("llama", tmp_path_factory.mktemp("model"))


def right_answer(folder: Path) -> Answer:
    model = reference.Reference(folder, torch.float32)
    tokens = model.generate(PROMPT, 6)
    rows = model.logprobs(PROMPT, tokens)
    entries = [
        token_logprobs(float(row[token]), 1, (token, float(row[token])))
        for row, token in zip(rows, tokens, strict=True)
    ]
    return Answer(PROMPT, tokens, entries)


def open_reference(folder: Path, dtype: torch.dtype = torch.float32) -> Reference:
    return Reference(folder, dtype, trust_remote_code=False)


def test_a_right_answer_agrees(folder: Path) -> None:
    """The text says how far the answer is off, and in half precision what rounding explains."""
    answer = right_answer(folder)
    assert "greedy tokens agree, log-probabilities within" in open_reference(folder).compare([answer])
    assert "rounding alone gives" in open_reference(folder, torch.bfloat16).compare([answer])


def test_another_token_is_found(folder: Path) -> None:
    answer = right_answer(folder)
    answer.tokens[3] = (answer.tokens[3] + 1) % 256
    with pytest.raises(CheckFailed, match=r"step 3 after a prompt of 4 tokens: .* try --dtype float32"):
        open_reference(folder).compare([answer])


@pytest.mark.parametrize("value", [-0.5, float("nan")])
def test_wrong_log_probabilities_are_found(folder: Path, value: float) -> None:
    answer = right_answer(folder)
    answer.logprobs[2].logprob = value
    with pytest.raises(CheckFailed, match="step 2 after a prompt of 4 tokens"):
        open_reference(folder, torch.bfloat16).compare([answer])
