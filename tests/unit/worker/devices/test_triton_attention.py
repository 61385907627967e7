"""The Triton kernels, compared with the gathered attention, on a GPU or in Triton's interpreter."""

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
from worker_svc.devices import plain_attention
from worker_svc.devices.attention import AttentionCall, AttentionParams, PagedInput
from worker_svc.devices.cuda import triton_attention
from worker_svc.devices.cuda.device import CudaDevice
from worker_svc.shapes import AttentionLayer, KvGroup

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
    def params(self) -> AttentionParams:
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


class Checker:
    """Runs steps on a layer's cache, which starts as NaN, and on a copy for the reference."""

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
        # A row's blocks are scattered.
        generator = torch.Generator().manual_seed(1)
        order = 1 + torch.randperm(blocks - 1, generator=generator)
        self.tables = order.view(5, self.width).int()
        self.generator = torch.Generator().manual_seed(0)
        self.sinks = self.random(case.heads).float() if case.sinks else None

    def random(self, *size: int) -> torch.Tensor:
        return torch.randn(size, generator=self.generator).to(DEVICE, self.case.dtype)

    def fill(self, row: int, length: int) -> None:
        """Writes random keys and values of a sequence's first tokens to both caches."""
        keys, values = self.random(2, length, self.case.kv_heads, self.case.size)
        at = torch.arange(length)
        blocks, offsets = self.tables[row, at // self.case.block].long(), at % self.case.block
        for cache in (self.cache.transpose(2, 3), self.reference):
            cache[blocks, 0, offsets] = keys
            cache[blocks, 1, offsets] = values

    def step(self, rows: list[int], starts: list[int], counts: list[int], query_len: int) -> PagedInput:
        """A step of these rows; row -1 is padding. Table entries behind a window are null blocks."""
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
            # No block is allocated beyond the end.
            tables[place, -(-(start + count) // block) :] = 0
        ends = torch.tensor([0, *counts]).cumsum(0).int()
        lengths = torch.tensor([start + count for start, count in zip(starts, counts, strict=True)]).int()
        return PagedInput(
            lengths.to(DEVICE), ends.to(DEVICE), tables.to(DEVICE), slots.view(-1).to(DEVICE),
            counts[0] if len(rows) == 1 else len(rows),
        )  # fmt: skip

    def check(self, step: PagedInput, real: torch.Tensor) -> None:
        """Runs a step on both and compares them. All tokens but `real` ones must give zeros."""
        case, tokens = self.case, len(real)
        # As in a layer, all three are slices of one matrix.
        states = self.random(tokens, case.heads + 2 * case.kv_heads, case.size)
        query, key, value = torch.split(states, [case.heads, case.kv_heads, case.kv_heads], dim=1)
        query[~real] = torch.nan
        output = torch.full((tokens, case.heads, case.size), torch.nan, dtype=case.dtype, device=DEVICE)
        expected = torch.empty_like(output)
        plan = self.device.plan(self.group, case.block, step)
        self.device.attend(
            AttentionCall(case.params, query, key, value, self.cache, output, self.sinks), plan
        )
        plain_attention.attend(AttentionCall(case.params, query.nan_to_num(), key, value, self.reference, expected, self.sinks), plain_attention.GatheredPlan.of(step))  # fmt: skip
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
def checker(request: pytest.FixtureRequest) -> Checker:
    return Checker(CASES[request.param])


def test_decode(checker: Checker) -> None:
    """Rows of different lengths, in any order and mixed with padded rows, match the reference."""
    lengths = [0, 130, 63, 300]
    for row, length in enumerate(lengths):
        checker.fill(row, length)
    rows, starts = [3, 0, -1, 1, 2, -1], [300, 0, 0, 130, 63, 0]
    real = torch.tensor([row >= 0 for row in rows], device=DEVICE)
    checker.check(checker.step(rows, starts, [1] * 6, 1), real)
    # A single row is split as much as possible.
    checker.check(checker.step([1], [131], [1], 1), real[:1])


@pytest.mark.parametrize(("start", "count"), [(50, 48), (250, 29)])
def test_chunks(checker: Checker, start: int, count: int) -> None:
    """A full chunk and a padded chunk after a long context match the reference."""
    checker.fill(0, start)
    real = torch.arange(48, device=DEVICE) < count
    checker.check(checker.step([0], [start], [count], 48), real)


@pytest.mark.parametrize("case", ["plain", "all of it"])
@pytest.mark.parametrize("count", [48, 17, 1])
def test_first_chunks(case: str, count: int) -> None:
    """A first chunk matches the reference, whether full, padded or of one token."""
    real = torch.arange(48, device=DEVICE) < count
    checker = Checker(CASES[case])
    checker.check(checker.step([0], [0], [count], 48), real)


def test_a_chunk_of_padding_alone_gives_zeros() -> None:
    checker = Checker(CASES["sinks"])
    checker.check(checker.step([-1], [0], [1], 16), torch.zeros(16, dtype=torch.bool, device=DEVICE))


def test_a_layer_that_reads_another_cache_writes_nothing() -> None:
    checker = Checker(CASES["plain"])
    checker.fill(0, 20)
    before = checker.cache.clone()
    query, output = checker.random(1, 4, 64), torch.empty((1, 4, 64), device=DEVICE)
    plan = checker.device.plan(checker.group, 16, checker.step([0], [19], [1], 1))
    checker.device.attend(
        AttentionCall(replace(checker.case.params, writes=False), query, None, None, checker.cache, output),
        plan,
    )
    assert torch.equal(checker.cache.nan_to_num(), before.nan_to_num())
    assert output.isfinite().all()
    assert output.any()


@pytest.mark.parametrize("processors", [1, 8, 132])
def test_splits_change_nothing(processors: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Results match the reference with one split, some, or more splits than tiles of keys."""
    monkeypatch.setattr(triton_attention, "processors", lambda _: processors)
    checker = Checker(replace(CASES["all of it"], block=16, size=64))
    for row, length in enumerate((5, 290)):
        checker.fill(row, length)
    real = torch.ones(2, dtype=torch.bool, device=DEVICE)
    checker.check(checker.step([0, 1], [5, 290], [1, 1], 1), real)
    checker.check(checker.step([1], [291], [20], 24), torch.arange(24, device=DEVICE) < 20)


def launch(rows: int, query_len: int = 1, processors: int = 132) -> triton_attention._Launch:
    """The launch for a model like Llama 3.2 1B with up to 8,192 tokens."""
    shape = AttentionParams(32, 8, 64, 0.125, 0, 0.0, writes=True)
    return triton_attention._launch(shape, rows, query_len, 128, 64, 2, processors)


def programs(rows: int, context: int) -> int:
    """The number of programs of a decode step that have work."""
    made = launch(rows)
    tiles = -(-context // made.keys)
    share = -(-tiles // made.splits)
    return rows * 8 * -(-tiles // share)


def test_launches_fit_a_gpu() -> None:
    """One row keeps all processors busy, many rows are not split, and chunks have enough tiles."""
    assert programs(1, 2000) >= 132
    assert programs(8, 2000) >= 2 * 132
    assert launch(128).splits == launch(64).splits == 1
    assert launch(1, 512).grid == (32, 8, 1)
    assert launch(1, 64).splits > 1


def test_launches_do_not_follow_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    checker = Checker(CASES["window"])
    for row in range(2):
        checker.fill(row, 200)
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
        monkeypatch.setattr(triton_attention, name, Spy(getattr(triton_attention, name)))
    seen = []
    for lengths in ([0, 3], [150, 199]):
        step = checker.step([0, 1], lengths, [1, 1], 1)
        plan = checker.device.plan(checker.group, 16, step)
        assert all(isinstance(value, torch.Tensor) for value in vars(plan).values())
        checker.check(step, torch.ones(2, dtype=torch.bool, device=DEVICE))
        seen.append(list(launches))
        launches.clear()
    assert seen[0] == seen[1]


@pytest.mark.slow
def test_the_kernels_compile(tmp_path: Path) -> None:
    """The kernels compile for a GPU, which need not be present, and fit its shared memory."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": os.pathsep.join(sys.path), "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.worker.triton_process"], env=environment, cwd=ROOT,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    shared = json.loads(done.stdout)
    assert len(shared) == 15
    assert max(shared.values()) <= 227 * 1024


@pytest.mark.skipif(DEVICE.type != "cuda", reason="CUDA graphs are a GPU's")
def test_one_graph_serves_all_lengths() -> None:
    """A captured step gives correct results when replayed on other lengths and tables."""
    checker = Checker(replace(CASES["all of it"], dtype=torch.bfloat16))
    checker.fill(0, 200)
    first, second = checker.step([0], [0], [48], 48), checker.step([0], [150], [11], 48)
    plan = checker.device.plan(checker.group, checker.case.block, first)
    states = checker.random(48, checker.case.heads + 2 * checker.case.kv_heads, checker.case.size)
    query, key, value = torch.split(
        states, [checker.case.heads, checker.case.kv_heads, checker.case.kv_heads], dim=1
    )
    output, expected = torch.empty_like(query), torch.empty_like(query)

    def run() -> None:
        checker.device.attend(
            AttentionCall(checker.case.params, query, key, value, checker.cache, output, checker.sinks), plan
        )

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for mine, other in zip(
        vars(plan).values(), vars(checker.device.plan(checker.group, 0, second)).values(), strict=True
    ):
        mine.copy_(other)
    graph.replay()
    plain_attention.attend(
        AttentionCall(checker.case.params, query, key, value, checker.reference, expected, checker.sinks),
        plain_attention.GatheredPlan.of(second),
    )
    torch.testing.assert_close(output, expected, atol=3e-2, rtol=3e-2)
