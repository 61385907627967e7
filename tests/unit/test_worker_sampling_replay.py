"""The same seeded request gives the same tokens alone, in any batch, in any order, after preemption and after a replay.

The model is a table: its logits are a function of the tokens so far, computed row by row, so that nothing but sampling could depend on
neighbours. Real models in bfloat16 are held to it in ``tests/e2e``.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch

from tests.unit.test_worker_runner import GROUPS, PlainDevice
from worker_svc.capture import Recording
from worker_svc.geometry import Geometry
from worker_svc.graphs import GraphOptions
from worker_svc.plan import Admission, DecodeWork, Output, Plan, PrefillWork, Sampling
from worker_svc.runner import Runner
from worker_svc.sampling import Vocabulary

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


PLAIN = Sampling(temperature=0.0)
REQUESTS = [
    (Sampling(seed=1), [5, 6, 7]),
    (Sampling(seed=2, temperature=1.4, top_k=40, top_p=0.9, min_p=0.02), [1] * 11),
    (Sampling(seed=3, presence_penalty=1.5, frequency_penalty=0.7, repetition_penalty=1.3), [9, 8, 8]),
    (PLAIN, [4, 4]),
    (Sampling(seed=5, logit_bias={4: 3.0, 9: -9.0}, bad_words=((4,), (7, 9)), min_tokens=6), list(range(20))),
    (Sampling(seed=6, allowed_token_ids=tuple(range(0, VOCAB, 3)), frequency_penalty=2.0, top_p=0.8), [2, 3]),
    (Sampling(temperature=0.0, repetition_penalty=1.8, logprobs=1), [33, 34]),
    (Sampling(seed=8, temperature=0.7, top_p=0.5), [44]),
]


class Worker:
    """A runner that requests come to and leave, each with its tokens so far."""

    def __init__(self, *, captured: bool = False) -> None:
        options = GraphOptions(level=0)
        vocabulary = Vocabulary(VOCAB, (0, 1, 2))
        device = CapturingDevice() if captured else PlainDevice()
        self.runner = Runner(Noise(), device, GROUPS, SIZES, vocabulary=vocabulary, options=options)
        if captured:
            self.runner.graphs.has = lambda signature: True  # type: ignore[method-assign]  # noqa: ARG005 - its name
        self.runner.warm_up(lambda *_: None)
        self.slots: dict[int, int] = {}
        self.step = 0

    def run(self, **fields: Any) -> list[Output]:
        self.step += 1
        return self.runner.execute(Plan(self.step, **fields))

    def admit(self, index: int, known: list[int], slot: int) -> None:
        """Prefills what is known and appends the token that follows."""
        self.slots[index] = slot
        sampling, prompt = REQUESTS[index]
        blocks = {0: (1 + 2 * slot, 2 + 2 * slot), 1: (1 + slot,)}
        admit = [
            Admission(slot, tuple(known), 0, sampling, blocks, num_prompt_tokens=len(prompt), request_id=str(index))
        ]  # fmt: skip
        outputs: list[Output] = []
        for start in range(0, len(known), SIZES.chunk):
            count = min(SIZES.chunk, len(known) - start)
            outputs = self.run(admit=admit, work=PrefillWork(slot, start, count, start + count == len(known)))
            admit = []
        known.extend(outputs[0].token_ids)

    def decode(self, known: dict[int, list[int]]) -> None:
        """Appends one token to each."""
        slots = [self.slots[index] for index in known]
        bucket = next(size for size in SIZES.decode_buckets if size >= len(slots))
        positions = [len(each) - 1 for each in known.values()]
        outputs = self.run(work=DecodeWork(tuple(slots), tuple(positions), bucket))
        for each, output in zip(known.values(), outputs, strict=True):
            each.extend(output.token_ids)

    def release(self, index: int) -> None:
        self.run(release=(self.slots.pop(index),))


def alone(index: int) -> list[int]:
    """All tokens of a request that has a worker to itself."""
    worker, known = Worker(), list(REQUESTS[index][1])
    worker.admit(index, known, 0)
    while len(known) < len(REQUESTS[index][1]) + NEW:
        worker.decode({index: known})
    return known


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("order", range(12))
def test_neighbours_order_and_preemption_change_nothing(order: int, captured: bool) -> None:
    """Requests come in any order to any slot, are preempted at any time, and go on, some on another worker; captured steps draw the same."""
    expected = {index: alone(index) for index in range(len(REQUESTS))}
    chance = random.Random(order)
    worker = Worker(captured=captured)
    known = {index: list(REQUESTS[index][1]) for index in range(len(REQUESTS))}
    waiting, preempted = chance.sample(range(len(REQUESTS)), len(REQUESTS)), 0
    running: dict[int, list[int]] = {}
    while waiting or running:
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
            running, worker = {}, Worker(captured=captured)  # the old one is lost
        elif running:
            some = chance.sample(list(running), chance.randint(1, len(running)))
            worker.decode({index: running[index] for index in some})
        for index in [one for one in running if len(known[one]) >= len(REQUESTS[one][1]) + NEW]:
            del running[index]
            worker.release(index)
    assert preempted
    assert known == expected


def test_captured_steps_stay_where_they_are() -> None:
    """Tables and scratch have their largest size before the first step is captured, as those of a small bucket hold their addresses."""
    sampling = Worker(captured=True).runner._batch.sampling
    assert sampling.scratch(1).num_rows == SIZES.decode_buckets[-1]


def test_seeds_matter() -> None:
    """The requests are such that other numbers give other tokens: the tests above compare more than prompts."""
    drawn = {tuple(alone(index)[len(REQUESTS[index][1]) :]) for index in range(len(REQUESTS))}
    assert len(drawn) == len(REQUESTS)
    assert all(len(set(tokens)) > 3 for tokens in drawn)


def test_a_request_that_nothing_is_left_for_fails_alone() -> None:
    """Its neighbour goes on."""
    worker = Worker()
    nothing = Sampling(allowed_token_ids=(7,), bad_words=((7,),))
    admit = [Admission(0, (5,), 0, nothing, {0: (1, 2), 1: (1,)})]
    (output,) = worker.run(admit=admit, work=PrefillWork(0, 0, 1, sample=True))
    assert output.error is not None
    assert output.error.message.startswith("no token is left to sample")
    known = [4, 4]
    worker.admit(3, known, 1)
    assert known == alone(3)[:3]


def test_parameters_that_cannot_be_met_fail_their_request_alone() -> None:
    """Token ids beyond the vocabulary are refused at admission, by name."""
    worker = Worker()
    admit = [Admission(0, (5,), 0, Sampling(logit_bias={VOCAB: 1.0}), {0: (1, 2), 1: (1,)})]
    (output,) = worker.run(admit=admit, work=PrefillWork(0, 0, 1, sample=True))
    assert output.error is not None
    assert output.error.param == "logit_bias"
    known = [4, 4]
    worker.admit(3, known, 0)
    assert known == alone(3)[:3]


@pytest.mark.parametrize("length", [1, 2, 7, 8, 9, 16, 17, 21])
@pytest.mark.parametrize("output", [(), (3, 4), (3, 4, 5, 6, 7, 8, 9, 10)])
def test_prompt_log_probabilities(length: int, output: tuple[int, ...]) -> None:
    """Each of the prompt's tokens but the first one has those of the logits before it, all of them with the last chunk."""
    worker, model = Worker(), Noise()
    known = torch.tensor([*(token * 7 % VOCAB for token in range(length)), *output])
    sampling = Sampling(temperature=0.0, prompt_logprobs=2)
    admit = [Admission(0, tuple(known.tolist()), 0, sampling, {0: (1, 2), 1: (1,)}, num_prompt_tokens=length)]
    outputs: list[Output] = []
    for start in range(0, len(known), SIZES.chunk):
        count = min(SIZES.chunk, len(known) - start)
        outputs = worker.run(admit=admit, work=PrefillWork(0, start, count, start + count == len(known)))
        admit = []
        assert not outputs or start + count >= length - 1
    found = outputs[0].prompt_logprobs
    states = model.forward(known, torch.arange(len(known)), {})
    expected = model.logits(states).log_softmax(-1)
    assert len(found) == length - 1
    for index, entry in enumerate(found):
        row = expected[index]
        assert entry.logprob == pytest.approx(float(row[known[index + 1]]), abs=1e-4)
        assert entry.rank == int((row > row[known[index + 1]]).sum()) + 1
        assert list(entry.top_token_ids) == row.topk(2).indices.tolist()
    (again,) = worker.run(work=DecodeWork((0,), (len(known),), 1))
    assert not again.prompt_logprobs
