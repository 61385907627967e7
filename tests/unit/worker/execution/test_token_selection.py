"""Tokens of rows whose logits are where a device computes, away from the batch."""

import pytest
import torch

from protos.steps import Admission, GroupKind
from protos.triptych.v1 import common_pb2
from worker_svc.execution.batch import Batch
from worker_svc.execution.token_selection import Selection, TokenSelector, make_sampler
from worker_svc.sampling.state import SamplingVocabulary
from worker_svc.shapes import AttentionLayer, KvGroup, ShapeConfig

VOCAB = 40
GREEDY = common_pb2.SamplingParams(temperature=0.0)
# Nothing can be read on the meta device, and copying from it fails.
AWAY = torch.empty((2, VOCAB), device="meta")
ROWS = torch.arange(2)
BEST = torch.tensor([7, 9])


def select(*sampling: common_pb2.SamplingParams) -> Selection:
    """Selects tokens for slots with these parameters."""
    shapes = ShapeConfig(64, 2, chunk=64, block_size=64, decode_buckets=(2,), num_blocks=(3,))
    layer = AttentionLayer("a", 1, 1, 32, 0, torch.float32)
    groups = [KvGroup(0, (layer,), GroupKind.FULL)]
    batch = Batch(shapes, groups, [3], torch.device("cpu"), SamplingVocabulary(VOCAB))
    for slot, parameters in enumerate(sampling):
        batch.admit(Admission(slot, [1, 2], 1, parameters, {0: [1 + slot]}))
    batch.copy_admitted()
    chooser = TokenSelector(batch, None)
    return chooser.select([0, 1], ROWS, AWAY, ROWS, make_sampler(batch), [BEST])


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
