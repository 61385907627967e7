"""Budgets of thinking against a reference: any batch, steps in flight, preemption, lost workers."""

import random
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from protos.steps import Admission, Decode, Prefill, StepPlan
from protos.triptych.v1 import common_pb2
from tests.support.property_settings import scaled
from tests.support.sampling_params import sampling_params, thinking_budget
from tests.support.worker.layerless import GROUPS, LayerlessModel, PlainDevice
from tests.support.worker.replay_worker import CapturingDevice
from worker_svc.execution.runner import Runner
from worker_svc.graphs.graph_runner import GraphOptions
from worker_svc.sampling.state import SamplingVocabulary
from worker_svc.sampling.thinking import ThinkingBudgets
from worker_svc.shapes import ShapeConfig

pytestmark = pytest.mark.property

# Few tokens, so that the model writes markers and their beginnings.
VOCAB = 4
NEW = 24
SIZES = ShapeConfig(
    max_model_len=32, max_num_seqs=4, chunk=8, block_size=16, decode_buckets=(1, 2, 4), num_blocks=(20, 10)
)


def next_token(last: int, position: int) -> int:
    """Returns the token that the model prefers after the last one and its position."""
    return (last * 7919 + position * 104_729 + (last ^ position) * 31) // 5 % VOCAB


class Successor(LayerlessModel):
    """A model of `next_token`."""

    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, plans: Mapping[str, Any], *_: torch.Tensor
    ) -> torch.Tensor:
        """Returns tokens and positions as hidden states."""
        del plans
        return torch.stack([token_ids, positions], dim=1).float()

    def empty_states(self, tokens: int) -> torch.Tensor:
        raise NotImplementedError("this model is no stage of a pipeline")

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Gives the preferred token all of the probability."""
        best = [next_token(int(last), int(position)) for last, position in hidden.tolist()]
        return torch.nn.functional.one_hot(torch.tensor(best), VOCAB).float()


def reference(prompt: Sequence[int], budget: common_pb2.ThinkingBudget | None) -> list[int]:
    """Writes an answer token by token, as the definition of a budget has it."""
    out: list[int] = []

    def wrote(marker: Sequence[int]) -> bool:
        return bool(marker) and out[-len(marker) :] == list(marker)

    def prefer() -> None:
        known = [*prompt, *out]
        out.append(next_token(known[-1], len(known) - 1))

    def think(budget: common_pb2.ThinkingBudget) -> None:
        for _ in range(budget.tokens):
            prefer()
            if any(wrote(end.token_ids) for end in budget.ends):
                return
        close = list(budget.close_ids)
        begun = max(
            (size for size in range(len(close) + 1) if out[len(out) - size :] == close[:size]), default=0
        )
        while begun < len(close):
            out.append(close[begun])
            # A marker that repeats itself may have begun earlier.
            begun = max(
                size for size in range(len(close) + 1) if out[max(0, len(out) - size) :] == close[:size]
            )

    if budget is not None and budget.open:
        think(budget)
    while len(out) < NEW:
        prefer()
        if budget is not None and any(wrote(start.token_ids) for start in budget.starts):
            think(budget)
    return out[:NEW]


MARKER = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=3)


@st.composite
def budgets(draw: Callable[..., Any]) -> common_pb2.ThinkingBudget | None:
    """Returns a budget whose end is part of the tokens to write, or none."""
    if draw(st.integers(0, 4)) == 0:
        return None
    end = draw(MARKER)
    start = draw(st.one_of(st.just([]), MARKER.filter(lambda start: start != end)))
    around = st.lists(st.integers(0, VOCAB - 1), max_size=2)
    return thinking_budget(
        draw(st.integers(0, 9)),
        opened=draw(st.booleans()),
        start=start,
        end=end,
        other_ends=draw(st.lists(MARKER.filter(lambda other: other != start), max_size=2)),
        close=[*draw(around), *end, *draw(around)],
    )


class Slot:
    """One slot's tokens and its budget, with the state on the host or in tables."""

    def __init__(self, *, tables: bool) -> None:
        self.tokens = torch.zeros((2, 64), dtype=torch.int64)
        self.prompt_len = torch.zeros(2, dtype=torch.int64)
        self.budgets = ThinkingBudgets(self.tokens, self.prompt_len)
        if tables:
            self.budgets.allocate()

    def admit(self, prompt: Sequence[int], known: Sequence[int], budget: common_pb2.ThinkingBudget) -> None:
        self.tokens[0, : len(known)] = torch.tensor(known)
        self.prompt_len[0] = len(prompt)
        sampling = sampling_params(thinking_budget=budget)
        self.budgets.set(Admission(0, tuple(known), 0, sampling, {}, num_prompt_tokens=len(prompt)))

    def ending(self, known: Sequence[int]) -> int | None:
        """Returns the token to write after the known ones, the last of which is new."""
        self.tokens[0, len(known) - 1] = known[-1]
        due, tokens = self.budgets.advance(torch.tensor([0]), torch.tensor([len(known)]))
        return int(tokens[0]) if due[0] else None


@given(
    prompt=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=5),
    budget=budgets().filter(lambda budget: budget is not None),
    admissions=st.sets(st.integers(0, NEW)),
    refused=st.sets(st.integers(0, NEW)),
)
@scaled(1000)
def test_hosts_tables_and_admissions_agree(
    prompt: list[int], budget: common_pb2.ThinkingBudget, admissions: set[int], refused: set[int]
) -> None:
    """Whether or not a grammar refuses some of the tokens."""
    slots, known = [Slot(tables=False), Slot(tables=True)], list(prompt)
    for index in range(NEW):
        if not index or index in admissions:
            for slot in slots:
                slot.admit(prompt, known, budget)
        ending, same = (slot.ending(known) for slot in slots)
        assert ending == same
        due = ending is not None and index not in refused
        known.append(ending if due and ending is not None else next_token(known[-1], len(known) - 1))
    if not refused:
        assert known[len(prompt) :] == reference(prompt, budget)


class Replica:
    """A runner with up to four requests, known by their slots."""

    def __init__(self, *, captured: bool) -> None:
        device = CapturingDevice() if captured else PlainDevice()
        self.runner = Runner(
            Successor(),
            device,
            GROUPS,
            SIZES,
            vocabulary=SamplingVocabulary(VOCAB),
            options=GraphOptions(level=0),
        )
        if captured:
            self.runner.graphs.has = lambda signature: True  # type: ignore[method-assign]  # noqa: ARG005 - its name
        self.runner.warm_up(lambda *_: None)
        self.step = 0

    def launch(self, **fields: Any) -> Callable[[], list[list[int]]]:
        """Launches a plan; the result waits for its tokens."""
        self.step += 1
        pending = self.runner.launch(StepPlan(self.step, **fields))
        return lambda: [list(output.token_ids) for output in pending.wait()]

    def admit(
        self, slot: int, prompt: Sequence[int], known: list[int], sampling: common_pb2.SamplingParams
    ) -> None:
        """Prefills the known tokens and appends the next one."""
        blocks = {0: (1 + 2 * slot, 2 + 2 * slot), 1: (1 + slot,)}
        admit = [Admission(slot, tuple(known), 0, sampling, blocks, num_prompt_tokens=len(prompt))]
        tokens: list[list[int]] = []
        for start in range(0, len(known), SIZES.chunk):
            count = min(SIZES.chunk, len(known) - start)
            last = start + count == len(known)
            tokens = self.launch(admit=admit, work=Prefill(slot, start, count, last))()
            admit = []
        known += tokens[0]


@cache
def replica_of(*, captured: bool) -> Replica:
    """Returns a replica that all examples share."""
    return Replica(captured=captured)


@given(
    requests=st.lists(
        st.tuples(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=5), budgets(), st.booleans()),
        min_size=1,
        max_size=4,
    ),
    chance=st.randoms(use_true_random=False),
    captured=st.booleans(),
)
@scaled(80)
def test_thoughts_end_as_the_reference_ends_them(
    requests: list[tuple[list[int], common_pb2.ThinkingBudget | None, bool]],
    chance: random.Random,
    captured: bool,
) -> None:
    replica = replica_of(captured=captured)
    replica.runner.reset()
    known = [list(prompt) for prompt, *_ in requests]
    running: set[int] = set()

    def unfinished() -> list[int]:
        return [slot for slot, (prompt, *_) in enumerate(requests) if len(known[slot]) < len(prompt) + NEW]

    while left := unfinished():
        for slot in running - set(left):
            replica.launch(release=(slot,))()
        running &= set(left)
        if (waiting := [slot for slot in left if slot not in running]) and (
            not running or chance.random() < 0.5
        ):
            slot = chance.choice(waiting)
            prompt, budget, biased = requests[slot]
            # A bias of 0 changes nothing, except how the tokens of the batch are chosen.
            sampling = sampling_params(
                temperature=0.0, thinking_budget=budget, logit_bias={0: 0.0} if biased else {}
            )
            replica.admit(slot, prompt, known[slot], sampling)
            running.add(slot)
        elif chance.random() < 0.1:
            replica.launch(release=(slot := chance.choice(sorted(running)),))()
            running.discard(slot)
        elif chance.random() < 0.05:
            replica.runner.reset()
            running.clear()
        else:
            slots = chance.sample(sorted(running), chance.randint(1, len(running)))
            room = min(len(requests[slot][0]) + NEW - len(known[slot]) for slot in slots)
            bucket = next(size for size in SIZES.decode_buckets if size >= len(slots))
            steps = chance.randint(1, min(room, 4))
            flight = [
                replica.launch(work=Decode(tuple(slots), bucket)) for _ in range(1 if captured else steps)
            ]
            for read in flight:
                for slot, tokens in zip(slots, read(), strict=True):
                    known[slot] += tokens
    for (prompt, budget, _), tokens in zip(requests, known, strict=True):
        assert tokens[len(prompt) :] == reference(prompt, budget)
