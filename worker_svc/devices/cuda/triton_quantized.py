"""Products with quantized weights on GPUs: packs weights, and defines and launches the Triton kernels.

A single row reads each weight once and multiplies without tensor cores. More rows use tensor cores on the
exact integers, which half precision holds. A chunk of a prompt is bound by arithmetic, so its weights are
dequantized once for PyTorch's own product.

A weight matrix is [outputs, lanes] of 16 bits. A tile is LANES lanes: place p of lane j holds input
`LANES * p + j` of the tile. So a place of a tile's lanes is consecutive inputs, which share a scale.

Converting integers to floats is slow on GPUs. So a code becomes the lowest bits of a float whose exponent
makes their value 1: the float is the code and a power of two, which is subtracted. The instruction `lop3`
cuts out a code and sets the exponent. The compiler emits two, so it is written in assembly; Triton's
interpreter runs the plain form.
"""

import functools
import os
from typing import Any, Final

import torch
import triton
import triton.language as tl
from torch.nn import functional

from worker_svc.devices.quantized import QuantizedWeights


def _floats(mask: int, exponent: int) -> tl.constexpr:
    return tl.constexpr(f"lop3.b32 $0, $1, {mask:#x}, {exponent:#x}, 0xEA;")


# Bits 15 to 18 of a word, of which 256 + code is made; 19 to 22 with 16 + code; 15 to 22 with 256 + code.
_LOW_FLOATS = _floats(0x00078000, 0x43800000)
_HIGH_FLOATS = _floats(0x00780000, 0x41800000)
_BYTE_FLOATS = _floats(0x007F8000, 0x43800000)


def _pairs(bits: int, conversion: str) -> tl.constexpr:
    """Returns, for each place, the assembly that converts the codes of two lanes."""
    return tl.constexpr(
        tuple(
            f"{{ .reg .b32 a, b, k; shr.b32 a, $1, {shift}; {conversion} }}" for shift in range(0, 16, bits)
        )
    )


# In bfloat16, 128 + code is exact up to 255, so the highest bit of eight is subtracted by itself.
_NIBBLES_BF16 = _pairs(
    4,
    "lop3.b32 a, a, 0x000F000F, 0x43004300, 0xEA; mov.b32 b, 0xC308C308; mov.b32 k, 0x3F803F80;"
    "fma.rn.bf16x2 $0, a, k, b;",
)
_BYTES_BF16 = _pairs(
    8,
    "lop3.b32 b, a, 0x00800080, 0x43004300, 0xAE; lop3.b32 a, a, 0x007F007F, 0x43004300, 0xEA;"
    "mov.b32 k, 0xBF80BF80; fma.rn.bf16x2 $0, b, k, a;",
)
_NIBBLES_F16 = _pairs(
    4,
    "lop3.b32 a, a, 0x000F000F, 0x64006400, 0xEA; mov.b32 b, 0xE408E408; mov.b32 k, 0x3C003C00;"
    "fma.rn.f16x2 $0, a, k, b;",
)
_BYTES_F16 = _pairs(
    8,
    "lop3.b32 a, a, 0x00FF00FF, 0x64006400, 0xEA; mov.b32 b, 0xE480E480; mov.b32 k, 0x3C003C00;"
    "fma.rn.f16x2 $0, a, k, b;",
)


@triton.jit
def _converted(packed, dtype: tl.constexpr, PLACE: tl.constexpr, BITS: tl.constexpr, ASSEMBLY: tl.constexpr):
    """Returns the signed codes of a place of lanes, as floats."""
    if not ASSEMBLY:
        codes = ((packed.to(tl.int32) >> (PLACE * BITS)) & ((1 << BITS) - 1)) - (1 << (BITS - 1))
        result = codes.to(dtype)
    elif BITS == 4 and dtype == tl.bfloat16:
        result = tl.inline_asm_elementwise(
            _NIBBLES_BF16[PLACE], "=r,r", [packed], dtype=tl.bfloat16, is_pure=True, pack=2
        )
    elif BITS == 4:
        result = tl.inline_asm_elementwise(
            _NIBBLES_F16[PLACE], "=r,r", [packed], dtype=tl.float16, is_pure=True, pack=2
        )
    elif dtype == tl.bfloat16:
        result = tl.inline_asm_elementwise(
            _BYTES_BF16[PLACE], "=r,r", [packed], dtype=tl.bfloat16, is_pure=True, pack=2
        )
    else:
        result = tl.inline_asm_elementwise(
            _BYTES_F16[PLACE], "=r,r", [packed], dtype=tl.float16, is_pure=True, pack=2
        )
    return result


@triton.jit
def _four(values, N: tl.constexpr, W: tl.constexpr):
    """Splits [N, W] into every fourth value: four tensors [N, W / 4], within each thread."""
    even, odd = tl.split(tl.reshape(values, [N, W // 4, 2, 2]))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@triton.jit
def _with_exponent(
    words, MASK: tl.constexpr, EXPONENT: tl.constexpr, INSTRUCTION: tl.constexpr, ASSEMBLY: tl.constexpr
):
    if ASSEMBLY:
        result = tl.inline_asm_elementwise(
            INSTRUCTION, "=r,r", [words], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        result = ((words & MASK) | EXPONENT).to(tl.float32, bitcast=True)
    return result


@triton.jit
def _raised(words, BYTE: tl.constexpr, HIGH: tl.constexpr, BITS: tl.constexpr, ASSEMBLY: tl.constexpr):
    """Returns the codes in a byte of words, or in half of it, as float32 above a power of two."""
    if BYTE == 0:
        moved = words << 15
    elif BYTE == 1:
        moved = words << 7
    else:
        moved = words >> (8 * BYTE - 15)
    if BITS == 8:
        result = _with_exponent(moved, 0x007F8000, 0x43800000, _BYTE_FLOATS, ASSEMBLY)
    elif HIGH:
        result = _with_exponent(moved, 0x00780000, 0x41800000, _HIGH_FLOATS, ASSEMBLY)
    else:
        result = _with_exponent(moved, 0x00078000, 0x43800000, _LOW_FLOATS, ASSEMBLY)
    return result


@triton.jit
def _group_product(
    x, packed, lane,
    INPUTS: tl.constexpr, LANES: tl.constexpr, BITS: tl.constexpr, FIRST: tl.constexpr, RUN: tl.constexpr,
    PADDED: tl.constexpr, N: tl.constexpr, W: tl.constexpr, ASSEMBLY: tl.constexpr,
):  # fmt: skip
    """Multiplies inputs by the codes of RUN places of words, and sums four words: [N, W / 4], not scaled.

    `packed` is the words, as `_four` splits them, and `lane` the numbers of their lanes.
    """
    PLACES: tl.constexpr = 16 // BITS  # noqa: N806 - a constant
    part = tl.zeros([N, W // 4], tl.float32)
    offset = tl.zeros([1, W // 4], tl.float32)
    for place in tl.static_range(FIRST, FIRST + RUN):
        source = lane // LANES * (LANES * PLACES) + place * LANES + lane % LANES
        if PADDED:  # noqa: SIM108 - Triton chooses at compile time
            values = tl.load(x + source, mask=source < INPUTS, other=0.0)
        else:
            values = tl.load(x + source)
        halves = tl.split(tl.reshape(values.to(tl.float32), [W, 2]))
        for half in tl.static_range(2):
            factors = _four(halves[half], 1, W)
            for quarter in tl.static_range(4):
                part += factors[quarter] * _raised(
                    packed[quarter], 2 * half + place * BITS // 8, place % 2 == 1, BITS, ASSEMBLY
                )
            total = factors[0] + factors[1] + factors[2] + factors[3]
            offset += total * (384.0 if BITS == 8 else (24.0 if place % 2 == 1 else 264.0))
    return part - offset


@triton.jit
def one_row_kernel(
    x, words, scales, bias, out, outputs,
    INPUTS: tl.constexpr, LANES: tl.constexpr, WORDS: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, BIAS: tl.constexpr,
    N: tl.constexpr, W: tl.constexpr, EARLY: tl.constexpr, ASSEMBLY: tl.constexpr,
):  # fmt: skip
    """Multiplies a row by N outputs' weights, without tensor cores. Grid: outputs / N.

    `words` are two lanes each, WORDS an output, of which a program reads W at a time. GROUP is 0 for a scale
    per output. EARLY lets the kernel start before the producer of `x` has ended: it reads its first weights
    before it waits.
    """
    PLACES: tl.constexpr = 16 // BITS  # noqa: N806 - constants
    RUN: tl.constexpr = min(PLACES, GROUP // LANES) if GROUP else PLACES  # noqa: N806
    PADDED: tl.constexpr = WORDS % W != 0 or INPUTS % (LANES * PLACES) != 0  # noqa: N806
    output = tl.program_id(0) * N + tl.arange(0, N)
    there = output < outputs
    mine = words + output.to(tl.int64)[:, None] * WORDS
    word = tl.arange(0, W)
    ahead = tl.load(mine + word[None, :], mask=there[:, None] & (word < WORDS)[None, :], other=0)
    if EARLY:
        tl.extra.cuda.gdc_wait()
    sums = tl.zeros([N, W // 4], tl.float32)
    for start in range(0, WORDS, W):
        packed = _four(ahead, N, W)
        if start + W < WORDS:
            word = start + W + tl.arange(0, W)
            ahead = tl.load(mine + word[None, :], mask=there[:, None] & (word < WORDS)[None, :], other=0)
        lane = 2 * start + tl.arange(0, 2 * W)
        first_lane = 2 * start + 8 * tl.arange(0, W // 4)
        for first in tl.static_range(0, PLACES, RUN):
            part = _group_product(x, packed, lane, INPUTS, LANES, BITS, first, RUN, PADDED, N, W, ASSEMBLY)
            if GROUP:
                source = first_lane // LANES * (LANES * PLACES) + first * LANES + first_lane % LANES
                scale = tl.load(
                    scales + output[:, None] * (INPUTS // GROUP) + (source // GROUP)[None, :],
                    mask=there[:, None] & (source < INPUTS)[None, :], other=0.0,
                )  # fmt: skip
                part *= scale.to(tl.float32)
            sums += part
    result = tl.sum(sums, 1)
    if not GROUP:
        result *= tl.load(scales + output, mask=there, other=0.0).to(tl.float32)
    if BIAS:
        result += tl.load(bias + output, mask=there, other=0.0).to(tl.float32)
    tl.store(out + output, result.to(out.dtype.element_ty), mask=there)


@triton.jit
def many_rows_kernel(
    x, lanes, scales, bias, out, rows, outputs, x_row,
    INPUTS: tl.constexpr, LANES: tl.constexpr, TILES: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, BIAS: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, SPLITS: tl.constexpr, EARLY: tl.constexpr, ASSEMBLY: tl.constexpr,
):  # fmt: skip
    """Multiplies up to M rows by N outputs' weights, on tensor cores. Grid: outputs / N.

    The program's warps share its outputs and SPLITS tiles at a time, which are summed at the end.
    """
    PLACES: tl.constexpr = 16 // BITS  # noqa: N806 - constants
    RUN: tl.constexpr = min(PLACES, GROUP // LANES) if GROUP else PLACES  # noqa: N806
    PADDED: tl.constexpr = TILES % SPLITS != 0 or INPUTS % (LANES * PLACES) != 0  # noqa: N806
    output = tl.program_id(0) * N + tl.arange(0, N)
    there = output < outputs
    lane = tl.arange(0, LANES)
    row = tl.arange(0, M)
    mine = lanes + (output.to(tl.int64) * (TILES * LANES))[None, :, None] + lane[None, None, :]
    if EARLY:
        tl.extra.cuda.gdc_wait()
    sums = tl.zeros([SPLITS, N, M], tl.float32)
    for start in range(0, TILES, SPLITS):
        tile = start + tl.arange(0, SPLITS)
        mask = there[None, :, None]
        if PADDED:
            mask = mask & (tile < TILES)[:, None, None]
        packed = tl.load(mine + (tile * LANES)[:, None, None], mask=mask, other=0)
        for first in tl.static_range(0, PLACES, RUN):
            part = tl.zeros([SPLITS, N, M], tl.float32)
            for place in tl.static_range(first, first + RUN):
                source = (tile * (LANES * PLACES) + place * LANES)[:, None, None] + lane[None, :, None]
                real = (row < rows)[None, None, :]
                if PADDED:
                    real = real & (source < INPUTS)
                values = tl.load(x + row[None, None, :] * x_row + source, mask=real, other=0.0)
                codes = _converted(packed, values.dtype, place, BITS, ASSEMBLY)
                part = tl.dot(codes, values, part, input_precision="ieee")
            if GROUP:
                source = (tile * (LANES * PLACES) + first * LANES)[:, None]
                scale = tl.load(
                    scales + output[None, :] * (INPUTS // GROUP) + source // GROUP,
                    mask=there[None, :] & (source < INPUTS), other=0.0,
                )  # fmt: skip
                part *= scale.to(tl.float32)[:, :, None]
            sums += part
    result = tl.sum(sums, 0)
    if not GROUP:
        result *= tl.load(scales + output, mask=there, other=0.0).to(tl.float32)[:, None]
    if BIAS:
        result += tl.load(bias + output, mask=there, other=0.0).to(tl.float32)[:, None]
    target = out + row[None, :].to(tl.int64) * outputs + output[:, None]
    tl.store(target, result.to(out.dtype.element_ty), mask=(row < rows)[None, :] & there[:, None])


@triton.jit
def dequantize_kernel(
    lanes, scales, out, outputs,
    INPUTS: tl.constexpr, LANES: tl.constexpr, TILES: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr,
    N: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """Writes weights [outputs, inputs]. Grid: outputs / N, lanes / W."""
    PLACES: tl.constexpr = 16 // BITS  # noqa: N806 - constants
    GROUPS: tl.constexpr = INPUTS // GROUP if GROUP else 1  # noqa: N806
    output = tl.program_id(0) * N + tl.arange(0, N)
    lane = tl.program_id(1) * W + tl.arange(0, W)
    there = (output < outputs)[:, None] & (lane < TILES * LANES)[None, :]
    packed = tl.load(
        lanes + output.to(tl.int64)[:, None] * (TILES * LANES) + lane[None, :], mask=there, other=0
    ).to(tl.int32)
    for place in tl.static_range(PLACES):
        code = ((packed >> (place * BITS)) & ((1 << BITS) - 1)) - (1 << (BITS - 1))
        source = lane // LANES * (LANES * PLACES) + place * LANES + lane % LANES
        mask = there & (source < INPUTS)[None, :]
        group = source // GROUP if GROUP else source * 0
        scale = tl.load(scales + output[:, None] * GROUPS + group[None, :], mask=mask, other=0.0)
        weight = code.to(tl.float32) * scale.to(tl.float32)
        target = out + output.to(tl.int64)[:, None] * INPUTS + source[None, :]
        tl.store(target, weight.to(out.dtype.element_ty), mask=mask)


_LANES: Final = 32
_LANE_BITS: Final = 16
MANY_ROWS: Final = 64
"""The most rows that are multiplied by codes."""
# The limits between ways to launch are those of Llama 3.2 1B's layers on an H200.
_HOPPER: Final = 9
_WARP_WORDS: Final = 128
_MOST_WORDS: Final = 512
_MANY_OUTPUTS: Final = 8192
_LONG_ROW: Final = 4096
_FEW_ROWS, _MEDIUM_ROWS = 16, 32
STAGES: Final = 3
"""Loop iterations whose loads are under way at a time."""


def pack(weights: QuantizedWeights) -> torch.Tensor:
    """Returns the lanes of the kernels, int16 [outputs, lanes]; inputs are padded to whole tiles."""
    outputs, inputs = weights.codes.shape
    places = _LANE_BITS // weights.bits
    padded = functional.pad(weights.codes, (0, -inputs % (_LANES * places)), value=2 ** (weights.bits - 1))
    tiles = padded.view(outputs, -1, places, _LANES).to(torch.int32)
    lanes = torch.zeros_like(tiles[:, :, 0])
    for place in range(places):
        lanes |= tiles[:, :, place] << (place * weights.bits)
    # A lane's highest bit becomes its sign.
    return (lanes - ((lanes >> (_LANE_BITS - 1)) << _LANE_BITS)).to(torch.int16).view(outputs, -1)


def multiply(
    x: torch.Tensor, lanes: torch.Tensor, scales: torch.Tensor, bits: int, bias: torch.Tensor | None
) -> torch.Tensor:
    """Multiplies by quantized weights.

    Args:
        x: [rows, inputs]; the values of a row are contiguous.
        lanes: the result of `pack`.
        scales: [outputs, groups], contiguous.
        bits: of a code.
        bias: [outputs].

    Returns:
        [rows, outputs], of the type of `x`.
    """
    rows, inputs = x.shape
    outputs, tiles = lanes.shape[0], lanes.shape[1] // _LANES
    groups = scales.shape[1]
    constants: dict[str, Any] = {
        "INPUTS": inputs, "LANES": _LANES, "BITS": bits, "GROUP": inputs // groups if groups > 1 else 0
    }  # fmt: skip
    if rows > MANY_ROWS:
        weights = torch.empty((outputs, inputs), dtype=x.dtype, device=x.device)
        grid: tuple[int, ...] = (triton.cdiv(outputs, 16), triton.cdiv(lanes.shape[1], 128))
        dequantize_kernel[grid](lanes, scales, weights, outputs, **constants, TILES=tiles, N=16, W=128)
        return functional.linear(x, weights, bias)
    out = torch.empty((rows, outputs), dtype=x.dtype, device=x.device)
    constants |= {"BIAS": bias is not None, "ASSEMBLY": not _interpreted(), **_start(x.device)}
    if rows == 1:
        words = lanes.view(torch.int32)
        tile, wide, warps = one_row_launch(words.shape[1])
        one_row_kernel[(triton.cdiv(outputs, tile),)](
            x, words, scales, bias, out, outputs, **constants,
            WORDS=words.shape[1], N=tile, W=wide, num_warps=warps,
        )  # fmt: skip
        return out
    tile, splits, warps = many_rows_launch(rows, outputs, inputs)
    many_rows_kernel[(triton.cdiv(outputs, tile),)](
        x, lanes, scales, bias, out, rows, outputs, x.stride(0), **constants, TILES=tiles,
        M=max(8, triton.next_power_of_2(rows)), N=tile, SPLITS=splits, num_warps=warps, num_stages=STAGES,
    )  # fmt: skip
    return out


def _interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


@functools.cache
def _start(device: torch.device) -> dict[str, Any]:
    """Lets a kernel start before its predecessor in the stream has ended, if the GPU can.

    It reads its first weights while its predecessor ends (CUDA's programmatic dependent launch), so the
    preceding launch must not write the product's weights. Only loading a model writes them.
    """
    early = device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= _HOPPER
    return {"EARLY": True, "launch_pdl": True} if early else {"EARLY": False}


@functools.cache
def one_row_launch(num_words: int) -> tuple[int, int, int]:
    """Returns the outputs of a program, the words of an output that it reads at a time, and its warps."""
    wide = min(_MOST_WORDS, max(_WARP_WORDS, triton.next_power_of_2(num_words)))
    return 4, wide, wide // _WARP_WORDS


@functools.cache
def many_rows_launch(rows: int, outputs: int, inputs: int) -> tuple[int, int, int]:
    """Returns a program's outputs, the tiles that its warps share at a time, and its warps.

    More rows need more registers and shared memory for each output and tile.
    """
    if outputs >= _MANY_OUTPUTS:
        return (64, 2, 2) if rows <= _MEDIUM_ROWS else (32, 1, 1)
    splits = 8 if inputs >= _LONG_ROW and rows <= _FEW_ROWS else 4 if rows <= _MEDIUM_ROWS else 2
    return 16, splits, splits
