"""The CPU's compiled attention and the gathered attention in plain PyTorch agree, and neither reads behind a window."""

from dataclasses import replace

import pytest
import torch

from worker_svc.devices import gathered
from worker_svc.devices.base import AttentionInput, AttentionShape
from worker_svc.devices.cpu import CpuDevice
from worker_svc.geometry import AttentionLayer, KvGroup
from worker_svc.vllm_adapter import engine

pytestmark = [pytest.mark.e2e, pytest.mark.filterwarnings("ignore")]  # importing vLLM

HEADS, KV_HEADS, SIZE, BLOCK, BLOCKS = 6, 2, 64, 32, 24


@pytest.fixture(scope="module")
def device() -> CpuDevice:
    """With vLLM's kernels loaded."""
    device = CpuDevice()
    engine.prepare(device)
    return device


def prefill_step(start: int, count: int, chunk: int) -> AttentionInput:
    """One row in blocks 5, 6, …; the rest of the chunk is padding."""
    table = torch.tensor([[5, 6, 7, 8, 9, 0, 0, 0]], dtype=torch.int32)
    positions = torch.arange(start, start + count)
    slots = torch.zeros(chunk, dtype=torch.int64)
    slots[:count] = table[0, positions // BLOCK].long() * BLOCK + positions % BLOCK
    lengths = torch.tensor([start + count], dtype=torch.int32)
    return AttentionInput(lengths, torch.tensor([0, count], dtype=torch.int32), table, slots, count)


def decode_step(positions: list[int]) -> AttentionInput:
    """A row for each position, in blocks of its own, and one row of padding."""
    rows = len(positions) + 1
    table = torch.zeros((rows, 8), dtype=torch.int32)
    table[:-1, :5] = torch.arange(1, 1 + 5 * (rows - 1), dtype=torch.int32).view(-1, 5)
    at = torch.tensor([*positions, 0])
    slots = table.gather(1, (at // BLOCK)[:, None])[:, 0].long() * BLOCK + at % BLOCK
    return AttentionInput((at + 1).int(), torch.arange(rows + 1, dtype=torch.int32), table, slots, rows)


@pytest.mark.parametrize("window", [0, 40])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_kernels_agree(device: CpuDevice, window: int, dtype: torch.dtype, tolerance: float) -> None:
    """Chunks of a prompt, the last of them padded, then decode steps: the same numbers from both, with and without a window."""
    generator = torch.Generator().manual_seed(0)
    layer = AttentionLayer("a", HEADS, KV_HEADS, SIZE, window, dtype)
    group = KvGroup(0, (layer,))
    shape = AttentionShape(HEADS, KV_HEADS, SIZE, 0.125, window, 0.0, writes=True)
    compiled = device.allocate(device.cache_shape(group, BLOCKS, BLOCK), dtype)
    plain = torch.zeros((BLOCKS, 2, BLOCK, KV_HEADS, SIZE), dtype=dtype)
    steps = [prefill_step(0, 64, 64), prefill_step(64, 17, 64), decode_step([3, 31, 100, 0])]
    for step in steps:
        tokens = step.slot_mapping.shape[0]
        query = torch.randn((tokens, HEADS, SIZE), generator=generator).to(dtype)
        key, value = (torch.randn((tokens, KV_HEADS, SIZE), generator=generator).to(dtype) for _ in range(2))
        ours, reference = torch.full_like(query, torch.nan), torch.full_like(query, torch.nan)
        device.attend(shape, query, key, value, compiled, device.plan(group, BLOCK, step), ours)
        gathered.attend(shape, query, key, value, plain, gathered.GatheredPlan.of(step), reference)
        torch.testing.assert_close(ours, reference, atol=tolerance, rtol=tolerance)
        assert not ours[step.num_tokens :].any()


@pytest.mark.parametrize("softcap", [0.0, 5.0])
@pytest.mark.parametrize(
    "step", [prefill_step(100, 17, 64), decode_step([159, 100, 71])], ids=["prefill", "decode"]
)
def test_blocks_behind_a_window_are_not_seen(device: CpuDevice, step: AttentionInput, softcap: float) -> None:
    """Whether a table still names blocks that are others' by now or the null block, the result is the same to the bit."""
    generator = torch.Generator().manual_seed(0)
    window = 40
    layer = AttentionLayer("a", HEADS, KV_HEADS, SIZE, window, torch.float32)
    group = KvGroup(0, (layer,))
    shape = AttentionShape(HEADS, KV_HEADS, SIZE, 0.125, window, softcap, writes=True)
    tokens = step.slot_mapping.shape[0]
    query = torch.randn((tokens, HEADS, SIZE), generator=generator)
    key, value = (torch.randn((tokens, KV_HEADS, SIZE), generator=generator) for _ in range(2))
    compiled = device.allocate(device.cache_shape(group, BLOCKS, BLOCK), torch.float32)
    plain = torch.zeros((BLOCKS, 2, BLOCK, KV_HEADS, SIZE))
    for cache in (compiled, plain):
        cache.normal_(generator=generator)
    # The first query of each row is at the position of the tokens computed before the step.
    counts = step.query_start[1:] - step.query_start[:-1]
    seen_from = step.seq_lens - counts - window + 1
    behind = (torch.arange(1, 1 + step.block_table.shape[1]) * BLOCK)[None] <= seen_from[:, None]
    assert behind.any()
    nulled = replace(step, block_table=step.block_table.masked_fill(behind, 0))
    others = step.block_table[behind].long()

    def run(table: AttentionInput) -> tuple[torch.Tensor, torch.Tensor]:
        ours, reference = torch.empty_like(query), torch.empty_like(query)
        device.attend(shape, query, key, value, compiled, device.plan(group, BLOCK, table), ours)
        gathered.attend(shape, query, key, value, plain, gathered.GatheredPlan.of(table), reference)
        return ours, reference

    before = run(step)
    for cache in (compiled, plain):
        cache[others] = 1000.0 * torch.randn(cache[others].shape, generator=generator)
    for table in (step, nulled):
        assert all(torch.equal(*pair) for pair in zip(before, run(table), strict=True))
    plain[others] = torch.nan
    assert torch.equal(before[1], run(step)[1])
