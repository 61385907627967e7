"""Tokens of rows whose logits are where a device computes, away from the batch."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from protos.steps import Admission, GroupKind
from protos.triptych.v1 import common_pb2, worker_pb2
from tests.support.sampling_params import changed, thinking_budget
from worker_svc.execution.batch import Batch
from worker_svc.execution.token_selection import Selection, TokenSelector, make_sampler
from worker_svc.grammars.constraints import FollowingConstraints
from worker_svc.grammars.spec import Spec
from worker_svc.pending_step import NOT_FINITE
from worker_svc.sampling.state import SamplingVocabulary
from worker_svc.shapes import AttentionLayer, KvGroup, ShapeConfig

VOCAB = 40
GREEDY = common_pb2.SamplingParams(temperature=0.0)
# Nothing can be read on the meta device, and copying from it fails.
AWAY = torch.empty((2, VOCAB), device="meta")
ROWS = torch.arange(2)
# The positions of the slots' last tokens.
LAST = torch.ones(2, dtype=torch.int64)
BEST = torch.tensor([7, 9])


def select(
    *sampling: common_pb2.SamplingParams,
    logits: torch.Tensor = AWAY,
    draw: Callable[..., torch.Tensor] | None = None,
) -> Selection:
    """Selects tokens for slots with these parameters."""
    batch = batch_of(*sampling)
    chooser = TokenSelector(batch, None, draw)
    return chooser.select(
        [0, 1], ROWS, logits, LAST, make_sampler(batch), batch.sampling.thinking.advance, [BEST]
    )


def batch_of(*sampling: common_pb2.SamplingParams) -> Batch:
    """Returns a batch of requests with these parameters and two known tokens each."""
    shapes = ShapeConfig(64, 2, chunk=64, block_size=64, decode_buckets=(2,), num_blocks=(3,))
    layer = AttentionLayer("a", 1, 1, 32, 0, torch.float32)
    groups = [KvGroup(0, (layer,), GroupKind.FULL)]
    batch = Batch(shapes, groups, [3], torch.device("cpu"), SamplingVocabulary(VOCAB))
    for slot, parameters in enumerate(sampling):
        batch.admit(Admission(slot, [1, 2], 1, parameters, {0: [1 + slot]}))
    batch.copy_admitted()
    return batch


def test_greedy_rows_leave_logits_where_they_are() -> None:
    """The device has found the most probable tokens, so nothing reads the logits."""
    selection = select(GREEDY, GREEDY)
    assert selection.tokens is BEST
    assert selection.is_plain


@pytest.mark.parametrize(
    "other",
    [
        common_pb2.SamplingParams(temperature=1.0, seed=3),
        common_pb2.SamplingParams(temperature=0.0, logprobs=2),
        common_pb2.SamplingParams(temperature=0.0, presence_penalty=1.0),
    ],
    ids=["random", "log-probabilities", "penalty"],
)
def test_a_row_that_needs_logits_fetches_them(other: common_pb2.SamplingParams) -> None:
    """Random tokens, log-probabilities and penalties are computed where the batch is."""
    with pytest.raises(NotImplementedError, match="meta"):
        select(GREEDY, other)


DRAWN = torch.tensor([3, 4])
ANY_SEED = common_pb2.SamplingParams(temperature=0.5, top_p=0.9, top_k=5, seed=3, seed_is_drawn=True)
SEEDED = common_pb2.SamplingParams(temperature=0.5, seed=3)


def test_rows_without_a_seed_are_drawn_where_logits_are() -> None:
    """Nothing reads the logits, and greedy rows keep the most probable token."""
    calls: list[tuple[torch.Tensor, ...]] = []

    def draw(*arguments: torch.Tensor) -> torch.Tensor:
        calls.append(arguments[1:])
        return DRAWN

    selection = select(ANY_SEED, GREEDY, draw=draw)
    assert selection.tokens.tolist() == [3, 9]
    assert selection.is_plain
    ((temperature, top_k, top_p),) = calls
    assert temperature.tolist() == [0.5, 1.0]
    assert top_k.tolist() == [5, 1]
    assert top_k.dtype == torch.int32
    assert top_p.tolist() == pytest.approx([0.9, 1.0])
    assert top_p.dtype == torch.float32


def test_other_rows_of_a_step_are_sampled_as_without_the_device() -> None:
    logits = torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(1))
    alone = select(SEEDED, SEEDED, logits=logits)
    mixed = select(ANY_SEED, SEEDED, logits=logits, draw=lambda *_: DRAWN)
    assert mixed.tokens.tolist() == [3, int(alone.tokens[1])]


@pytest.mark.parametrize(
    "fields",
    [
        {"seed_is_drawn": False}, {"temperature": 0.001}, {"min_p": 0.1}, {"logprobs": 1}, {"presence_penalty": 1.0}, {"logit_bias": {1: 2.0}},
        {"allowed_token_ids": [1, 2]}, {"bad_words": [common_pb2.TokenSequence(token_ids=[1])]},
    ],
    ids=lambda fields: next(iter(fields)),
)  # fmt: skip
def test_a_row_with_other_parameters_is_never_drawn_on_the_device(fields: dict[str, Any]) -> None:
    logits = torch.zeros((2, VOCAB))

    def draw(*_: torch.Tensor) -> torch.Tensor:
        raise AssertionError("the device draws")

    parameters = {"temperature": 1.0, "seed": 3, "seed_is_drawn": True, **fields}
    select(common_pb2.SamplingParams(**parameters), GREEDY, logits=logits, draw=draw)


@pytest.mark.parametrize(
    ("sampling", "draw"), [(GREEDY, None), (ANY_SEED, lambda *_: DRAWN)], ids=["greedy", "drawn"]
)
def test_the_end_of_a_thought_needs_no_logits(
    sampling: common_pb2.SamplingParams, draw: Callable[..., torch.Tensor] | None
) -> None:
    """The host writes it over the token that the device has found, and other rows keep theirs."""
    selection = select(changed(sampling, thinking_budget=thinking_budget(0, end=(33,))), GREEDY, draw=draw)
    assert selection.tokens.tolist() == selection.reported.tolist() == [33, 9]
    assert selection.is_plain


def test_the_end_of_a_thought_hides_no_fault() -> None:
    """A row whose logits are not finite fails, as without a budget."""
    sampling = changed(SEEDED, thinking_budget=thinking_budget(0, end=(33,)))
    selection = select(sampling, SEEDED, logits=torch.full((2, VOCAB), torch.nan))
    assert selection.reported.tolist() == [NOT_FINITE, NOT_FINITE]


class Chosen:
    """Brings the tokens that another rank has chosen, by slot."""

    def __init__(self, *steps: Sequence[int]) -> None:
        self._steps = iter(steps)

    def receive(self) -> bytes:
        outputs = [
            worker_pb2.SlotOutput(slot=slot, token_ids=[token])
            for slot, token in enumerate(next(self._steps))
        ]
        return worker_pb2.StepResult(step=1, outputs=outputs).SerializeToString()


def test_a_rank_that_only_follows_knows_the_thoughts() -> None:
    """While a neighbour has a grammar, another rank chooses; afterwards all choose the same end."""
    batch = batch_of(
        changed(GREEDY, thinking_budget=thinking_budget(2, start=(5,), end=(33,), opened=False)), GREEDY
    )
    constraints = FollowingConstraints(Chosen([5, 8], [20, 8]))  # type: ignore[arg-type]
    constraints.admit(1, Spec("regex", "x"), ())
    selector, found = TokenSelector(batch, constraints), []
    for step in range(4):
        if step == 2:
            constraints.release(1)
        selection = selector.select(
            [0, 1],
            ROWS,
            torch.zeros((2, VOCAB)),
            LAST + step,
            make_sampler(batch),
            batch.sampling.thinking.advance,
            [BEST],
        )
        batch.advance_rows(ROWS, selection.tokens)
        batch.advance_decode([0, 1])
        found.append(int(selection.tokens[0]))
    assert found == [5, 20, 7, 33]


def test_a_token_beyond_the_vocabulary_is_an_error_of_its_row() -> None:
    """The vendor's operator returns such tokens if logits are not finite."""
    selection = select(ANY_SEED, ANY_SEED, draw=lambda *_: torch.tensor([VOCAB, 4]))
    assert selection.reported.tolist() == [NOT_FINITE, 4]
    assert int(selection.tokens[0]) in range(VOCAB)
