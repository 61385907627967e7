"""The same seeded request gives the same tokens alone, in any batch, in any order, after preemption and after a replay.

The model is a table: its logits are a function of the tokens so far, computed row by row, so that nothing but sampling could depend on
neighbours. Real models in bfloat16 are held to it in ``tests/e2e``.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
import xgrammar

from protos.errors import Internal
from protos.steps import Admission, Decode, Prefill, SlotOutput, StepPlan
from protos.triptych.v1 import common_pb2
from tests.support.sampling_params import changed, constrained, sampling_params
from tests.unit.worker.execution.test_runner import GROUPS, PlainDevice
from worker_svc.execution.runner import Runner
from worker_svc.grammars.constraints import Constraints
from worker_svc.grammars.matcher import Matcher
from worker_svc.grammars.spec import Spec
from worker_svc.graphs.capture import Recording
from worker_svc.graphs.graphs import GraphOptions
from worker_svc.plans.geometry import Geometry
from worker_svc.sampling.state import SamplingVocabulary

VOCAB = 300
NEW = 12
SIZES = Geometry(
    max_model_len=32, max_num_seqs=6, chunk=8, block_size=16, decode_buckets=(1, 2, 4, 8), num_blocks=(20, 10)
)


class Noise:
    """A model without layers: each token's logits are noise of its own."""

    def bind_caches(self, caches: dict[str, torch.Tensor]) -> None:
        """There is nobody to read them."""

    def attention_plans(self, groups: Sequence[tuple[Sequence[str], Any]]) -> dict[str, Any]:
        """One a layer."""
        return {name: plan for names, plan in groups for name in names}

    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, plans: Mapping[str, Any]
    ) -> torch.Tensor:
        """Hidden states are token and position."""
        del plans
        return torch.stack([token_ids, positions], dim=1).float()

    def record(self, token_ids: torch.Tensor, positions: torch.Tensor) -> Recording:
        """Nobody asks for it on a device that does not compile."""
        raise NotImplementedError

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Peaked enough for filters to matter, flat enough for draws to differ."""
        angles = (hidden[:, :1] * 12.9898 + hidden[:, 1:] * 78.233) + torch.arange(VOCAB) * 37.719
        return torch.sin(angles * 1.7) * 3


class CapturingDevice(PlainDevice):
    """A CPU that treats what it captures as a GPU does: fixed arguments, fixed results, and each run overwrites those of the last one."""

    def capture(
        self, function: Callable[..., tuple[torch.Tensor, ...]], examples: Sequence[torch.Tensor]
    ) -> Callable[..., tuple[torch.Tensor, ...]]:
        """See the base class."""
        arguments = [tensor.clone() for tensor in examples]
        results = function(*arguments)

        def replay(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
            for argument, tensor in zip(arguments, tensors, strict=True):
                argument.copy_(tensor)
            for result, new in zip(results, function(*arguments), strict=True):
                result.copy_(new)
            return results

        return replay


class Every:
    """A matcher that allows tokens which leave the remainder that its text says, the n-th token the n-th of them, over and over."""

    ended = False

    def __init__(self, text: str, output: Sequence[int]) -> None:
        self.divisor, *self.remainders = map(int, text.split())
        self.count = 0
        assert all(self.accept(token) for token in output)

    def _allowed(self) -> list[int]:
        return list(range(self.remainders[self.count % len(self.remainders)], VOCAB, self.divisor))

    def accept(self, token: int) -> bool:
        taken = token in self._allowed()
        self.count += taken
        return taken

    def fill_mask(self, masks: torch.Tensor, row: int) -> None:
        words = masks[row].numpy().view(np.uint32)
        words[:] = 0
        for token in self._allowed():
            words[token >> 5] |= np.uint32(1 << (token & 31))

    def jump(self, masks: torch.Tensor, row: int, room: int, min_tokens: int) -> tuple[int, ...]:
        """Where one token is allowed at a time, the next one."""
        del masks, row, min_tokens
        if room <= 0 or self.divisor < VOCAB:
            return ()
        (token,) = self._allowed()
        self.accept(token)
        return (token,)

    def accept_forced_end(self, masks: torch.Tensor, row: int) -> None:
        """There is no end."""


class Table(Constraints):
    """Grammars that are not compiled."""

    def __init__(self) -> None:
        super().__init__(
            None,  # type: ignore[arg-type]
            num_slots=SIZES.max_num_seqs,
            max_rows=SIZES.decode_buckets[-1],
            vocab_size=VOCAB,
            end_ids=(),
            device=torch.device("cpu"),
            min_jump=1,
        )

    def admit(self, slot: int, spec: Spec, output: Sequence[int]) -> None:
        self._matchers[slot] = Every(spec.text, output)  # type: ignore[call-overload]
        self._count += 1


PLAIN = sampling_params(temperature=0.0)
REQUESTS: list[tuple[common_pb2.SamplingParams, list[int], str]] = [
    (sampling_params(seed=1), [5, 6, 7], ""),
    (sampling_params(seed=2, temperature=1.4, top_k=40, top_p=0.9, min_p=0.02), [1] * 11, ""),
    (sampling_params(seed=3, presence_penalty=1.5, frequency_penalty=0.7, repetition_penalty=1.3), [9, 8, 8], ""),
    (PLAIN, [4, 4], ""),
    (sampling_params(seed=5, logit_bias={4: 3.0, 9: -9.0}, bad_words=((4,), (7, 9)), min_tokens=6, logprobs=2), list(range(20)), ""),
    (sampling_params(seed=6, allowed_token_ids=tuple(range(0, VOCAB, 3)), frequency_penalty=2.0, top_p=0.8), [2, 3], ""),
    (sampling_params(temperature=0.0, repetition_penalty=1.8, logprobs=1), [33, 34], ""),
    (sampling_params(seed=8, temperature=0.7, top_p=0.5, logprobs=0), [44], ""),
    # Under grammars, which refuse most of what is drawn first: drawn again, or masked first where there are filters.
    (sampling_params(seed=9, logprobs=3), [51], "7 0 3 6"),
    (sampling_params(temperature=0.0, logprobs=3), [52], "40 39 1"),
    (sampling_params(seed=11, top_k=9, logit_bias={8: 2.0}, logprobs=1), [53], "5 4 3 2 1 0"),
    (sampling_params(seed=12, presence_penalty=2.0, min_tokens=4), [54], "30 0"),
]  # fmt: skip


class Worker:
    """A runner that requests come to and leave, each with its tokens so far."""

    def __init__(self, *, captured: bool = False) -> None:
        device = CapturingDevice() if captured else PlainDevice()
        self.constraints = Table()
        self.runner = Runner(
            Noise(), device, GROUPS, SIZES, vocabulary=SamplingVocabulary(VOCAB, (0, 1, 2)), options=GraphOptions(level=0),
            constraints=self.constraints,
        )  # fmt: skip
        if captured:
            self.runner.graphs.has = lambda signature: True  # type: ignore[method-assign]  # noqa: ARG005 - its name
        self.runner.warm_up(lambda *_: None)
        self.slots: dict[int, int] = {}
        self.told: dict[int, list[common_pb2.TokenLogprobs]] = {}
        """Of each request, what was said of its tokens here."""
        self.step = 0

    def run(self, **fields: Any) -> list[SlotOutput]:
        self.step += 1
        return self.runner.execute(StepPlan(self.step, **fields))

    def admit(self, index: int, known: list[int], slot: int) -> None:
        """Prefills what is known and appends the token that follows."""
        self.slots[index] = slot
        sampling, prompt, grammar = REQUESTS[index]
        admit = [admission(slot, known, sampling, grammar, prompt=len(prompt))]
        outputs: list[SlotOutput] = []
        for start in range(0, len(known), SIZES.chunk):
            count = min(SIZES.chunk, len(known) - start)
            outputs = self.run(admit=admit, work=Prefill(slot, start, count, start + count == len(known)))
            admit = []
        self._take({index: known}, outputs)

    def decode(self, known: dict[int, list[int]]) -> None:
        """Appends one token to each."""
        slots = [self.slots[index] for index in known]
        bucket = next(size for size in SIZES.decode_buckets if size >= len(slots))
        positions = [len(each) - 1 for each in known.values()]
        self._take(known, self.run(work=Decode(tuple(slots), tuple(positions), bucket)))

    def _take(self, known: dict[int, list[int]], outputs: list[SlotOutput]) -> None:
        for (index, each), output in zip(known.items(), outputs, strict=True):
            each.extend(output.token_ids)
            self.told.setdefault(index, []).extend(output.logprobs)

    def release(self, index: int) -> None:
        self.run(release=(self.slots.pop(index),))


def admission(
    slot: int,
    known: Sequence[int],
    sampling: common_pb2.SamplingParams,
    grammar: str = "",
    *,
    prompt: int | None = None,
) -> Admission:
    """A request with blocks of its slot."""
    return Admission(
        slot, tuple(known), 0, constrained(sampling, "regex", grammar) if grammar else sampling, {0: (1 + 2 * slot, 2 + 2 * slot), 1: (1 + slot,)}, num_prompt_tokens=prompt,
    )  # fmt: skip


def alone(index: int) -> tuple[list[int], list[common_pb2.TokenLogprobs]]:
    """All tokens of a request that has a worker to itself, and what is said of those that were sampled."""
    worker, known = Worker(), list(REQUESTS[index][1])
    worker.admit(index, known, 0)
    while len(known) < len(REQUESTS[index][1]) + NEW:
        worker.decode({index: known})
    return known, worker.told[index]


def assert_same(
    found: Sequence[common_pb2.TokenLogprobs], expected: Sequence[common_pb2.TokenLogprobs]
) -> None:
    """But for the order in which a row's probabilities are added up."""
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert (one.rank, one.top_token_ids) == (other.rank, other.top_token_ids)
        assert [one.logprob, *one.top_logprobs] == pytest.approx(
            [other.logprob, *other.top_logprobs], abs=1e-4
        )


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("order", range(12))
def test_neighbours_order_and_preemption_change_nothing(order: int, captured: bool) -> None:
    """Requests come in any order to any slot, are preempted at any time, and go on, some on another worker; captured steps draw the same."""
    expected = {index: alone(index) for index in range(len(REQUESTS))}
    chance = random.Random(order)
    workers = [Worker(captured=captured)]
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
            workers.append(Worker(captured=captured))  # the old one is lost
        elif running:
            some = chance.sample(list(running), chance.randint(1, len(running)))
            worker.decode({index: running[index] for index in some})
        for index in [one for one in running if len(known[one]) >= len(REQUESTS[one][1]) + NEW]:
            del running[index]
            worker.release(index)
    assert preempted
    assert known == {index: tokens for index, (tokens, _) in expected.items()}
    for index, (_, logprobs) in expected.items():
        assert_same([entry for worker in workers for entry in worker.told.get(index, [])], logprobs)
    assert sum(worker.constraints.num_redrawn for worker in workers) > NEW


@pytest.mark.parametrize("captured", [False, True])
def test_log_probabilities_are_those_of_the_model_under_a_grammar_too(captured: bool) -> None:
    """A mask that was laid on the step's logits is not seen in them."""
    worker, model, known = Worker(captured=captured), Noise(), [52]
    worker.admit(9, known, 0)
    for _ in range(4):
        worker.decode({9: known})
    assert worker.constraints.num_redrawn >= 4
    states = model.forward(torch.tensor(known[:-1]), torch.arange(len(known) - 1), {})
    rows = model.logits(states).log_softmax(-1)
    for row, token, entry in zip(rows, known[1:], worker.told[9], strict=True):
        assert entry.logprob == pytest.approx(float(row[token]), abs=1e-4)
        assert entry.rank == int((row > row[token]).sum()) + 1
        assert list(entry.top_token_ids) == row.topk(3).indices.tolist()


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("sampling", [PLAIN, sampling_params(seed=3), sampling_params(seed=3, top_k=5)])
def test_nothing_is_left_between_a_grammar_and_other_parameters(
    sampling: common_pb2.SamplingParams, captured: bool
) -> None:
    """It fails with what to change, in prefill and in a decode step, and is never given a token that it forbade; its neighbour goes on."""
    for start in (0, 8):  # the first or the second token is nowhere among those that both allow
        worker, known = Worker(captured=captured), [4, 4]
        worker.admit(3, known, 1)
        nothing = changed(sampling, allowed_token_ids=(7, 8))
        admit = [admission(0, (5,), nothing, f"100 {start} 0")]
        (output,) = worker.run(admit=admit, work=Prefill(0, 0, 1, sample=True))
        if start:
            assert (output.token_ids, output.error) == ((8,), None)
            output, other = worker.run(work=Decode((0, 1), (1, 2), 2))
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
    """Jump-ahead is left to requests that have no such parameters: a token that both leave no room for fails the request either way."""
    worker, grammar = Worker(), f"{VOCAB} 7 8"
    (free,) = worker.run(admit=[admission(0, (5,), PLAIN, grammar)], work=Prefill(0, 0, 1, sample=True))
    assert free.token_ids == (7, 8)
    admit = [admission(1, (5,), sampling_params(temperature=0.0, **fields), grammar)]
    (output,) = worker.run(admit=admit, work=Prefill(1, 0, 1, sample=True))
    assert output.token_ids == (7,)
    (output,) = worker.run(work=Decode((1,), (1,), 1))
    assert output.error is not None
    assert output.error.message.startswith("no token is left that both the grammar and")


def test_captured_steps_stay_where_they_are() -> None:
    """Tables and scratch have their largest size before the first step is captured, as those of a small bucket hold their addresses."""
    sampling = Worker(captured=True).runner._batch.sampling
    assert sampling.workspace(1).num_rows == SIZES.decode_buckets[-1]


def test_seeds_matter() -> None:
    """The requests are such that other numbers give other tokens: the tests above compare more than prompts."""
    drawn = {tuple(alone(index)[0][len(REQUESTS[index][1]) :]) for index in range(len(REQUESTS))}
    assert len(drawn) == len(REQUESTS)
    assert all(len(set(tokens)) > 3 for tokens in drawn)


def test_a_request_that_nothing_is_left_for_fails_alone() -> None:
    """Its neighbour goes on."""
    worker = Worker()
    nothing = sampling_params(allowed_token_ids=(7,), bad_words=((7,),))
    (output,) = worker.run(admit=[admission(0, (5,), nothing)], work=Prefill(0, 0, 1, sample=True))
    assert output.error is not None
    assert output.error.message.startswith("no token is left to sample")
    known = [4, 4]
    worker.admit(3, known, 1)
    assert known == alone(3)[0][:3]


@pytest.mark.parametrize("captured", [False, True])
def test_it_does_so_beside_a_request_with_a_grammar_too(captured: bool) -> None:
    """Which is drawn again in the same step."""
    worker, known = Worker(captured=captured), list(REQUESTS[8][1])
    worker.admit(8, known, 1)
    once = sampling_params(seed=1, allowed_token_ids=(7,), bad_words=((7, 7),))
    (first,) = worker.run(admit=[admission(0, (5,), once)], work=Prefill(0, 0, 1, sample=True))
    assert first.token_ids == (7,)
    failed, other = worker.run(work=Decode((0, 1), (1, 1), 2))
    assert failed.error is not None
    assert failed.error.message.startswith("no token is left to sample")
    assert [*known, *other.token_ids] == alone(8)[0][:3]


def test_parameters_that_cannot_be_met_fail_their_request_alone() -> None:
    """Token ids beyond the vocabulary are refused at admission, by name."""
    worker = Worker()
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
    """Each of the prompt's tokens but the first one has those of the logits before it, each with the chunk that these come from."""
    worker, model = Worker(), Noise()
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
    (again,) = worker.run(work=Decode((0,), (len(known),), 1))
    assert not again.prompt_logprobs
    # Whoever has the slot next did not ask for them.
    (other,) = worker.run(
        release=(0,), admit=[admission(0, range(5), PLAIN)], work=Prefill(0, 0, 5, sample=True)
    )
    assert not other.prompt_logprobs


def test_a_grammar_that_cannot_be_matched_fails_its_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the matcher's library says; others in the plan are admitted and run."""

    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("out of states")

    worker = Worker()
    monkeypatch.setattr(xgrammar, "GrammarMatcher", refuse)
    grammar: Any = None
    monkeypatch.setattr(
        worker.constraints,
        "admit",
        lambda slot, spec, output: Matcher(grammar, (), output),  # noqa: ARG005 - their names
    )
    admit = [admission(0, (5, 6), PLAIN, "7 0"), admission(1, (4, 4), PLAIN)]
    failed, other = worker.run(admit=admit, work=Prefill(1, 0, 2, sample=True))
    assert isinstance(failed.error, Internal)
    assert "out of states" in failed.error.message
    assert [4, 4, *other.token_ids] == alone(3)[0][:3]


def test_a_fault_at_an_admission_leaves_the_slot_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever it is, and however far the admission had come, the next request may have the slot."""
    worker, work = Worker(), Prefill(0, 0, 2, sample=True)
    asking = sampling_params(temperature=0.0, prompt_logprobs=1)
    with monkeypatch.context() as patch:
        patch.setattr(worker.constraints, "admit", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            worker.run(admit=[admission(0, (5, 6), asking, "7 0")], work=work)
    with monkeypatch.context() as patch:
        patch.setattr(worker.runner._batch.sampling, "set", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            worker.run(admit=[admission(0, (5, 6), asking)], work=work)
    (output,) = worker.run(admit=[admission(0, (5, 6), PLAIN)], work=work)
    assert (len(output.token_ids), output.prompt_logprobs, output.error) == (1, (), None)
    # But who comes to a taken slot takes nothing from its owner.
    (output,) = worker.run(admit=[admission(0, (5, 6), PLAIN, "7 0")], work=Decode((0,), (2,), 1))
    assert isinstance(output.error, Internal)
    assert worker.run(work=Decode((0,), (2,), 1))[0].error is None
