"""Attention over a window that slides in place, compared with attention computed token by token."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
import torch

from protos.steps import GroupKind
from tests.support.attention import naive_attention
from worker_svc.devices import plain_attention
from worker_svc.devices.attention import AttentionCall, AttentionParams, InPlaceInput
from worker_svc.devices.cpu.device import CpuDevice
from worker_svc.shapes import AttentionLayer, KvGroup

HEADS, KV_HEADS, SIZE, WINDOW, BLOCKS = 4, 2, 16, 8, 6
GROUP = KvGroup(
    0, (AttentionLayer("w", HEADS, KV_HEADS, SIZE, WINDOW, torch.float32),), GroupKind.IN_PLACE_WINDOW
)


@dataclass
class History:
    """One sequence: its block, and all of its keys and values."""

    block: int
    keys: list[torch.Tensor] = field(default_factory=list)
    values: list[torch.Tensor] = field(default_factory=list)


def lengths(
    before: Sequence[int], after: Sequence[int], blocks: Sequence[int], query_len: int
) -> InPlaceInput:
    """A step with one row for each number."""
    columns = [torch.tensor(numbers, dtype=torch.int32)[:, None] for numbers in (before, after, blocks)]
    return InPlaceInput(columns[0], columns[1], columns[2], query_len)


class Checker:
    """Runs steps on a cache with NaN in its null block and its unused blocks."""

    def __init__(self, softcap: float = 0.0, seed: int = 0, *, sinks: bool = False) -> None:
        self.params = AttentionParams(HEADS, KV_HEADS, SIZE, 0.3, WINDOW, softcap, writes=True)
        self.device = CpuDevice()
        self.cache = self.device.allocate(self.device.cache_shape(GROUP, BLOCKS, 32), torch.float32)
        self.cache.fill_(torch.nan)
        self._generator = torch.Generator().manual_seed(seed)
        self.sinks = torch.randn(HEADS, generator=self._generator) if sinks else None

    def admit(self, block: int) -> History:
        """Starts a sequence in a fresh block."""
        self.cache[block].zero_()
        return History(block)

    def step(
        self, sequences: Sequence[History], counts: Sequence[int], query_len: int, padded_rows: int = 0
    ) -> torch.Tensor:
        """Runs one step of random tokens and compares it with the naive result.

        Returns the output [rows, query_len, …].
        """
        rows = len(sequences) + padded_rows
        query = torch.randn((rows, query_len, HEADS, SIZE), generator=self._generator)
        key, value = (
            torch.randn((rows, query_len, KV_HEADS, SIZE), generator=self._generator) for _ in range(2)
        )
        before = [min(len(sequence.keys), WINDOW) for sequence in sequences] + [0] * padded_rows
        after = [start + count for start, count in zip(before, [*counts, *[1] * padded_rows], strict=True)]
        blocks = [sequence.block for sequence in sequences] + [0] * padded_rows
        output = torch.full_like(query, torch.nan)
        plan = self.device.plan(GROUP, 32, lengths(before, after, blocks, query_len))
        flat_query, flat_key, flat_value = (tensor.flatten(0, 1) for tensor in (query, key, value))
        flat_output = output.view(-1, HEADS, SIZE)
        self.device.attend(
            AttentionCall(self.params, flat_query, flat_key, flat_value, self.cache, flat_output, self.sinks),
            plan,
        )
        for row, (sequence, count) in enumerate(zip(sequences, counts, strict=True)):
            first = len(sequence.keys)
            sequence.keys += key[row, :count]
            sequence.values += value[row, :count]
            keys, values = torch.stack(sequence.keys), torch.stack(sequence.values)
            expected = naive_attention(self.params, query[row, :count], keys, values, first, self.sinks)
            torch.testing.assert_close(output[row, :count], expected, atol=1e-5, rtol=1e-5)
            assert not output[row, count:].any()
            self.check_block(sequence)
        return output

    def check_block(self, sequence: History) -> None:
        """Checks that the block holds the last window, oldest first, and then zeros."""
        content = self.cache[sequence.block].transpose(1, 2)
        held = min(len(sequence.keys), WINDOW)
        assert torch.equal(content[0, :held], torch.stack(sequence.keys[-held:]))
        assert torch.equal(content[1, :held], torch.stack(sequence.values[-held:]))
        assert not content[:, held:].any()


@pytest.mark.parametrize(("softcap", "sinks"), [(0.0, False), (2.0, False), (0.0, True), (2.0, True)])
@pytest.mark.parametrize("chunk", [1, 3, 5, 8, 13, 16, 32])
def test_a_prompt_in_chunks_then_decode(chunk: int, softcap: float, sinks: bool) -> None:
    checker = Checker(softcap, seed=chunk, sinks=sinks)
    for prompt in (1, 2, 7, 8, 9, 15, 21, 40):
        sequence = checker.admit(3)
        for start in range(0, prompt, chunk):
            checker.step([sequence], [min(chunk, prompt - start)], chunk)
        for _ in range(WINDOW + 2):
            checker.step([sequence], [1], 1)


def test_rows_of_random_lengths() -> None:
    """Rows shorter and longer than the window decode together with padded rows, in any order."""
    checker = Checker()
    generator = torch.Generator().manual_seed(1)
    for _ in range(10):
        sequences = [checker.admit(block) for block in (4, 1, 5, 2)]
        for sequence in sequences:
            for _ in range(int(torch.randint(1, 4, (), generator=generator))):
                checker.step([sequence], [int(torch.randint(1, 6, (), generator=generator))], 5)
        for first in range(5):
            order = sequences[first % 4 :] + sequences[: first % 4]
            checker.step(order, [1] * 4, 1, padded_rows=3)


@pytest.mark.parametrize("softcap", [0.0, 2.0])
def test_rows_are_independent(softcap: float) -> None:
    """A row gives the same bits alone, among others, in another place, and from a copy of its block."""
    checker = Checker(softcap)
    sequences = [checker.admit(block) for block in (1, 2, 3)]
    for sequence, count in zip(sequences, (3, 8, 11), strict=True):
        checker.step([sequence], [count], 16)
    content = checker.cache.clone()
    generator = torch.Generator().manual_seed(2)
    query = torch.randn((3, HEADS, SIZE), generator=generator)
    key, value = torch.randn((2, 3, KV_HEADS, SIZE), generator=generator)
    cached = [min(len(sequence.keys), WINDOW) for sequence in sequences]

    def run(rows: Sequence[int], blocks: Sequence[int]) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
        checker.cache.copy_(content)
        for row, block in zip(rows, blocks, strict=True):
            checker.cache[block] = content[sequences[row].block]
        before = [cached[row] for row in rows]
        plan = checker.device.plan(GROUP, 32, lengths(before, [start + 1 for start in before], blocks, 1))
        output = torch.empty((len(rows), HEADS, SIZE))
        picked = list(rows)
        checker.device.attend(
            AttentionCall(checker.params, query[picked], key[picked], value[picked], checker.cache, output),
            plan,
        )
        return {
            row: (output[place], checker.cache[block].clone())
            for place, (row, block) in enumerate(zip(rows, blocks, strict=True))
        }

    together = run([0, 1, 2], [1, 2, 3])
    for rows in itertools.chain([[2, 0, 1]], [[row] for row in range(3)]):
        for blocks in ([sequences[row].block for row in rows], [5, 4, 0][: len(rows)]):
            for row, (output, block) in run(rows, blocks).items():
                assert torch.equal(output, together[row][0])
                assert torch.equal(block, together[row][1])


def test_shapes_do_not_depend_on_lengths() -> None:
    shapes = set()
    for before, count in itertools.product((0, 3, 8), (1, 4, 5)):
        plan = plain_attention.InPlacePlan.of(GROUP, lengths([before], [before + count], [1], 5))
        shapes.add(tuple(tuple(tensor.shape) for tensor in vars(plan).values()))
    assert shapes == {((1,), (1, 8), (1, 5, 13), (1, 5), (1, 8))}
