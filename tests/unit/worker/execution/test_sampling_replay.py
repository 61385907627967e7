"""A seeded request gives the same tokens alone, in any batch and order, after preemption and after a replay.

The model's logits depend only on the tokens so far and are computed row by row, so only sampling could depend
on other requests. Tests in `tests/e2e` check the same for real models.
"""

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from protos.errors import Internal
from protos.steps import Decode, Prefill
from protos.triptych.v1 import common_pb2
from tests.support.sampling_params import changed, sampling_params
from tests.support.worker.replay_worker import (
    NEW,
    PLAIN,
    REQUESTS,
    SIZES,
    VOCAB,
    Noise,
    ReplayWorker,
    admission,
)


def alone(index: int) -> tuple[list[int], list[common_pb2.TokenLogprobs]]:
    """Returns all tokens of a request that runs alone, and the log-probabilities of its sampled ones."""
    worker, known = ReplayWorker(), list(REQUESTS[index][1])
    worker.admit(index, known, 0)
    while len(known) < len(REQUESTS[index][1]) + NEW:
        worker.decode({index: known})
    return known, worker.logprobs[index]


def assert_same(
    found: Sequence[common_pb2.TokenLogprobs], expected: Sequence[common_pb2.TokenLogprobs]
) -> None:
    """Checks that log-probabilities are equal, except for rounding."""
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert (one.rank, one.top_token_ids) == (other.rank, other.top_token_ids)
        assert [one.logprob, *one.top_logprobs] == pytest.approx(
            [other.logprob, *other.top_logprobs], abs=1e-4
        )


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize(
    "order", [*range(4), *(pytest.param(order, marks=pytest.mark.slow) for order in range(4, 12))]
)
def test_neighbours_order_and_preemption_change_nothing(order: int, captured: bool) -> None:
    expected = {index: alone(index) for index in range(len(REQUESTS))}
    chance = random.Random(order)
    workers = [ReplayWorker(captured=captured)]
    known = {index: list(REQUESTS[index][1]) for index in range(len(REQUESTS))}
    waiting, preempted = chance.sample(range(len(REQUESTS)), len(REQUESTS)), 0
    running: dict[int, list[int]] = {}
    while waiting or running:
        worker = workers[-1]
        free = [slot for slot in range(SIZES.max_num_seqs) if slot not in worker.slots.values()]
        if waiting and free and chance.random() < 0.7:
            index = waiting.pop(0)
            worker.admit(index, known[index], chance.choice(free))
            running[index] = known[index]
        elif running and chance.random() < 0.15:
            index = chance.choice(list(running))
            del running[index]
            worker.release(index)
            waiting.append(index)
            preempted += 1
        elif running and chance.random() < 0.03:
            waiting += running
            running = {}
            workers.append(ReplayWorker(captured=captured))  # the old one is lost
        elif running:
            some = chance.sample(list(running), chance.randint(1, len(running)))
            worker.decode({index: running[index] for index in some})
        for index in [one for one in running if len(known[one]) >= len(REQUESTS[one][1]) + NEW]:
            del running[index]
            worker.release(index)
    assert preempted
    assert known == {index: tokens for index, (tokens, _) in expected.items()}
    for index, (_, logprobs) in expected.items():
        assert_same([entry for worker in workers for entry in worker.logprobs.get(index, [])], logprobs)
    assert sum(worker.constraints.num_redrawn for worker in workers) > NEW


@pytest.mark.parametrize("captured", [False, True])
def test_log_probabilities_ignore_grammars(captured: bool) -> None:
    worker, model, known = ReplayWorker(captured=captured), Noise(), [52]
    worker.admit(9, known, 0)
    for _ in range(4):
        worker.decode({9: known})
    assert worker.constraints.num_redrawn >= 4
    states = model.forward(torch.tensor(known[:-1]), torch.arange(len(known) - 1), {})
    rows = model.logits(states).log_softmax(-1)
    for row, token, entry in zip(rows, known[1:], worker.logprobs[9], strict=True):
        assert entry.logprob == pytest.approx(float(row[token]), abs=1e-4)
        assert entry.rank == int((row > row[token]).sum()) + 1
        assert list(entry.top_token_ids) == row.topk(3).indices.tolist()


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("sampling", [PLAIN, sampling_params(seed=3), sampling_params(seed=3, top_k=5)])
def test_a_grammar_and_parameters_without_a_common_token_fail(
    sampling: common_pb2.SamplingParams, captured: bool
) -> None:
    """The request fails in prefill or decode with advice; the other request continues."""
    for start in (0, 8):  # no first token, or no second one, is allowed by both
        worker, known = ReplayWorker(captured=captured), [4, 4]
        worker.admit(3, known, 1)
        nothing = changed(sampling, allowed_token_ids=(7, 8))
        admit = [admission(0, (5,), nothing, f"100 {start} 0")]
        (output,) = worker.run(admit=admit, work=Prefill(0, 0, 1, sample=True))
        if start:
            assert (output.token_ids, output.error) == ((8,), None)
            output, other = worker.run(work=Decode((0, 1), 2))
            known.extend(other.token_ids)
        assert output.error is not None
        assert output.error.message.startswith("no token is left that both the grammar and")
        worker.run(release=(0,))
        while len(known) < 2 + NEW:
            worker.decode({3: known})
        assert known == alone(3)[0]


@pytest.mark.parametrize(
    "fields", [{"allowed_token_ids": (0, 7)}, {"bad_words": ((8,),)}, {"bad_words": ((7, 8),)}]
)
def test_a_grammar_forces_nothing_that_other_parameters_may_forbid(fields: dict[str, Any]) -> None:
    """Requests with allowed_token_ids or bad_words do not jump ahead, so that each token is checked."""
    worker, grammar = ReplayWorker(), f"{VOCAB} 7 8"
    (free,) = worker.run(admit=[admission(0, (5,), PLAIN, grammar)], work=Prefill(0, 0, 1, sample=True))
    assert free.token_ids == (7, 8)
    admit = [admission(1, (5,), sampling_params(temperature=0.0, **fields), grammar)]
    (output,) = worker.run(admit=admit, work=Prefill(1, 0, 1, sample=True))
    assert output.token_ids == (7,)
    (output,) = worker.run(work=Decode((1,), 1))
    assert output.error is not None
    assert output.error.message.startswith("no token is left that both the grammar and")


def test_seeds_matter() -> None:
    """The requests give different tokens, so the tests above compare more than prompts."""
    drawn = {tuple(alone(index)[0][len(REQUESTS[index][1]) :]) for index in range(len(REQUESTS))}
    assert len(drawn) == len(REQUESTS)
    assert all(len(set(tokens)) > 3 for tokens in drawn)


@pytest.mark.parametrize("captured", [False, True])
def test_it_fails_alone_beside_a_request_with_a_grammar_too(captured: bool) -> None:
    worker, known = ReplayWorker(captured=captured), list(REQUESTS[8][1])
    worker.admit(8, known, 1)
    once = sampling_params(seed=1, allowed_token_ids=(7,), bad_words=((7, 7),))
    (first,) = worker.run(admit=[admission(0, (5,), once)], work=Prefill(0, 0, 1, sample=True))
    assert first.token_ids == (7,)
    failed, other = worker.run(work=Decode((0, 1), 2))
    assert failed.error is not None
    assert failed.error.message.startswith("no token is left to sample")
    assert [*known, *other.token_ids] == alone(8)[0][:3]


def test_bad_parameters_fail_their_request_alone() -> None:
    """Token ids beyond the vocabulary are refused at admission, with the parameter's name."""
    worker = ReplayWorker()
    admit = [admission(0, (5,), sampling_params(logit_bias={VOCAB: 1.0}))]
    (output,) = worker.run(admit=admit, work=Prefill(0, 0, 1, sample=True))
    assert output.error is not None
    assert output.error.param == "logit_bias"
    known = [4, 4]
    worker.admit(3, known, 0)
    assert known == alone(3)[0][:3]


@pytest.mark.parametrize("length", [1, 2, 7, 8, 9, 16, 17, 21])
@pytest.mark.parametrize("output", [(), (3, 4), (3, 4, 5, 6, 7, 8, 9, 10)])
def test_prompt_log_probabilities(length: int, output: tuple[int, ...]) -> None:
    """Every prompt token after the first has log-probabilities, reported with the chunk before it."""
    worker, model = ReplayWorker(), Noise()
    known = torch.tensor([*(token * 7 % VOCAB for token in range(length)), *output])
    sampling = sampling_params(temperature=0.0, prompt_logprobs=2)
    admit = [admission(0, known.tolist(), sampling, prompt=length)]
    found: list[common_pb2.TokenLogprobs] = []
    for start in range(0, len(known), SIZES.chunk):
        count = min(SIZES.chunk, len(known) - start)
        outputs = worker.run(admit=admit, work=Prefill(0, start, count, start + count == len(known)))
        admit = []
        found += [entry for each in outputs for entry in each.prompt_logprobs]
        assert len(found) == min(start + count, length - 1)
    states = model.forward(known, torch.arange(len(known)), {})
    expected = model.logits(states).log_softmax(-1)
    for index, entry in enumerate(found):
        row = expected[index]
        assert entry.logprob == pytest.approx(float(row[known[index + 1]]), abs=1e-4)
        assert entry.rank == int((row > row[known[index + 1]]).sum()) + 1
        assert list(entry.top_token_ids) == row.topk(2).indices.tolist()
    (again,) = worker.run(work=Decode((0,), 1))
    assert not again.prompt_logprobs
    # The slot's next request did not ask for them.
    (other,) = worker.run(
        release=(0,), admit=[admission(0, range(5), PLAIN)], work=Prefill(0, 0, 5, sample=True)
    )
    assert not other.prompt_logprobs


def test_a_matcher_that_fails_fails_its_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of the matcher's library refuses that admission; the rest of the plan runs."""

    def refuse(*_: object) -> None:
        raise Internal("matching the grammar failed: out of states")

    worker = ReplayWorker()
    monkeypatch.setattr(worker.constraints, "admit", refuse)
    admit = [admission(0, (5, 6), PLAIN, "7 0"), admission(1, (4, 4), PLAIN)]
    failed, other = worker.run(admit=admit, work=Prefill(1, 0, 2, sample=True))
    assert isinstance(failed.error, Internal)
    assert "out of states" in failed.error.message
    assert [4, 4, *other.token_ids] == alone(3)[0][:3]


def test_a_fault_at_an_admission_leaves_the_slot_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """After an unexpected error at any point of an admission, the next request can take the slot."""
    worker, work = ReplayWorker(), Prefill(0, 0, 2, sample=True)
    reporting = sampling_params(temperature=0.0, prompt_logprobs=1)
    with monkeypatch.context() as patch:
        patch.setattr(worker.constraints, "admit", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            worker.run(admit=[admission(0, (5, 6), reporting, "7 0")], work=work)
    with monkeypatch.context() as patch:
        patch.setattr(worker.runner._batch.sampling, "set", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            worker.run(admit=[admission(0, (5, 6), reporting)], work=work)
    (output,) = worker.run(admit=[admission(0, (5, 6), PLAIN)], work=work)
    assert (len(output.token_ids), output.prompt_logprobs, output.error) == (1, (), None)
    # An admission to a taken slot does not disturb the request in it.
    (output,) = worker.run(admit=[admission(0, (5, 6), PLAIN, "7 0")], work=Decode((0,), 1))
    assert isinstance(output.error, Internal)
    assert worker.run(work=Decode((0,), 1))[0].error is None
