"""The persistent batch: how plans change slots, and the inputs that steps get."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from protos.errors import Internal
from protos.steps import Admission, Decode, GroupKind, Growth, Prefill
from tests.support.sampling_params import sampling_params
from worker_svc.devices.attention import InPlaceInput, PagedInput
from worker_svc.devices.lora_stack import NO_ADAPTER
from worker_svc.execution.batch import Batch
from worker_svc.sampling.state import SamplingVocabulary
from worker_svc.shapes import AttentionLayer, ShapeConfig, group_layers

LAYERS = [
    AttentionLayer("full", 2, 1, 32, 0, torch.float32),
    AttentionLayer("window", 2, 1, 32, 8, torch.float32),
]
GROUPS = group_layers(LAYERS)
SIZES = ShapeConfig(max_model_len=32, max_num_seqs=3, chunk=8, block_size=4, decode_buckets=(1, 2, 4))


@pytest.fixture
def batch() -> Batch:
    return Batch(SIZES, GROUPS, (20, 20), torch.device("cpu"), SamplingVocabulary(300))


@pytest.fixture
def sliding() -> Batch:
    """A batch with blocks of 8 tokens and a window of 8 that slides in place."""
    return Batch(
        replace(SIZES, block_size=8),
        group_layers(LAYERS, GroupKind.IN_PLACE_WINDOW),
        (20, 4),
        torch.device("cpu"),
        SamplingVocabulary(300),
    )


def sliding_request(slot: int, tokens: int, computed: int, block: int) -> Admission:
    """A request with paged blocks for the longest sequence, and one block that slides."""
    blocks = {0: range(1 + 4 * slot, 5 + 4 * slot), 1: [block]}
    return Admission(slot, range(tokens), computed, sampling_params(temperature=0.0), blocks)


def paged(step: object) -> PagedInput:
    """Narrows a step's input to a paged group's."""
    assert isinstance(step, PagedInput)
    return step


def in_place(step: object) -> InPlaceInput:
    """Narrows a step's input to an in-place group's."""
    assert isinstance(step, InPlaceInput)
    return step


def request(slot: int = 0, tokens: int = 10, computed: int = 0, blocks: int = 3) -> Admission:
    """A request with token ids 100, 101, …; blocks 1, 2, … in group 0 and 11, 12, … in group 1."""
    ids = {0: range(1, 1 + blocks), 1: range(11, 11 + blocks)}
    return Admission(slot, range(100, 100 + tokens), computed, sampling_params(temperature=0.0), ids)


def test_prefill_inputs_are_padded_into_the_null_block(batch: Batch) -> None:
    """The second chunk of 10 tokens has two real tokens; the six padding tokens are written to block 0."""
    batch.admit(request(computed=8))
    batch.copy_admitted()
    work = Prefill(0, 8, 2, sample=True)
    batch.ready(work)
    tokens, positions, (full, window) = batch.prefill_inputs(8, work)
    assert tokens.tolist() == [108, 109, 0, 0, 0, 0, 0, 0]
    assert positions.tolist() == [8, 9, 0, 0, 0, 0, 0, 0]
    assert paged(full).slot_mapping.tolist() == [3 * 4, 3 * 4 + 1, 0, 0, 0, 0, 0, 0]
    assert paged(window).slot_mapping.tolist() == [13 * 4, 13 * 4 + 1, 0, 0, 0, 0, 0, 0]
    assert paged(full).block_table.tolist() == [[1, 2, 3, 0, 0, 0, 0, 0]]
    assert paged(full).seq_lens.tolist() == [10]
    assert paged(full).query_start.tolist() == [0, 2]


def test_a_chunk_is_padded_to_its_bucket() -> None:
    """Tokens, positions and slots have the bucket's length; without one, the largest bucket's."""
    shapes = replace(SIZES, prefill_buckets=(4, 8))
    batch = Batch(shapes, GROUPS, (20, 20), torch.device("cpu"), SamplingVocabulary(300))
    batch.admit(request(tokens=3))
    batch.copy_admitted()
    work = Prefill(0, 0, 3, True, 4)
    batch.ready(work)
    tokens, positions, (full, _) = batch.prefill_inputs(batch.bucket_of(work), work)
    assert (tokens.tolist(), positions.tolist()) == ([100, 101, 102, 0], [0, 1, 2, 0])
    assert paged(full).slot_mapping.tolist() == [4, 5, 6, 0]
    assert batch.chunk_adapters(4, work).tolist() == [NO_ADAPTER] * 4
    assert batch.bucket_of(Prefill(0, 0, 3, True)) == 8


def test_a_bucket_that_was_not_configured_is_refused() -> None:
    shapes = replace(SIZES, prefill_buckets=(4, 8))
    batch = Batch(shapes, GROUPS, (20, 20), torch.device("cpu"), SamplingVocabulary(300))
    batch.admit(request(tokens=6))
    with pytest.raises(Internal, match=r"in a bucket of 6; the worker has \(4, 8\)"):
        batch.ready(Prefill(0, 0, 6, True, 6))
    with pytest.raises(Internal, match="prefills tokens 0 to 6"):
        batch.ready(Prefill(0, 0, 6, True, 4))


def test_decode_inputs_gather_slots_and_padding(batch: Batch) -> None:
    """Rows follow the plan's order; padded rows are one token in the null block."""
    batch.admit(request(slot=2, tokens=6, computed=5))
    batch.admit(Admission(0, range(200, 205), 4, sampling_params(), {0: [7, 8], 1: [17, 18]}))
    batch.copy_admitted()
    batch.ready(Decode((2, 0), 4))
    rows = torch.tensor([2, 0, batch.padding_row, batch.padding_row])
    tokens, positions, (full, _) = batch.decode_inputs(rows)
    assert tokens.tolist() == [105, 204, 0, 0]
    assert positions.tolist() == [5, 4, 0, 0]
    assert paged(full).seq_lens.tolist() == [6, 5, 1, 1]
    assert paged(full).slot_mapping.tolist() == [2 * 4 + 1, 8 * 4, 0, 0]
    assert paged(full).block_table[:, :3].tolist() == [[1, 2, 3], [7, 8, 0], [0, 0, 0], [0, 0, 0]]
    assert paged(full).query_start.tolist() == [0, 1, 2, 3, 4]


def test_rows_advance_and_padding_stays(batch: Batch) -> None:
    """Each row goes on with its new token; that of a padded row is dropped."""
    batch.admit(request(slot=2, tokens=6, computed=5))
    batch.copy_admitted()
    rows = torch.tensor([2, batch.padding_row, batch.padding_row])
    for token in (7, 8):
        batch.advance_rows(rows, torch.tensor([token, 9, 9]))
        tokens, positions, _ = batch.decode_inputs(rows)
        assert tokens.tolist() == [token, 0, 0]
        assert positions.tolist() == [token - 1, 0, 0]


def test_growth_appends(batch: Batch) -> None:
    batch.admit(request(tokens=4, blocks=1))
    batch.copy_admitted()
    batch.grow(Growth(0, 0, (9,)))
    batch.grow(Growth(0, 0, (8,)))
    _, _, (full, window) = batch.prefill_inputs(8, Prefill(0, 0, 4, sample=True))
    assert paged(full).block_table[0, :4].tolist() == [1, 9, 8, 0]
    assert paged(window).block_table[0, :4].tolist() == [11, 0, 0, 0]


@pytest.mark.parametrize(
    ("work", "message"),
    [
        (Prefill(0, 0, 4, sample=False), "2 of 10 computed"),
        (Prefill(0, 2, 9, sample=True), "2 of 10 computed"),
        (Prefill(0, 2, 8, sample=False), "must sample slot 0 at its last known token"),
        (Prefill(0, 2, 4, sample=True), "must sample slot 0 at its last known token"),
        (Prefill(1, 0, 4, sample=False), "slot 1, which is free"),
        (Decode((0,), 3), "bucket of 3"),
        (Decode((0, 0), 2), "names a slot twice"),
        (Decode((7,), 1), "slot 7"),
    ],
)
def test_work_that_contradicts_the_state_is_refused(
    batch: Batch, work: Prefill | Decode, message: str
) -> None:
    """Scheduler and worker must agree on what is computed; the refusal says what the worker knows."""
    batch.admit(request(computed=2))
    batch.copy_admitted()
    with pytest.raises(Internal, match=message):
        batch.ready(work)


@pytest.mark.parametrize(
    ("admission", "message"),
    [
        (request(slot=3), "slot 3"),
        (request(tokens=33), "33 tokens"),
        (request(tokens=4, computed=4), "at least one must be left"),
        (request(blocks=9), "its table holds 8"),
        (Admission(0, (1,), 0, sampling_params(), {0: (20,)}), "block 20 of KV group 0, which has 20"),
        (Admission(0, (1,), 0, sampling_params(), {2: (1,)}), "KV group 2"),
    ],
)
def test_requests_that_do_not_fit_are_refused(batch: Batch, admission: Admission, message: str) -> None:
    with pytest.raises(Internal, match=message):
        batch.admit(admission)


@pytest.mark.parametrize("computed", [11, 12, 16])
def test_blocks_behind_a_paged_window_may_be_null(batch: Batch, computed: int) -> None:
    """With 11 tokens computed the next query attends to positions 4 to 11, so block 0 may be null."""
    blocks = {0: (1, 2, 3, 4, 5), 1: (0, 12, 13, 14, 15)}
    batch.admit(Admission(0, range(20), computed, sampling_params(), blocks))
    batch.copy_admitted()
    _, _, (_, window) = batch.prefill_inputs(8, Prefill(0, computed, 4, sample=False))
    assert paged(window).block_table[0].tolist() == [0, 12, 13, 14, 15, 0, 0, 0]


@pytest.mark.parametrize(
    ("computed", "blocks"),
    [
        (10, {0: (1, 2, 3), 1: (0, 12, 13)}),  # position 3 is visible
        (11, {0: (1, 2, 3), 1: (0, 0, 13)}),
        (11, {0: (0, 2, 3), 1: (0, 12, 13)}),  # everything is visible to full attention
        (0, {0: (1,), 1: (0,)}),
    ],
)
def test_a_visible_null_block_is_refused(
    batch: Batch, computed: int, blocks: dict[int, tuple[int, ...]]
) -> None:
    """Positions that a query attends to must lie in the request's own blocks."""
    with pytest.raises(Internal, match="null block"):
        batch.admit(Admission(0, range(12), computed, sampling_params(), blocks))


def test_prefill_of_an_in_place_window(sliding: Batch) -> None:
    """The inputs count the computed tokens, up to a window, without padding."""
    sliding.admit(sliding_request(0, 5, 0, block=3))
    sliding.admit(sliding_request(1, 20, 16, block=2))
    sliding.copy_admitted()
    for slot, start, count, expected in ((0, 0, 5, (0, 5, 3)), (1, 16, 4, (8, 12, 2))):
        work = Prefill(slot, start, count, sample=True)
        sliding.ready(work)
        _, _, (_, window) = sliding.prefill_inputs(8, work)
        step = in_place(window)
        assert [step.cache_seq_len.tolist(), step.cache_offset.tolist(), step.block_table.tolist()] == [
            [[number]] for number in expected
        ]
        assert step.query_len == 8
    assert in_place(sliding.prefill_inputs(8)[2][1]).block_table.tolist() == [[0]]


def test_decode_of_an_in_place_window(sliding: Batch) -> None:
    """Rows below and above the window's length count correctly; padded rows are empty."""
    sliding.admit(sliding_request(0, 4, 3, block=3))
    sliding.admit(sliding_request(2, 31, 30, block=1))
    sliding.copy_admitted()
    work = Decode((2, 0), 4)
    sliding.ready(work)
    rows = torch.tensor([2, 0, sliding.padding_row, sliding.padding_row])
    step = in_place(sliding.decode_inputs(rows)[2][1])
    assert step.cache_seq_len.tolist() == [[8], [3], [0], [0]]
    assert step.cache_offset.tolist() == [[9], [4], [1], [1]]
    assert step.block_table.tolist() == [[1], [3], [0], [0]]
    assert step.query_len == 1


def test_an_in_place_window_has_exactly_one_block(sliding: Batch) -> None:
    sliding.admit(sliding_request(0, 4, 3, block=3))
    sliding.copy_admitted()
    with pytest.raises(Internal, match="would get 2 blocks of group 1; its table holds 1"):
        sliding.grow(Growth(0, 1, (2,)))
    sliding.admit(Admission(1, range(4), 0, sampling_params(), {0: (5,)}))
    sliding.copy_admitted()
    with pytest.raises(Internal, match="slot 1 has blocks for 0 tokens"):
        sliding.ready(Prefill(1, 0, 4, sample=True))
    with pytest.raises(Internal, match="null block"):
        sliding.admit(sliding_request(2, 31, 30, block=0))
    sliding.grow(Growth(1, 1, (2,)))
    sliding.ready(Prefill(1, 0, 4, sample=True))


SLOTS = 32
STAGED_SIZES = ShapeConfig(
    max_model_len=64, max_num_seqs=SLOTS, chunk=8, block_size=4, decode_buckets=(SLOTS,)
)
STAGED_GROUPS = group_layers(
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
    return Batch(STAGED_SIZES, STAGED_GROUPS, (600, 600), torch.device(device), SamplingVocabulary(300))


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
    batch = make_batch("meta")
    with DeviceCalls("meta") as calls:
        for slot in range(count):
            batch.admit(admission(slot))
        assert calls.operations == 0
        batch.copy_admitted()
    assert calls.copies == 1
    tensors = 4 + len(STAGED_GROUPS)
    conversions = 1 + len(STAGED_GROUPS)  # adapter slots and tables have 32 bits
    assert calls.operations == 1 + tensors + conversions
    with DeviceCalls("meta") as calls:
        batch.copy_admitted()
    assert calls.operations == 0


def test_a_copy_writes_what_single_admissions_write() -> None:
    together, single = make_batch("cpu"), make_batch("cpu")
    for slot in (3, 0, 7):
        together.admit(admission(slot, 9 + slot))
        single.admit(admission(slot, 9 + slot))
        single.copy_admitted()
    together.copy_admitted()
    rows = torch.tensor([3, 0, 7, SLOTS])
    for batch in (together, single):
        batch.ready(Decode([3, 0, 7], SLOTS))
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
    batch.ready(Prefill(2, 8, 1, sample=True))
    assert batch.tokens_of(2, 0, 10).tolist() == [*range(100, 109), 0]
