"""A stage before the last one: tokens come with results, in the order of the steps."""

from types import SimpleNamespace
from typing import Any, cast

import torch

from protos.steps import Admission, Decode, Prefill, SlotOutput, StepResult
from tests.support.sampling_params import sampling_params
from worker_svc.execution.batch import Batch
from worker_svc.execution.stage import Stage
from worker_svc.ranks.group import RankGroup
from worker_svc.ranks.layout import RankLayout
from worker_svc.sampling.state import SamplingVocabulary
from worker_svc.shapes import AttentionLayer, ShapeConfig, group_layers

GROUPS = group_layers([AttentionLayer("a", 1, 1, 8, 0, torch.float32)])
SIZES = ShapeConfig(64, 4, 16, 16, (2, 4), (17,))


class FirstStage:
    """A group of two stages as its first rank sees it; what it sends is kept."""

    layout = RankLayout(0, 1, 2)

    def __init__(self) -> None:
        self.sent: list[torch.Tensor] = []
        self.links = SimpleNamespace(send=self.sent.append)


def stage_of(batch: Batch) -> Stage:
    group = cast("RankGroup", FirstStage())
    cpu = torch.device("cpu")
    return Stage(cast("Any", None), batch, group, cpu, states_device=cpu, most_tokens=16)


def batch_with(*slots: int) -> Batch:
    """Returns a batch with prompts of three tokens, all computed but the last."""
    batch = Batch(SIZES, GROUPS, (17,), torch.device("cpu"), SamplingVocabulary(50, ()))
    for slot in slots:
        batch.admit(Admission(slot, (1, 2, 3), 2, sampling_params(temperature=0.0), {0: (1 + slot,)}))
    batch.copy_admitted()
    return batch


def known(batch: Batch, slot: int, count: int) -> list[int]:
    return batch.tokens_of(slot, 0, count).tolist()


def test_tokens_arrive_in_the_order_of_steps() -> None:
    """A chunk's token and forced ones behind it come first, then a decode step's."""
    batch = batch_with(0, 1)
    stage = stage_of(batch)
    chunk = Prefill(0, 2, 1, True)
    batch.advance_prefill(chunk, None)
    stage.pass_on(chunk, torch.zeros(1))
    stage.pass_on(Decode((1,), 2), torch.zeros(1))
    stage.apply(StepResult(1, outputs=(SlotOutput(0, (7, 8)),)))
    stage.apply(StepResult(2, (9,)))
    assert known(batch, 0, 5) == [1, 2, 3, 7, 8]
    assert known(batch, 1, 4) == [1, 2, 3, 9]


def test_a_released_slot_takes_no_token() -> None:
    batch = batch_with(0, 1)
    stage = stage_of(batch)
    stage.pass_on(Decode((0, 1), 2), torch.zeros(1))
    stage.release(0)
    batch.release(0)
    batch.admit(Admission(0, (4, 5), 0, sampling_params(temperature=0.0), {0: (9,)}))
    batch.copy_admitted()
    stage.apply(StepResult(1, (30, 31)))
    assert known(batch, 0, 2) == [4, 5]
    assert 30 not in known(batch, 0, 6)
    assert known(batch, 1, 4) == [1, 2, 3, 31]
