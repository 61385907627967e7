"""The Triton kernels against the gathered attention, on a GPU or in Triton's interpreter."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from tests.support.paths import ROOT
from worker_svc.devices import gathered
from worker_svc.devices.attention import AttentionCall, AttentionParams, PagedInput
from worker_svc.devices.cuda import triton_attention, triton_kernels
from worker_svc.devices.cuda.device import CudaDevice
from worker_svc.plans.geometry import AttentionLayer, KvGroup

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


@dataclass(frozen=True)
class Case:
    """A layer and its cache."""

    heads: int = 4
    kv_heads: int = 2
    size: int = 64
    block: int = 16
    window: int = 0
    softcap: float = 0.0
    sinks: bool = False
    dtype: torch.dtype = torch.float32

    @property
    def shape(self) -> AttentionParams:
        return AttentionParams(
            self.heads, self.kv_heads, self.size, 0.3, self.window, self.softcap, writes=True
        )


CASES = {
    "plain": Case(),
    "every head its own keys": Case(heads=2, kv_heads=2),
    "three heads share": Case(heads=6, kv_heads=2),
    "eight heads share": Case(heads=8, kv_heads=1),
    "heads of 80": Case(size=80),
    "heads of 128": Case(size=128),
    "heads of 256": Case(heads=2, kv_heads=1, size=256),
    "window": Case(window=21),
    "window of one block": Case(window=16),
    "softcap": Case(softcap=3.0),
    "sinks": Case(sinks=True),
    "all of it": Case(heads=6, window=37, softcap=5.0, sinks=True, size=80, block=48),
    "blocks of 48": Case(block=48),
    "blocks of 128": Case(block=128),
    "float16": Case(dtype=torch.float16, softcap=10.0, sinks=True, block=64),
}
if DEVICE.type == "cuda":  # the interpreter multiplies bfloat16 as if it were integers
    CASES["bfloat16"] = Case(dtype=torch.bfloat16, softcap=10.0, sinks=True, block=64)
WIDTH_TOKENS = 384


class Rig:
    """A layer's cache of NaN, but for what steps write to it, and the same for the reference."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.device = CudaDevice()
        self.group = KvGroup(
            0,
            (AttentionLayer("a", case.heads, case.kv_heads, case.size, case.window, case.dtype),),
        )
        self.width = WIDTH_TOKENS // case.block
        blocks = 1 + 5 * self.width
        shape = self.device.cache_shape(self.group, blocks, case.block)
        self.cache = torch.full(shape, torch.nan, dtype=case.dtype, device=DEVICE)
        self.reference = self.cache.transpose(2, 3).contiguous()
        # Blocks of a row lie anywhere.
        generator = torch.Generator().manual_seed(1)
        order = 1 + torch.randperm(blocks - 1, generator=generator)
        self.tables = order.view(5, self.width).int()
        self.generator = torch.Generator().manual_seed(0)
        self.sinks = self.random(case.heads).float() if case.sinks else None

    def random(self, *size: int) -> torch.Tensor:
        return torch.randn(size, generator=self.generator).to(DEVICE, self.case.dtype)

    def fill(self, row: int, length: int) -> None:
        """Keys and values of a sequence's first tokens."""
        keys, values = self.random(2, length, self.case.kv_heads, self.case.size)
        at = torch.arange(length)
        blocks, offsets = self.tables[row, at // self.case.block].long(), at % self.case.block
        for cache in (self.cache.transpose(2, 3), self.reference):
            cache[blocks, 0, offsets] = keys
            cache[blocks, 1, offsets] = values

    def step(self, rows: list[int], starts: list[int], counts: list[int], query_len: int) -> PagedInput:
        """Rows of real tokens; row -1 is padding, and what its table's entries behind a window name are null blocks."""
        block = self.case.block
        tables = torch.zeros((len(rows), self.width), dtype=torch.int32)
        slots = torch.zeros((len(rows), query_len), dtype=torch.int64)
        for place, (row, start, count) in enumerate(zip(rows, starts, counts, strict=True)):
            if row < 0:
                continue
            tables[place] = self.tables[row]
            at = torch.arange(start, start + count)
            slots[place, :count] = tables[place, at // block].long() * block + at % block
            if self.case.window:
                tables[place, : max(0, start - self.case.window + 1) // block] = 0
            # What lies beyond the end belongs to nobody.
            tables[place, -(-(start + count) // block) :] = 0
        ends = torch.tensor([0, *counts]).cumsum(0).int()
        lengths = torch.tensor([start + count for start, count in zip(starts, counts, strict=True)]).int()
        return PagedInput(
            lengths.to(DEVICE), ends.to(DEVICE), tables.to(DEVICE), slots.view(-1).to(DEVICE),
            counts[0] if len(rows) == 1 else len(rows),
        )  # fmt: skip

    def check(self, step: PagedInput, real: torch.Tensor) -> None:
        """Runs a step of random tokens, padding of NaN, on both; all but ``real`` tokens must give zeros."""
        case, tokens = self.case, len(real)
        # As in a layer: all three are parts of one matrix.
        states = self.random(tokens, case.heads + 2 * case.kv_heads, case.size)
        query, key, value = torch.split(states, [case.heads, case.kv_heads, case.kv_heads], dim=1)
        query[~real] = torch.nan
        output = torch.full((tokens, case.heads, case.size), torch.nan, dtype=case.dtype, device=DEVICE)
        expected = torch.empty_like(output)
        plan = self.device.plan(self.group, case.block, step)
        self.device.attend(AttentionCall(case.shape, query, key, value, self.cache, output, self.sinks), plan)
        gathered.attend(AttentionCall(case.shape, query.nan_to_num(), key, value, self.reference, expected, self.sinks), gathered.GatheredPlan.of(step))  # fmt: skip
        tolerance = TOLERANCE[case.dtype]
        torch.testing.assert_close(output[real], expected[real], atol=tolerance, rtol=tolerance)
        assert not output[~real].any()
        real_slots = step.slot_mapping >= case.block
        blocks, offsets = (
            step.slot_mapping[real_slots] // case.block,
            step.slot_mapping[real_slots] % case.block,
        )
        assert torch.equal(self.cache.transpose(2, 3)[blocks, :, offsets], self.reference[blocks, :, offsets])


@pytest.fixture(params=CASES)
def rig(request: pytest.FixtureRequest) -> Rig:
    return Rig(CASES[request.param])


def test_decode(rig: Rig) -> None:
    """Rows of ragged lengths, in no order, around edges of blocks and windows, with padded rows between and behind them."""
    lengths = [0, 130, 63, 300]
    for row, length in enumerate(lengths):
        rig.fill(row, length)
    rows, starts = [3, 0, -1, 1, 2, -1], [300, 0, 0, 130, 63, 0]
    real = torch.tensor([row >= 0 for row in rows], device=DEVICE)
    rig.check(rig.step(rows, starts, [1] * 6, 1), real)
    # One row is split as far as it goes.
    rig.check(rig.step([1], [131], [1], 1), real[:1])


@pytest.mark.parametrize(("start", "count"), [(50, 48), (250, 29)])
def test_chunks(rig: Rig, start: int, count: int) -> None:
    """A prompt's chunks: a full one, and one that is padded behind much context."""
    rig.fill(0, start)
    real = torch.arange(48, device=DEVICE) < count
    rig.check(rig.step([0], [start], [count], 48), real)


@pytest.mark.parametrize("case", ["plain", "all of it"])
@pytest.mark.parametrize("count", [48, 17, 1])
def test_first_chunks(case: str, count: int) -> None:
    """Without any context, full, padded, and of one token."""
    real = torch.arange(48, device=DEVICE) < count
    rig = Rig(CASES[case])
    rig.check(rig.step([0], [0], [count], 48), real)


def test_a_chunk_of_padding_alone_gives_zeros() -> None:
    """As a warm-up runs it: one token in the null block."""
    rig = Rig(CASES["sinks"])
    rig.check(rig.step([-1], [0], [1], 16), torch.zeros(16, dtype=torch.bool, device=DEVICE))


def test_a_layer_that_reads_another_cache_writes_nothing() -> None:
    """It has no keys and values of its own."""
    rig = Rig(CASES["plain"])
    rig.fill(0, 20)
    before = rig.cache.clone()
    query, output = rig.random(1, 4, 64), torch.empty((1, 4, 64), device=DEVICE)
    plan = rig.device.plan(rig.group, 16, rig.step([0], [19], [1], 1))
    rig.device.attend(
        AttentionCall(replace(rig.case.shape, writes=False), query, None, None, rig.cache, output), plan
    )
    assert torch.equal(rig.cache.nan_to_num(), before.nan_to_num())
    assert output.isfinite().all()
    assert output.any()


@pytest.mark.parametrize("processors", [1, 8, 132])
def test_splits_change_nothing(processors: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One split, some, and more than there are tiles of keys; then also for a chunk."""
    monkeypatch.setattr(triton_attention, "processors", lambda _: processors)
    rig = Rig(replace(CASES["all of it"], block=16, size=64))
    for row, length in enumerate((5, 290)):
        rig.fill(row, length)
    real = torch.ones(2, dtype=torch.bool, device=DEVICE)
    rig.check(rig.step([0, 1], [5, 290], [1, 1], 1), real)
    rig.check(rig.step([1], [291], [20], 24), torch.arange(24, device=DEVICE) < 20)


def launch(rows: int, query_len: int = 1, processors: int = 132) -> triton_attention._Launch:
    """Of a model like Llama 3.2 1B that reads up to 8,192 tokens."""
    shape = AttentionParams(32, 8, 64, 0.125, 0, 0.0, writes=True)
    return triton_attention._launch(shape, rows, query_len, 128, 64, 2, processors)


def programs(rows: int, context: int) -> int:
    """Programs of a decode step that have anything to do."""
    made = launch(rows)
    tiles = -(-context // made.keys)
    share = -(-tiles // made.splits)
    return rows * 8 * -(-tiles // share)


def test_launches_fit_a_gpu() -> None:
    """One short row keeps all processors busy, many rows are not split, and chunks have tiles for all processors."""
    assert programs(1, 2000) >= 132
    assert programs(8, 2000) >= 2 * 132
    assert launch(128).splits == launch(64).splits == 1
    assert launch(1, 512).grid == (32, 8, 1)
    assert launch(1, 64).splits > 1


def test_launches_do_not_follow_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the lengths, a launch has the same grid and the same numbers, and the plan holds tensors alone."""
    rig = Rig(CASES["window"])
    for row in range(2):
        rig.fill(row, 200)
    launches: list[object] = []

    class Spy:
        def __init__(self, kernel: Callable[..., object]) -> None:
            self.kernel = kernel

        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., object]:
            def run(*arguments: object, **keywords: object) -> object:
                numbers = [None if isinstance(each, torch.Tensor) else each for each in arguments]
                launches.append((grid, numbers, keywords))
                return self.kernel[grid](*arguments, **keywords)  # type: ignore[index]

            return run

    for name in ("write_kernel", "attend_kernel", "combine_kernel"):
        monkeypatch.setattr(triton_kernels, name, Spy(getattr(triton_kernels, name)))
    seen = []
    for lengths in ([0, 3], [150, 199]):
        step = rig.step([0, 1], lengths, [1, 1], 1)
        plan = rig.device.plan(rig.group, 16, step)
        assert all(isinstance(value, torch.Tensor) for value in vars(plan).values())
        rig.check(step, torch.ones(2, dtype=torch.bool, device=DEVICE))
        seen.append(list(launches))
        launches.clear()
    assert seen[0] == seen[1]


def test_the_compiler_takes_the_kernels(tmp_path: Path) -> None:
    """For a GPU that need not be there: the interpreter lets pass what it refuses, and knows nothing of a GPU's memory."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": os.pathsep.join(sys.path), "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.worker.triton_process"], env=environment, cwd=ROOT,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    shared = json.loads(done.stdout)
    assert len(shared) == 8
    assert max(shared.values()) <= 227 * 1024


@pytest.mark.skipif(DEVICE.type != "cuda", reason="CUDA graphs are a GPU's")
def test_one_graph_serves_all_lengths() -> None:
    """A captured step is replayed on other lengths, tables and fills of its chunk."""
    rig = Rig(replace(CASES["all of it"], dtype=torch.bfloat16))
    rig.fill(0, 200)
    first, second = rig.step([0], [0], [48], 48), rig.step([0], [150], [11], 48)
    plan = rig.device.plan(rig.group, rig.case.block, first)
    states = rig.random(48, rig.case.heads + 2 * rig.case.kv_heads, rig.case.size)
    query, key, value = torch.split(states, [rig.case.heads, rig.case.kv_heads, rig.case.kv_heads], dim=1)
    output, expected = torch.empty_like(query), torch.empty_like(query)

    def run() -> None:
        rig.device.attend(
            AttentionCall(rig.case.shape, query, key, value, rig.cache, output, rig.sinks), plan
        )

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for mine, other in zip(
        vars(plan).values(), vars(rig.device.plan(rig.group, 0, second)).values(), strict=True
    ):
        mine.copy_(other)
    graph.replay()
    gathered.attend(
        AttentionCall(rig.case.shape, query, key, value, rig.reference, expected, rig.sinks),
        gathered.GatheredPlan.of(second),
    )
    torch.testing.assert_close(output, expected, atol=3e-2, rtol=3e-2)
