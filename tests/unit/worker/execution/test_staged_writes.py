"""Admissions reach the device in one copy, whatever their number."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from protos.errors import Internal
from protos.steps import Admission, Decode, Prefill
from tests.support.sampling_params import sampling_params
from worker_svc.execution.batch import Batch
from worker_svc.sampling.state import SamplingVocabulary
from worker_svc.shapes import AttentionLayer, ShapeConfig, group_layers

SLOTS = 32
SIZES = ShapeConfig(max_model_len=64, max_num_seqs=SLOTS, chunk=8, block_size=4, decode_buckets=(SLOTS,))
GROUPS = group_layers(
    [AttentionLayer(name, 2, 1, 32, window, torch.float32) for name, window in (("a", 0), ("b", 8))]
)


class DeviceCalls(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the operations on a device, and among them the copies from the host."""

    def __init__(self, device: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device = device
        self.operations = self.copies = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Runs the operation."""
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.device.type == self.device:
            views = func is torch.ops.aten.view.default or func is torch.ops.aten.slice.Tensor
            self.operations += not views and func is not torch.ops.aten.select.int
            sources = [each for each in args if isinstance(each, torch.Tensor)]
            self.copies += any(each.device.type == "cpu" for each in sources)
        return result


def make_batch(device: str) -> Batch:
    return Batch(SIZES, GROUPS, (600, 600), torch.device(device), SamplingVocabulary(300))


def admission(slot: int, tokens: int = 9) -> Admission:
    sampling = sampling_params(temperature=0.7, top_p=0.9, top_k=5, seed=slot)
    return Admission(
        slot,
        range(100, 100 + tokens),
        tokens - 1,
        sampling,
        {0: range(4 * slot + 1, 4 * slot + 5), 1: range(4 * slot + 1, 4 * slot + 5)},
    )


@pytest.mark.parametrize("count", [1, SLOTS])
def test_a_plans_admissions_are_one_copy(count: int) -> None:
    """The host copies once, and the device writes each of its tensors once."""
    batch = make_batch("meta")
    with DeviceCalls("meta") as calls:
        for slot in range(count):
            batch.admit(admission(slot))
        assert calls.operations == 0
        batch.copy_admitted()
    assert calls.copies == 1
    tensors = 4 + len(GROUPS)
    conversions = 1 + len(GROUPS)  # adapter slots and tables have 32 bits
    assert calls.operations == 1 + tensors + conversions
    with DeviceCalls("meta") as calls:
        batch.copy_admitted()
    assert calls.operations == 0


def test_a_copy_writes_what_single_admissions_write() -> None:
    """Requests admitted together leave the same state as requests admitted one by one."""
    together, single = make_batch("cpu"), make_batch("cpu")
    for slot in (3, 0, 7):
        together.admit(admission(slot, 9 + slot))
        single.admit(admission(slot, 9 + slot))
        single.copy_admitted()
    together.copy_admitted()
    rows = torch.tensor([3, 0, 7, SLOTS])
    for batch in (together, single):
        batch.check(Decode([3, 0, 7], [11, 8, 15], SLOTS))
    tokens, positions, _ = together.decode_inputs(rows)
    assert (tokens.tolist(), positions.tolist()) == ([111, 108, 115, 0], [11, 8, 15, 0])
    for one, other in zip(together._tables, single._tables, strict=True):
        assert torch.equal(one, other)
    assert torch.equal(together.sampling.parameters.rows, single.sampling.parameters.rows)
    columns = together.sampling.parameters
    assert columns.top_k[[3, 0, 1]].tolist() == [5, 5, 300]
    assert columns.temperature[[3, 0, 1]].tolist() == pytest.approx([0.7, 0.7, 0.0])
    assert columns.top_p[[3, 0, 1]].tolist() == pytest.approx([0.9, 0.9, 1.0])


def refused(batch: Batch, slot: int) -> None:
    """Admits a request that does not fit."""
    with pytest.raises(Internal):
        batch.admit(admission(slot, 65))


@pytest.mark.parametrize("leave", [Batch.release, refused])
def test_a_request_that_leaves_before_the_copy_writes_nothing(leave: Callable[[Batch, int], None]) -> None:
    """The slot stays free, and its next request gets its own values."""
    batch = make_batch("cpu")
    if leave is Batch.release:
        batch.admit(admission(2, 20))
    leave(batch, 2)
    batch.admit(admission(1))
    batch.copy_admitted()
    assert not batch._tables[0][2].any()
    assert not batch._tokens[2].any()
    batch.admit(admission(2))
    batch.copy_admitted()
    batch.check(Prefill(2, 8, 1, sample=True))
    assert batch.tokens_of(2, 0, 10).tolist() == [*range(100, 109), 0]
