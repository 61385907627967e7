"""Our own CPU kernels for encoders, compared with PyTorch on odd shapes."""

import math
from collections.abc import Iterator

import pytest
import torch
from torch.nn import functional

from tests.support.attention import naive_attention
from worker_svc.devices.attention import AttentionCall, AttentionParams, PackedPlan
from worker_svc.devices.cpu.device import CpuDevice
from worker_svc.devices.cpu.kernels import ops
from worker_svc.devices.cpu.kernels.program import Kernels, Program, TextsPlan, serves_texts


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


TYPES = [torch.float32, torch.bfloat16]


def _close(got: torch.Tensor, expected: torch.Tensor) -> None:
    """Compares sums of float32 products, whose orders differ, or such sums rounded to bfloat16."""
    tolerance = 16 * torch.finfo(torch.float32).eps
    atol = tolerance * float(expected.abs().max())
    if got.dtype == torch.bfloat16:
        tolerance = torch.finfo(torch.bfloat16).eps
    torch.testing.assert_close(got.float(), expected.float(), rtol=tolerance, atol=atol)


@pytest.mark.parametrize("rows", [1, 11, 12, 13, 25, 128])
@pytest.mark.parametrize(("columns", "size"), [(1152, 384), (70, 64), (33, 1536), (1, 1), (2080, 17)])
@pytest.mark.parametrize("has_bias", [True, False])
def test_a_product_with_packed_weights(
    kernels: Kernels, rows: int, columns: int, size: int, has_bias: bool
) -> None:
    """A product matches PyTorch for any shape; odd sizes are served, too."""
    x, weights, bias = torch.randn(rows, size + 6)[:, :size], torch.randn(columns, size), torch.randn(columns)
    out = torch.full((rows, columns), torch.nan)
    kernels.linear(x, kernels.pack(weights), bias if has_bias else None, out)()
    _close(out, x @ weights.t() + (bias if has_bias else 0))


@pytest.mark.parametrize("size", [1, 64, 70, 384])
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("dtype", TYPES)
def test_layer_norms(kernels: Kernels, size: int, has_bias: bool, dtype: torch.dtype) -> None:
    """A layer norm matches PyTorch far from 0, where a sum of squares would lose digits."""
    x, weight, bias = (
        (torch.randn(shape) + far).to(dtype) for shape, far in (((19, size), 100), ((size,), 0), ((size,), 0))
    )
    out = torch.empty_like(x)
    kernels.layer_norm(x, weight, bias if has_bias else None, 1e-5, out)()
    expected = functional.layer_norm(
        x.double(), (size,), weight.double(), bias.double() if has_bias else None, 1e-5
    )
    rtol = 1e-4 if dtype == torch.float32 else torch.finfo(dtype).eps
    torch.testing.assert_close(out.float(), expected.float(), rtol=rtol, atol=1e-4)


def test_gelu(kernels: Kernels) -> None:
    """GELU matches PyTorch's with the error function, from far below 0 to far above."""
    x = torch.cat([torch.linspace(-12, 12, 20_001), torch.tensor([-1e30, -0.0, 0.0, 1e30])])
    out = torch.empty_like(x)
    kernels.gelu(x, out)()
    finite = slice(0, 20_001)
    expected = functional.gelu(x[finite].double()).float()
    torch.testing.assert_close(out[finite], expected, rtol=1e-6, atol=3e-7)
    assert out[-1] == x[-1]
    assert torch.equal(out[-4:-1], torch.zeros(3))


def test_gelu_in_bfloat16(kernels: Kernels) -> None:
    x = torch.linspace(-12, 12, 4_001).bfloat16()
    out, wide = torch.empty_like(x), torch.empty(4_001)
    kernels.gelu(x, out)()
    kernels.gelu(x.float(), wide)()
    assert torch.equal(out, wide.bfloat16())


@pytest.mark.parametrize("count", [1, 16, 100_003])
@pytest.mark.parametrize("dtype", TYPES)
def test_sums_have_the_bits_of_pytorchs(kernels: Kernels, count: int, dtype: torch.dtype) -> None:
    del kernels  # skips where there are none
    x, y, out = torch.randn(count).to(dtype), torch.randn(count).to(dtype), torch.empty(count, dtype=dtype)
    program = ops.lower(torch.ops.aten.add.Tensor, (x, y), out)
    assert isinstance(program, Program)
    program()
    assert torch.equal(out, x + y)


@pytest.mark.parametrize(
    ("args", "result"),
    [
        ((torch.ones(2, 3), torch.ones(3)), torch.empty(2, 3)),
        ((torch.ones(2, 3), 1.0), torch.empty(2, 3)),
        ((torch.ones(3, 2).t(), torch.ones(2, 3)), torch.empty(2, 3)),
        ((torch.ones(2).double(), torch.ones(2).double()), torch.empty(2).double()),
        ((torch.ones(2).half(), torch.ones(2).half()), torch.empty(2).half()),
    ],
)
def test_other_sums_stay_pytorchs(args: tuple[object, ...], result: torch.Tensor) -> None:
    assert ops.lower(torch.ops.aten.add.Tensor, args, result) is None


@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16, torch.int64])
def test_copies_join_programs(kernels: Kernels, dtype: torch.dtype) -> None:
    """A graph copies contiguous tensors of any type and size in a program; other copies stay PyTorch's."""
    del kernels  # skips where there are none
    x = torch.randint(0, 2, (3, 33_001)).to(dtype)
    out = torch.zeros_like(x)
    program = ops.lower(torch.ops.aten.clone.default, (x,), out)
    assert isinstance(program, Program)
    program()
    assert torch.equal(out, x)
    assert ops.lower(torch.ops.aten.clone.default, (x.t(),), torch.empty_like(x.t())) is None


SHAPES = [(12, 12, 32), (4, 2, 64), (2, 1, 96)]
LENGTHS = [1, 5, 0, 12, 13, 33, 70]


def _call(
    heads: int,
    kv_heads: int,
    size: int,
    tokens: int,
    *,
    causal: bool,
    window: int,
    dtype: torch.dtype = torch.float32,
) -> AttentionCall:
    params = AttentionParams(heads, kv_heads, size, 0.3, window, 0.0, writes=True, causal=causal)
    # Parts of one tensor, as a joined projection gives them.
    states = torch.randn(tokens, heads + 2 * kv_heads, size).to(dtype)
    query, key, value = torch.split(states, [heads, kv_heads, kv_heads], dim=1)
    output = torch.full((tokens, heads, size), torch.nan, dtype=dtype)
    return AttentionCall(params, query, key, value, torch.empty(0), output)


def _naive(call: AttentionCall, places: Iterator[tuple[int, int]]) -> Iterator[tuple[slice, torch.Tensor]]:
    """Yields each text's tokens and their outputs, head by head."""
    assert call.key is not None
    assert call.value is not None
    for start, length in places:
        real = slice(start, start + length)
        yield real, naive_attention(call.params, call.query[real].float(), call.key[real], call.value[real])


@pytest.mark.parametrize(("heads", "kv_heads", "size"), SHAPES)
@pytest.mark.parametrize(("causal", "window"), [(False, 0), (False, 3), (True, 0), (True, 20)])
@pytest.mark.parametrize("row_len", [None, 70])
@pytest.mark.parametrize("dtype", TYPES)
def test_texts_attend_to_themselves(
    kernels: Kernels,
    heads: int,
    kv_heads: int,
    size: int,
    causal: bool,
    window: int,
    row_len: int | None,
    dtype: torch.dtype,
) -> None:
    lengths = torch.tensor(LENGTHS)
    total = int(lengths.sum())
    tokens = total + 9 if row_len is None else row_len * len(LENGTHS)
    call = _call(heads, kv_heads, size, tokens, causal=causal, window=window, dtype=dtype)
    assert serves_texts(call)
    kernels.attention_of_texts(call)(TextsPlan(lengths, row_len, call.params))
    starts = (lengths.cumsum(0) - lengths).tolist() if row_len is None else range(0, tokens, row_len)
    for real, expected in _naive(call, zip(starts, LENGTHS, strict=True)):
        if expected.numel():
            _close(call.output[real], expected)
    if row_len is None:
        assert not call.output[total:].any()


def test_a_text_has_the_same_bits_in_any_company(kernels: Kernels) -> None:
    call = _call(4, 4, 32, 60, causal=False, window=0)
    together = torch.tensor([20, 37, 3])
    torch.set_num_threads(3)
    try:
        kernels.attention_of_texts(call)(TextsPlan(together, None, call.params))
    finally:
        torch.set_num_threads(1)
    found = call.output[20:57].clone()
    assert call.key is not None
    assert call.value is not None
    query, key, value = (each[20:57] for each in (call.query, call.key, call.value))
    alone = AttentionCall(call.params, query, key, value, call.cache, torch.empty(37, 4, 32))
    kernels.attention_of_texts(alone)(TextsPlan(torch.tensor([37]), None, call.params))
    assert torch.equal(alone.output, found)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_score_that_is_not_finite_shows_in_the_result(kernels: Kernels, bad: float) -> None:
    """Queries that see it get NaN, as the request must fail; others of the text and other texts do not."""
    call = _call(2, 2, 32, 10, causal=True, window=0)
    assert call.key is not None
    call.key[4, 1, 7] = bad
    call.query[:, 1, 7] = 1.0
    kernels.attention_of_texts(call)(TextsPlan(torch.tensor([7, 3]), None, call.params))
    broken = call.output.isnan().any(-1)
    assert broken[4:7, 1].all()
    assert int(broken.sum()) == 3


def test_a_device_attends_with_our_kernels_or_without() -> None:
    """Both ways give the same for a layer that our kernels serve; other head sizes run without them."""
    device, lengths = CpuDevice(), torch.tensor([3, 30, 7])
    served = _call(2, 2, 32, 44, causal=False, window=0)
    device.attend_step(served, device.plan_packed(lengths, served.params))
    ours = served.output.clone()
    device.attend_packed(served, PackedPlan.of(lengths, served.params))
    _close(ours, served.output)
    other = _call(2, 2, 8, 44, causal=False, window=0)
    assert not serves_texts(other)
    device.bind_attention(other)(device.plan_packed(lengths, other.params))
    for real, expected in _naive(other, zip([0, 3, 33], [3, 30, 7], strict=True)):
        _close(other.output[real], expected)


def test_an_encoders_layer_is_one_program(kernels: Kernels) -> None:
    """A device fuses products, attention, sums, norms and GELU; the program takes the step's plan."""
    x, out, wide = torch.randn(12, 64), torch.empty(12, 64), torch.empty(12, 64)
    call = _call(2, 2, 32, 12, causal=False, window=0)
    weight = kernels.pack(torch.randn(64, 64))
    parts = [
        kernels.linear(x, weight, None, wide),
        kernels.attention_of_texts(call),
        kernels.add(wide, call.output.view(12, 64), out),
        kernels.layer_norm(out, torch.ones(64), None, 1e-5, wide),
        kernels.gelu(wide, out),
    ]
    ((fused, count),) = CpuDevice().fuse(parts, [0, 1, 0, 0, 0])
    assert isinstance(fused, Program)
    assert count == 1
    plan = TextsPlan(torch.tensor([5, 7]), None, call.params)
    for part, num_plans in zip(parts, [0, 1, 0, 0, 0], strict=True):
        part(*[plan] * num_plans)
    one_by_one = out.clone()
    out.zero_()
    fused(plan)
    assert torch.equal(out, one_by_one)
