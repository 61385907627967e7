"""The CPU's compiled attention equals gathered attention in plain PyTorch; neither reads behind a window."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from tests.support.attention import naive_attention
from worker_svc.devices import plain_attention
from worker_svc.devices.attention import AttentionCall, AttentionParams, PagedInput
from worker_svc.devices.cpu.device import CpuDevice
from worker_svc.graphs.capture import Recorder
from worker_svc.graphs.replay import build_kernel_graph
from worker_svc.shapes import AttentionLayer, KvGroup
from worker_svc.vllm_adapter import startup

pytestmark = [pytest.mark.e2e, pytest.mark.filterwarnings("ignore")]  # importing vLLM

HEADS, KV_HEADS, SIZE, BLOCK, BLOCKS = 6, 2, 64, 32, 24


@pytest.fixture(scope="module")
def device() -> CpuDevice:
    """The CPU device with vLLM's kernels loaded."""
    device = CpuDevice()
    startup.prepare(device.name)
    return device


def prefill_step(start: int, count: int, chunk: int) -> PagedInput:
    """A prefill step of one row in blocks 5, 6, …; the rest of the chunk is padding."""
    table = torch.tensor([[5, 6, 7, 8, 9, 0, 0, 0]], dtype=torch.int32)
    positions = torch.arange(start, start + count)
    slots = torch.zeros(chunk, dtype=torch.int64)
    slots[:count] = table[0, positions // BLOCK].long() * BLOCK + positions % BLOCK
    lengths = torch.tensor([start + count], dtype=torch.int32)
    return PagedInput(lengths, torch.tensor([0, count], dtype=torch.int32), table, slots, count)


def decode_step(positions: list[int]) -> PagedInput:
    """A decode step with a row per position, each in its own blocks, and one padded row."""
    rows = len(positions) + 1
    table = torch.zeros((rows, 8), dtype=torch.int32)
    table[:-1, :5] = torch.arange(1, 1 + 5 * (rows - 1), dtype=torch.int32).view(-1, 5)
    at = torch.tensor([*positions, 0])
    slots = table.gather(1, (at // BLOCK)[:, None])[:, 0].long() * BLOCK + at % BLOCK
    return PagedInput((at + 1).int(), torch.arange(rows + 1, dtype=torch.int32), table, slots, rows)


@pytest.mark.parametrize("softcap", [0.0, 5.0])
@pytest.mark.parametrize(
    "step", [prefill_step(100, 17, 64), decode_step([159, 100, 71])], ids=["prefill", "decode"]
)
def test_blocks_behind_a_window_are_not_seen(device: CpuDevice, step: PagedInput, softcap: float) -> None:
    generator = torch.Generator().manual_seed(0)
    window = 40
    layer = AttentionLayer("a", HEADS, KV_HEADS, SIZE, window, torch.float32)
    group = KvGroup(0, (layer,))
    shape = AttentionParams(HEADS, KV_HEADS, SIZE, 0.125, window, softcap, writes=True)
    tokens = step.slot_mapping.shape[0]
    query = torch.randn((tokens, HEADS, SIZE), generator=generator)
    key, value = (torch.randn((tokens, KV_HEADS, SIZE), generator=generator) for _ in range(2))
    compiled = device.allocate(device.cache_shape(group, BLOCKS, BLOCK), torch.float32)
    plain = torch.zeros((BLOCKS, 2, BLOCK, KV_HEADS, SIZE))
    for cache in (compiled, plain):
        cache.normal_(generator=generator)
    # Each row's first query is at the position after the tokens computed before the step.
    counts = step.query_start[1:] - step.query_start[:-1]
    seen_from = step.seq_lens - counts - window + 1
    behind = (torch.arange(1, 1 + step.block_table.shape[1]) * BLOCK)[None] <= seen_from[:, None]
    assert behind.any()
    nulled = replace(step, block_table=step.block_table.masked_fill(behind, 0))
    others = step.block_table[behind].long()

    def run(table: PagedInput) -> tuple[torch.Tensor, torch.Tensor]:
        ours, reference = torch.empty_like(query), torch.empty_like(query)
        device.attend(
            AttentionCall(shape, query, key, value, compiled, ours), device.plan(group, BLOCK, table)
        )
        plain_attention.attend(
            AttentionCall(shape, query, key, value, plain, reference), plain_attention.GatheredPlan.of(table)
        )
        return ours, reference

    before = run(step)
    for cache in (compiled, plain):
        cache[others] = 1000.0 * torch.randn(cache[others].shape, generator=generator)
    for table in (step, nulled):
        assert all(torch.equal(*pair) for pair in zip(before, run(table), strict=True))
    plain[others] = torch.nan
    assert torch.equal(before[1], run(step)[1])


class Conversation:
    """A sequence for attention tests: a prompt in padded chunks, then decode steps with a padded row."""

    def __init__(self, dtype: torch.dtype, shape: AttentionParams, sinks: torch.Tensor | None) -> None:
        self.dtype, self.shape, self.sinks = dtype, shape, sinks
        self.group = KvGroup(0, (AttentionLayer("a", HEADS, KV_HEADS, SIZE, shape.window, dtype),))
        self.generator = torch.Generator().manual_seed(0)
        self.keys, self.values = torch.empty((2, 0, KV_HEADS, SIZE), dtype=dtype)

    def steps(self) -> Sequence[tuple[PagedInput, int]]:
        """Returns the steps, each with its number of real tokens."""
        decode = [decode_step([position]) for position in (81, 82)]
        table = prefill_step(0, 1, 1).block_table[0]
        for step, position in zip(decode, (81, 82), strict=True):
            step.block_table[0] = table
            step.slot_mapping[0] = int(table[position // BLOCK]) * BLOCK + position % BLOCK
        return [
            (prefill_step(0, 64, 64), 64),
            (prefill_step(64, 17, 64), 17),
            *((step, 1) for step in decode),
        ]

    def random(self, tokens: int, heads: int) -> torch.Tensor:
        return torch.randn((tokens, heads, SIZE), generator=self.generator).to(self.dtype)

    def expected(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, count: int
    ) -> torch.Tensor:
        """Returns the naive result for a step's real tokens."""
        before = len(self.keys)
        self.keys, self.values = torch.cat((self.keys, key[:count])), torch.cat((self.values, value[:count]))
        return naive_attention(self.shape, query[:count], self.keys, self.values, before, self.sinks)


KINDS = [(window, softcap, sinks) for window in (0, 40) for softcap in (0.0, 3.0) for sinks in (False, True)]


@pytest.mark.parametrize(("window", "softcap", "with_sinks"), KINDS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_every_kind_of_attention_equals_a_naive_one(
    device: CpuDevice, window: int, softcap: float, with_sinks: bool, dtype: torch.dtype, tolerance: float
) -> None:
    """Every combination of window, soft cap and sinks is correct, in compiled, bound and gathered form."""
    shape = AttentionParams(HEADS, KV_HEADS, SIZE, 0.3, window, softcap, writes=True, sinks=with_sinks)
    sinks = torch.linspace(-2, 3, HEADS) if with_sinks else None
    talk = Conversation(dtype, shape, sinks)
    cache_shape = device.cache_shape(talk.group, BLOCKS, BLOCK)
    compiled, bound = (device.allocate(cache_shape, dtype) for _ in range(2))
    plain = torch.zeros((BLOCKS, 2, BLOCK, KV_HEADS, SIZE), dtype=dtype)
    for step, count in talk.steps():
        tokens = step.slot_mapping.shape[0]
        query, key, value = (talk.random(tokens, heads) for heads in (HEADS, KV_HEADS, KV_HEADS))
        expected = talk.expected(query, key, value, count)
        outputs = [torch.full_like(query, torch.nan) for _ in range(3)]
        plan = device.plan(talk.group, BLOCK, step)
        device.attend(AttentionCall(shape, query, key, value, compiled, outputs[0], sinks), plan)
        device.bind_attention(AttentionCall(shape, query, key, value, bound, outputs[1], sinks))(plan)
        plain_attention.attend(
            AttentionCall(shape, query, key, value, plain, outputs[2], sinks),
            plain_attention.GatheredPlan.of(step),
        )
        for output in outputs:
            torch.testing.assert_close(output[:count], expected, atol=tolerance, rtol=tolerance)
        assert not outputs[0][step.num_tokens :].any()


def test_a_layers_sinks_reach_the_device(device: CpuDevice) -> None:
    """Sinks are read after the weights are loaded, and take part in eager and in recorded steps."""
    from worker_svc.vllm_adapter.attention import RecordedAttention, StepAttention, TriptychAttention

    weight = torch.nn.Parameter(torch.zeros(HEADS, dtype=torch.bfloat16), requires_grad=False)
    layer = TriptychAttention(HEADS, SIZE, 0.3, KV_HEADS, sinks=weight)
    assert layer.params.sinks
    weight.copy_(torch.linspace(-2, 3, HEADS))
    layer.process_weights_after_loading(torch.float32)
    talk = Conversation(torch.float32, layer.params, weight)
    cache = device.allocate(device.cache_shape(talk.group, BLOCKS, BLOCK), torch.float32)
    step, count = talk.steps()[0]
    query, key, value = (talk.random(64, heads) for heads in (HEADS, KV_HEADS, KV_HEADS))
    expected = talk.expected(query, key, value, count)
    output = torch.empty_like(query)
    plan = StepAttention(device, device.plan(talk.group, BLOCK, step))
    module = torch.nn.Module()
    layer.forward(module, query, key, value, cache, plan, output)
    torch.testing.assert_close(output, expected, atol=1e-5, rtol=1e-5)
    recorder = Recorder((query,))
    with torch.inference_mode(), recorder:
        recorded = layer.forward(
            module, query, key, value, cache, RecordedAttention(recorder, "a"), torch.empty_like(query)
        )
    graph = build_kernel_graph(recorder.finish(recorded), device)
    torch.testing.assert_close(graph.replay((query,), {"a": plan}), expected, atol=1e-5, rtol=1e-5)
