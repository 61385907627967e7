"""Values on their way to the device."""

from collections.abc import Iterator

import pytest
import torch

from tests.support.sampling_params import complete_params
from tests.support.worker.sampling import request
from worker_svc.devices.upload import upload
from worker_svc.grammars.masks import Masks
from worker_svc.sampling.state import SamplingState, SamplingVocabulary

VOCAB = 1000


def test_values_arrive_in_order_and_of_the_wanted_type() -> None:
    """A device without page-locked memory gets an ordinary copy."""
    uploaded = upload([3, 1, 2], torch.device("cpu"), torch.int32)
    assert uploaded.tolist() == [3, 1, 2]
    assert uploaded.dtype == torch.int32
    assert upload([], torch.device("cpu")).dtype == torch.int64
    assert upload([(1, 2), (3, 4)], torch.device("cpu")).tolist() == [[1, 2], [3, 4]]


@pytest.fixture
def gpu() -> Iterator[torch.device]:
    """A GPU. The test says when every operation must fail that would wait for it."""
    if not torch.cuda.is_available():
        pytest.skip("only a GPU runs behind the host, so only there can the host have to wait")
    device = torch.device("cuda")
    yield device
    torch.cuda.set_sync_debug_mode("default")


def test_no_admission_waits_for_the_device(gpu: torch.device) -> None:
    """Lists, penalties and counts travel behind the steps that run."""
    tokens = torch.zeros((3, 65), dtype=torch.int64, device=gpu)
    state = SamplingState(tokens, SamplingVocabulary(VOCAB, (2,)))
    full = complete_params(
        logit_bias={5: 1.5, 7: -2.0}, allowed_token_ids=(5, 7, 31, 63, 999), bad_words=((1, 2), (3,)),
        min_tokens=4, presence_penalty=0.5, repetition_penalty=1.1,
    )  # fmt: skip
    state.allocate()
    torch.cuda.set_sync_debug_mode("error")
    state.set(request(0, full, [1, 2], [9, 9, 8]))
    state.set(request(0, complete_params(temperature=0.0)))
    state.set(request(1, full))
    torch.cuda.set_sync_debug_mode("default")
    words = state.allowed[1].tolist()
    allowed = [token for token in range(VOCAB) if words[token // 32] >> token % 32 & 1]
    assert allowed == [5, 7, 31, 63, 999]
    assert state.bias_values[1, :2].tolist() == [1.5, -2.0]
    assert state.ban_tokens[1, :3].tolist() == [2, 3, 2]


def test_no_mask_waits_for_the_device(gpu: torch.device) -> None:
    """Masks of two rows of three apply in the order of the device's stream."""
    masks = Masks(3, VOCAB, gpu)
    masks.rows[1:3] = 1
    logits = torch.ones((3, VOCAB), device=gpu)
    torch.cuda.set_sync_debug_mode("error")
    masks.apply(logits, [1, 2])
    torch.cuda.set_sync_debug_mode("default")
    assert logits.isfinite().sum(dim=1).tolist() == [VOCAB, 32, 32]
