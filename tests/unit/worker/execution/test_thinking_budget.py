"""The end of a thought, whatever else a request asks for."""

from typing import Any

import pytest
import torch

from protos.steps import Decode, Prefill
from tests.support.sampling_params import sampling_params, thinking_budget
from tests.support.worker.replay_worker import Noise, ReplayWorker, admission


def generate(count: int, *, captured: bool, grammar: str = "", **fields: Any) -> tuple[list[int], list[Any]]:
    """Returns new tokens of a request alone, and their log-probabilities."""
    worker = ReplayWorker(captured=captured)
    params = sampling_params(**{"temperature": 0.0, **fields})
    outputs = worker.run(admit=[admission(0, (5,), params, grammar)], work=Prefill(0, 0, 1, sample=True))
    while sum(len(output.token_ids) for output in outputs) < count:
        outputs += worker.run(work=Decode((0,), 1))
    assert all(output.error is None for output in outputs)
    return (
        [token for output in outputs for token in output.token_ids],
        [entry for output in outputs for entry in output.logprobs],
    )


CLOSE = (201, 202, 203)


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"seed": 3, "temperature": 1.0},
        {"seed": 3, "temperature": 0.7, "top_p": 0.5, "top_k": 4},
        {"allowed_token_ids": (4, 5, 6)},
        {"bad_words": ((201,), (202, 203))},
        {"logit_bias": {201: -100.0, 202: -100.0}},
        {"stop_token_ids": (203,), "min_tokens": 8},
        {"frequency_penalty": 2.0, "presence_penalty": 2.0, "repetition_penalty": 1.9},
    ],
    ids=str,
)
@pytest.mark.parametrize("tokens", [0, 1, 5])
def test_the_end_comes_after_the_budget(tokens: int, fields: dict[str, Any], captured: bool) -> None:
    budget = thinking_budget(tokens, end=(202,), close=CLOSE)
    found, _ = generate(12, captured=captured, thinking_budget=budget, **fields)
    free, _ = generate(12, captured=captured, **fields)
    assert found[:tokens] == free[:tokens]
    assert tuple(found[tokens : tokens + 3]) == CLOSE
    assert CLOSE[0] not in found[tokens + 3 :]


@pytest.mark.parametrize("captured", [False, True])
def test_log_probabilities_of_the_end_are_those_of_the_model(captured: bool) -> None:
    budget = thinking_budget(2, end=(202,), close=CLOSE)
    found, logprobs = generate(6, captured=captured, thinking_budget=budget, logprobs=2)
    known, model = torch.tensor([5, *found[:-1]]), Noise()
    rows = model.logits(model.forward(known, torch.arange(len(known)), {})).log_softmax(-1)
    for row, token, entry in zip(rows, found, logprobs, strict=True):
        assert entry.logprob == pytest.approx(float(row[token]), abs=1e-4)
        assert list(entry.top_token_ids) == row.topk(2).indices.tolist()


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("fields", [{}, {"seed": 4, "temperature": 0.8, "top_k": 9}], ids=str)
def test_the_end_waits_for_its_grammar(fields: dict[str, Any], captured: bool) -> None:
    """Odd and even tokens alternate, and the end is an odd one, as within a character of several tokens."""
    budget = thinking_budget(2, end=(201,))
    found, _ = generate(8, captured=captured, grammar="2 0 1", thinking_budget=budget, **fields)
    free, _ = generate(3, captured=captured, grammar="2 0 1", **fields)
    assert found[:4] == [*free[:3], 201]
    assert 201 not in found[4:]


@pytest.mark.parametrize("readmitted", range(6))
def test_a_grammar_may_refuse_the_rest_of_an_end(readmitted: int) -> None:
    """The thought is over with its marker, though the grammar does not allow the line break after it."""
    params = sampling_params(temperature=0.0, thinking_budget=thinking_budget(1, end=(19,), close=(19, 8)))
    known, worker, grammar = [5], ReplayWorker(), "10 9 9 1 9 9 9 9 9"
    while len(known) < 8:
        admit = [admission(0, known, params, grammar, prompt=1)]
        (output,) = worker.run(admit=admit, work=Prefill(0, 0, len(known), sample=True))
        known += output.token_ids
        while len(known) < 8 and len(known) != 2 + readmitted:
            known += worker.run(work=Decode((0,), 1))[0].token_ids
        worker.run(release=(0,))
    assert known[2] == 19
    assert 19 not in known[3:]


def test_a_grammar_does_not_write_ahead_of_a_budget() -> None:
    """Each token is checked, though the grammar knows the next ones."""
    budget = thinking_budget(1, start=(8,), end=(9,), opened=False)
    worker = ReplayWorker()
    params = sampling_params(temperature=0.0, thinking_budget=budget)
    (output,) = worker.run(
        admit=[admission(0, (5,), params, "300 7 8 7")], work=Prefill(0, 0, 1, sample=True)
    )
    assert output.token_ids == (7,)
