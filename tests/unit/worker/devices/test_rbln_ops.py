"""References of the NPU's attention operators, compared with attention computed token by token."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from worker_svc.devices.rbln import operators
from worker_svc.devices.rbln.operators import CUSTOM, NAMESPACES, SIGNATURES, TRITON, Namespace

SIZE = 8
SCALE = 0.4
PAGED = ("flash_causal_attention_naive", "causal_attention_naive")


@pytest.fixture(autouse=True, scope="module")
def _registered() -> None:
    operators.register_all()


@dataclass
class History:
    """One sequence: its blocks, and all of its keys and values, [kv_heads, size] each."""

    blocks: Sequence[int]
    keys: list[torch.Tensor] = field(default_factory=list)
    values: list[torch.Tensor] = field(default_factory=list)


class Checker:
    """Runs steps on a cache of NaN and compares each with the naive result."""

    def __init__(
        self,
        namespace: Namespace,
        block: int,
        *,
        kv_heads: int = 2,
        groups: int = 3,
        sinks: int = 0,
        seed: int = 0,
        blocks: int = 12,
    ) -> None:
        self.namespace, self.block, self.kv_heads, self.groups = namespace, block, kv_heads, groups
        self.generator = torch.Generator().manual_seed(seed)
        shape = [2, kv_heads, 1, block, SIZE]
        shape.insert(1 if namespace == TRITON else 0, blocks)
        self.cache = torch.full(shape, torch.nan)
        self.sinks = self.random(kv_heads * groups, sinks) if sinks else None

    def random(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator)

    def content(self, block: int) -> torch.Tensor:
        """The block's content, [2, kv_heads, 1, block, size]."""
        return self.cache[:, block] if self.namespace == TRITON else self.cache[block]

    def preload(self, sequence: History, length: int) -> None:
        """Writes random keys and values of `length` tokens to the cache."""
        for position in range(length):
            key, value = self.random(2, self.kv_heads, SIZE)
            sequence.keys.append(key)
            sequence.values.append(value)
            place = self.content(sequence.blocks[position // self.block])[..., position % self.block, :]
            place[0, :, 0], place[1, :, 0] = key, value

    def states(self, rows: int, query_len: int) -> dict[str, Any]:
        """Random queries, keys and values, and the arguments that every operator takes."""
        scale = torch.tensor(SCALE)
        return {
            "q": self.random(rows, self.kv_heads, self.groups, query_len, SIZE),
            "k": self.random(rows, self.kv_heads, 1, query_len, SIZE),
            "v": self.random(rows, self.kv_heads, 1, query_len, SIZE),
            "kv_cache": self.cache, "scale": scale, "dummy": scale,
            "sinks": self.sinks if self.namespace == CUSTOM else None,
        }  # fmt: skip

    def integers(self, values: Any) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32 if self.namespace == TRITON else torch.int64)

    def append(self, sequence: History, given: dict[str, Any], row: int, token: int) -> None:
        sequence.keys.append(given["k"][row, :, 0, token])
        sequence.values.append(given["v"][row, :, 0, token])

    def naive(self, query: torch.Tensor, sequence: History, seen: Sequence[int]) -> torch.Tensor:
        """Attends one token's query [kv_heads, groups, size] over the positions that it sees."""
        result = torch.zeros_like(query)
        keys = torch.stack([sequence.keys[position] for position in seen], dim=1)
        values = torch.stack([sequence.values[position] for position in seen], dim=1)
        for head, group in itertools.product(range(self.kv_heads), range(self.groups)):
            scores = keys[head] @ query[head, group] * SCALE
            if self.sinks is not None:
                scores = torch.cat((scores, self.sinks[head * self.groups + group]))
            result[head, group] = scores.softmax(0)[: len(seen)] @ values[head]
        return result

    def check(self, output: torch.Tensor, given: dict[str, Any], row: int, token: int, sequence: History, seen: Sequence[int]) -> None:  # fmt: skip
        expected = self.naive(given["q"][row, :, :, token], sequence, seen)
        torch.testing.assert_close(output[row, :, :, token], expected, atol=1e-5, rtol=1e-5)


def paged_step(
    checker: Checker, operator: str, sequences: Sequence[History], counts: Sequence[int], query_len: int,
    *, partitions: int, padded_rows: int = 0, window: int = 0,
) -> torch.Tensor:  # fmt: skip
    """Runs and checks one step of an operator over paged blocks."""
    rows = len(sequences) + padded_rows
    given = checker.states(rows, query_len)
    starts = [len(sequence.keys) for sequence in sequences] + [0] * padded_rows
    tables = [[*sequence.blocks, *[0] * partitions][:partitions] for sequence in sequences]
    tables += [[0] * partitions] * padded_rows
    prefill = query_len > 1
    given["seq_idx"] = checker.integers(starts)[:, None]
    given["block_tables"] = checker.integers(tables[0] if prefill else tables)
    if window:
        given |= {"window_size": window, "is_causal": True}
    name = operator if window else f"{operator}_{'prefill' if prefill else 'decode'}"
    output = operators.emit(checker.namespace, name, given)
    assert output.shape == given["q"].shape
    for row, (sequence, count) in enumerate(zip(sequences, counts, strict=True)):
        for token in range(count):
            checker.append(sequence, given, row, token)
            position = len(sequence.keys) - 1
            seen = range(max(0, position - window + 1) if window else 0, position + 1)
            checker.check(output, given, row, token, sequence, seen)
        for position, (key, value) in enumerate(zip(sequence.keys, sequence.values, strict=True)):
            place = checker.content(sequence.blocks[position // checker.block])[
                ..., position % checker.block, :
            ]
            assert torch.equal(place[0, :, 0], key)
            assert torch.equal(place[1, :, 0], value)
    return output


@pytest.mark.parametrize(("namespace", "sinks"), [(TRITON, 0), (CUSTOM, 0), (CUSTOM, 1), (CUSTOM, 2)])
@pytest.mark.parametrize("operator", PAGED)
def test_a_prompt_in_chunks_then_decode(operator: str, namespace: Namespace, sinks: int) -> None:
    """Chunks smaller and larger than a block, then decode steps with padded rows, match the naive result."""
    flash = operator.startswith("flash")
    block, partitions = (8, 4) if flash else (32, 1)
    for chunk in (3, 8, 16):
        checker = Checker(namespace, block, sinks=sinks, seed=chunk)
        order = torch.randperm(11, generator=checker.generator) + 1
        sequences = []
        for number, prompt in enumerate((1, 9, 21)):
            blocks = order[number * 3 : number * 3 + 3].tolist()
            sequences.append(History(blocks))
            for start in range(0, prompt, chunk):
                count = min(chunk, prompt - start)
                paged_step(checker, operator, sequences[-1:], [count], chunk, partitions=partitions)
        for first in range(3):
            rotated = sequences[first:] + sequences[:first]
            paged_step(checker, operator, rotated, [1] * 3, 1, partitions=partitions, padded_rows=2)


@pytest.mark.parametrize("namespace", NAMESPACES)
@pytest.mark.parametrize(("kv_heads", "groups"), [(1, 1), (1, 4), (3, 1), (4, 2)])
def test_heads_of_any_grouping(namespace: Namespace, kv_heads: int, groups: int) -> None:
    """Any number of query heads may share a key head."""
    checker = Checker(namespace, 8, kv_heads=kv_heads, groups=groups)
    sequence = History([3, 7])
    paged_step(checker, PAGED[0], [sequence], [5], 6, partitions=2)
    for _ in range(5):
        paged_step(checker, PAGED[0], [sequence], [1], 1, partitions=2)


@pytest.mark.parametrize("namespace", NAMESPACES)
@pytest.mark.parametrize("length", [1, 1020, 1023, 1024, 2040])
def test_large_blocks(namespace: Namespace, length: int) -> None:
    """Steps around the edges of blocks of 1,024 tokens are correct, also for a chunk in two blocks."""
    checker = Checker(namespace, 1024, kv_heads=1, groups=2, blocks=5)
    sequence = History([4, 2])
    checker.preload(sequence, length)
    paged_step(checker, PAGED[0], [sequence], [min(5, 2048 - length)], 8, partitions=2)
    if len(sequence.keys) < 2048:
        paged_step(checker, PAGED[0], [sequence], [1], 1, partitions=2, padded_rows=1)


@pytest.mark.parametrize("window", [1, 5, 8, 13])
@pytest.mark.parametrize("sinks", [0, 1])
def test_windows_in_paged_blocks(window: int, sinks: int) -> None:
    """A window may be smaller or larger than a block, and blocks behind it are never read."""
    checker = Checker(CUSTOM, 8, sinks=sinks, seed=window)
    sequence = History([3, 9, 1, 4])
    for _ in range(3):
        paged_step(checker, "sliding_window_attention_v1", [sequence], [6], 6, partitions=4, window=window)
    paged_step(checker, "sliding_window_attention_v1", [sequence], [2], 6, partitions=4, window=window)
    behind = (len(sequence.keys) - window + 1) // 8
    states = [checker.content(block).clone() for block in sequence.blocks[:behind]]
    for block in sequence.blocks[:behind]:
        checker.content(block).fill_(torch.nan)
    given = checker.states(1, 1) | {"window_size": window, "is_causal": True}
    given |= {"seq_idx": checker.integers([[20]]), "block_tables": checker.integers([sequence.blocks])}
    output = operators.emit(CUSTOM, "sliding_window_attention_v1", given)
    checker.append(sequence, given, 0, 0)
    checker.check(output, given, 0, 0, sequence, range(max(0, 21 - window), 21))
    for block, state in zip(sequence.blocks[:behind], states, strict=True):
        checker.content(block).copy_(state)


def sliding_step(
    checker: Checker, sequences: Sequence[History], counts: Sequence[int], query_len: int,
    *, padded_rows: int = 0,
) -> None:  # fmt: skip
    """Runs and checks one step of the operator for windows that slide in place."""
    window, rows = checker.block, len(sequences) + padded_rows
    given = checker.states(rows, query_len)
    before = [min(len(sequence.keys), window) for sequence in sequences] + [0] * padded_rows
    after = [start + count for start, count in zip(before, [*counts, *[0] * padded_rows], strict=True)]
    tables = [[sequence.blocks[0]] for sequence in sequences] + [[0]] * padded_rows
    prefill = query_len > 1
    given["cache_seq_len"] = checker.integers(before)[:, None]
    given["cache_offset"] = checker.integers(after)[:, None]
    given["block_tables"] = checker.integers(tables[0] if prefill else tables)
    name = f"sliding_window_attention_naive_{'prefill' if prefill else 'decode'}"
    output = operators.emit(checker.namespace, name, given)
    for row, (sequence, count) in enumerate(zip(sequences, counts, strict=True)):
        for token in range(count):
            checker.append(sequence, given, row, token)
            length = len(sequence.keys)
            checker.check(output, given, row, token, sequence, range(max(0, length - window), length))
        held = min(len(sequence.keys), window)
        content = checker.content(sequence.blocks[0])[:, :, 0]
        assert torch.equal(content[0, :, :held], torch.stack(sequence.keys[-held:], dim=1))
        assert torch.equal(content[1, :, :held], torch.stack(sequence.values[-held:], dim=1))
        assert not content[:, :, held:].any()


@pytest.mark.parametrize(("namespace", "sinks"), [(TRITON, 0), (CUSTOM, 0), (CUSTOM, 1)])
@pytest.mark.parametrize("chunk", [2, 5, 8, 13, 32])
def test_windows_that_slide_in_place(namespace: Namespace, chunk: int, sinks: int) -> None:
    """Chunks of any size, then decode steps with padded rows, match the naive result."""
    checker = Checker(namespace, 8, sinks=sinks, seed=chunk)
    sequences = []
    for block, prompt in ((4, 1), (1, 7), (5, 8), (2, 21)):
        sequences.append(History([block]))
        for start in range(0, prompt, chunk):
            sliding_step(checker, sequences[-1:], [min(chunk, prompt - start)], chunk)
    for step in range(10):
        rotated = sequences[step % 4 :] + sequences[: step % 4]
        sliding_step(checker, rotated, [1] * 4, 1, padded_rows=step % 3)


def test_results_have_the_querys_type() -> None:
    """The result in bfloat16 is the float32 result, rounded once."""
    checker = Checker(CUSTOM, 8)
    checker.cache.zero_()
    given = checker.states(1, 4) | {
        "seq_idx": checker.integers([[0]]),
        "block_tables": checker.integers([1, 2]),
    }
    half = {
        role: value.bfloat16() if role in ("q", "k", "v", "kv_cache") else value
        for role, value in given.items()
    }
    rounded = {
        role: value.float() if role in ("q", "k", "v", "kv_cache") else value for role, value in half.items()
    }
    result = operators.emit(CUSTOM, "flash_causal_attention_naive_prefill", half)
    assert result.dtype == torch.bfloat16
    assert torch.equal(
        result, operators.emit(CUSTOM, "flash_causal_attention_naive_prefill", rounded).bfloat16()
    )


WRONG: list[tuple[str, str, Any, str]] = [
    ("flash_causal_attention_naive_prefill", "block_tables", torch.zeros((1, 2), dtype=torch.int32), "block_tables must be"),
    ("flash_causal_attention_naive_prefill", "seq_idx", torch.zeros(1, dtype=torch.int32), r"seq_idx must be \[1, 1\]"),
    ("flash_causal_attention_naive_prefill", "scale", torch.zeros(1), "scale must be a scalar"),
    ("flash_causal_attention_naive_prefill", "k", torch.zeros((1, 2, 3, 4, SIZE)), "k must be"),
    ("flash_causal_attention_naive_decode", "q", torch.zeros((1, 2, 3, 4, SIZE)), "one token a row"),
    ("causal_attention_naive_prefill", "block_tables", torch.zeros(2, dtype=torch.int32), "one partition"),
]  # fmt: skip


@pytest.mark.parametrize("namespace", NAMESPACES)
@pytest.mark.parametrize(("operator", "role", "value", "message"), WRONG)
def test_wrong_shapes_are_refused(
    namespace: Namespace, operator: str, role: str, value: Any, message: str
) -> None:
    """Wrong shapes are refused, also when a graph is traced without values."""
    checker = Checker(namespace, 8)
    given = checker.states(1, 4) | {
        "seq_idx": checker.integers([[0]]),
        "block_tables": checker.integers([1]),
        role: value,
    }
    with pytest.raises(ValueError, match=message):
        operators.emit(namespace, operator, given)
    on_meta = {
        role: value.to("meta") if isinstance(value, torch.Tensor) else value for role, value in given.items()
    }
    with pytest.raises(ValueError, match=message):
        operators.emit(namespace, operator, on_meta)


def test_cache_layouts_are_not_mixed_up() -> None:
    """Each namespace refuses the cache layout and the integer type of the other."""
    checker = Checker(CUSTOM, 8)
    given = checker.states(1, 4) | {"seq_idx": checker.integers([[0]]), "block_tables": checker.integers([1])}
    with pytest.raises(ValueError, match="kv_cache must be"):
        operators.emit(TRITON, "flash_causal_attention_naive_prefill", given)
    given["kv_cache"] = given["kv_cache"].transpose(0, 1)
    with pytest.raises(ValueError, match=r"seq_idx must be torch\.int32|block_tables must be torch\.int32"):
        operators.emit(TRITON, "flash_causal_attention_naive_prefill", given)


@pytest.mark.parametrize(
    ("operator", "role", "value", "message"),
    [
        ("flash_causal_attention_naive_prefill", "cache_dtype", torch.float8_e4m3fn, "8-bit"),
        ("sliding_window_attention_v1", "is_causal", False, "causality"),
        ("sliding_window_attention_v1", "attn_mask", torch.ones(4), "masks"),
    ],
)
def test_options_without_a_reference_are_refused(operator: str, role: str, value: Any, message: str) -> None:
    """An option that the reference does not implement is refused instead of ignored."""
    checker = Checker(CUSTOM, 8)
    given = checker.states(1, 4) | {"seq_idx": checker.integers([[0]]), "block_tables": checker.integers([1])}
    given |= {"window_size": 4, "is_causal": True, role: value}
    with pytest.raises(ValueError, match=message):
        operators.emit(CUSTOM, operator, given)


@pytest.mark.parametrize("namespace", NAMESPACES)
def test_every_operator_is_a_valid_torch_operator(namespace: Namespace) -> None:
    """Schemas declare every mutation, and fakes return the shapes of the real results."""
    for operator in SIGNATURES[namespace]:
        checker = Checker(namespace, 8)
        checker.cache.zero_()
        query_len = 1 if operator.endswith("decode") else 4
        tables: Any = [[1]] if query_len == 1 else [1]
        given = checker.states(1, query_len) | {
            "seq_idx": checker.integers([[2]]), "block_tables": checker.integers(tables),
            "window_size": 4, "is_causal": True,
            "cache_seq_len": checker.integers([[2]]), "cache_offset": checker.integers([[2 + query_len]]),
        }  # fmt: skip
        arguments = tuple(given.get(argument.role) for argument in SIGNATURES[namespace][operator])
        packet = getattr(getattr(torch.ops, namespace), operator)
        torch.library.opcheck(packet.default, arguments, test_utils=("test_schema", "test_faketensor"))
