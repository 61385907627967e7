"""Stacks of LoRA adapters against single products for each row, in plain operators and in our kernels."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from worker_svc.devices import open_device
from worker_svc.devices.base import Device
from worker_svc.devices.cpu.linear import PackedStack, serves_lora
from worker_svc.devices.lora_stack import NO_ADAPTER, LayerWeights, LoraStack, StackShape

CPU: Device = open_device("cpu")


def _shape(
    in_size: int, out_sizes: tuple[int, ...], max_loras: int, rank: int, dtype: torch.dtype
) -> StackShape:
    return StackShape(in_size, out_sizes, max_loras, rank, dtype, dtype)


def _weights(shape: StackShape, rank: int, parts: set[int]) -> LayerWeights:
    """Random matrices for some parts."""
    return [
        (
            torch.randn(rank, shape.in_size).to(shape.dtype),
            torch.randn(size, rank).to(shape.dtype) / rank,
        )
        if part in parts
        else None
        for part, size in enumerate(shape.out_sizes)
    ]


def _expected(
    out: torch.Tensor, x: torch.Tensor, adapters: dict[int, LayerWeights], slots: list[int], shape: StackShape
) -> torch.Tensor:
    """Adds each row's products one by one, in float32."""
    expected = out.float().clone()
    for row, slot in enumerate(slots):
        first = 0
        for part, size in enumerate(shape.out_sizes):
            matrices = adapters[slot][part] if slot in adapters else None
            if matrices is not None:
                a, b = (each.float() for each in matrices)
                expected[row, first : first + size] += b @ (a @ x[row].float())
            first += size
    return expected


@st.composite
def _cases(draw: st.DrawFn) -> tuple[StackShape, dict[int, tuple[int, set[int]]], list[int], int]:
    parts = draw(st.integers(1, 4))
    shape = _shape(
        2 * draw(st.integers(1, 70)),
        tuple(draw(st.lists(st.integers(1, 80), min_size=parts, max_size=parts))),
        draw(st.integers(1, 4)),
        2 * draw(st.integers(1, 20)),
        torch.bfloat16,
    )
    adapters = draw(
        st.dictionaries(
            st.integers(0, shape.max_loras - 1),
            st.tuples(st.integers(1, shape.rank), st.sets(st.integers(0, parts - 1))),
        )
    )
    slots = draw(st.lists(st.sampled_from([NO_ADAPTER, *adapters]), min_size=1, max_size=13))
    return shape, adapters, slots, draw(st.integers(0, 2**31))


@pytest.mark.parametrize("packed", [False, True])
@given(case=_cases())
def test_each_row_takes_its_own_adapter(
    packed: bool, case: tuple[StackShape, dict[int, tuple[int, set[int]]], list[int], int]
) -> None:
    """Any mix of adapters of any rank and of the base model gives what single products give."""
    shape, chosen, slots, seed = case
    if packed and not serves_lora(shape):
        pytest.skip("our kernels need AVX-512 with bfloat16")
    torch.manual_seed(seed)
    stack = CPU.lora_stack(shape) if packed else Device.lora_stack(CPU, shape)
    assert isinstance(stack, PackedStack) is packed
    adapters = {slot: _weights(shape, rank, parts) for slot, (rank, parts) in chosen.items()}
    for slot, weights in adapters.items():
        stack.write(slot, _weights(shape, shape.rank, set(range(len(shape.out_sizes)))))
        stack.write(slot, weights)  # nothing of the adapter before is left
    x = torch.randn(len(slots), shape.in_size + 3)[:, : shape.in_size].bfloat16()
    out = torch.randn(len(slots), sum(shape.out_sizes)).bfloat16()
    expected = _expected(out, x, adapters, slots, shape)
    base = out.clone()
    select = CPU.select_adapters if packed else lambda *args: Device.select_adapters(CPU, *args)
    got = stack.add(out, x, select(torch.tensor(slots, dtype=torch.int32), shape))
    torch.testing.assert_close(
        got.float(), expected, rtol=2**-6, atol=2**-6 * max(1.0, float(expected.abs().max()))
    )
    rows = [row for row, slot in enumerate(slots) if slot == NO_ADAPTER]
    assert torch.equal(got[rows], base[rows])


def test_rows_do_not_depend_on_their_neighbours() -> None:
    shape = _shape(576, (576, 192, 192), 3, 16, torch.bfloat16)
    if not serves_lora(shape):
        pytest.skip("our kernels need AVX-512 with bfloat16")
    torch.manual_seed(0)
    stack = CPU.lora_stack(shape)
    for slot in range(3):
        stack.write(slot, _weights(shape, 16, {0, 1, 2}))
    slots = torch.tensor([0, 0, 0, 0, 0, 1, 2, 2, -1, 0], dtype=torch.int32)
    x, out = torch.randn(10, 576).bfloat16(), torch.randn(10, 960).bfloat16()
    together = stack.add(out.clone(), x, slots)
    for row in range(10):
        each = slice(row, row + 1)
        assert torch.equal(stack.add(out[each].clone(), x[each], slots[each])[0], together[row])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_adapter_that_overflows_harms_its_own_rows_alone(dtype: torch.dtype) -> None:
    shape = _shape(8, (6,), 2, 2, dtype)
    stack = CPU.lora_stack(shape)
    stack.write(0, [(torch.full((2, 8), 3e38).to(dtype), torch.full((6, 2), 3e38).to(dtype))])
    stack.write(1, _weights(shape, 2, {0}))
    slots = torch.tensor([0, 1, NO_ADAPTER, 0, 1], dtype=torch.int32)
    got = stack.add(
        torch.zeros(5, 6, dtype=dtype), torch.ones(5, 8, dtype=dtype), CPU.select_adapters(slots, shape)
    )
    assert got.isfinite().all(dim=1).tolist() == [False, True, True, False, True]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_other_types(dtype: torch.dtype) -> None:
    """Adapters in another type than the activations keep the activations' type."""
    shape = StackShape(8, (4,), 2, 2, dtype, torch.float32)
    stack = CPU.lora_stack(shape)
    assert type(stack) is LoraStack
    torch.manual_seed(0)
    weights = _weights(shape, 2, {0})
    stack.write(1, weights)
    x, out = torch.randn(3, 8), torch.randn(3, 4)
    slots = torch.tensor([1, -1, 0], dtype=torch.int32)
    got = stack.add(out, x, CPU.select_adapters(slots, shape))
    assert got.dtype == torch.float32
    torch.testing.assert_close(
        got,
        _expected(out, x, {1: weights}, [1, -1, 0], shape),
        rtol=1e-3,
        atol=1e-2 if dtype == torch.float16 else 1e-5,
    )
