"""Products with quantized weights on GPUs: packs weights and launches the kernels.

A few rows read each weight once and multiply without tensor cores. More rows use these on the exact integers,
which half precision holds. A chunk of a prompt computes, rather than reads, so its weights are dequantized
once for PyTorch's own product.
"""

import functools
from typing import Any, Final

import torch
import triton
from torch.nn import functional

from worker_svc.devices.cuda import triton_quantized_kernels as kernels
from worker_svc.devices.quantized import QuantizedWeights

_WORD_BITS: Final = 32
_TILE_WORDS: Final = 16
FEW_ROWS: Final = 4
"""The most rows that are multiplied without tensor cores."""
MANY_ROWS: Final = 64
"""The most rows that are multiplied by codes."""
# The limits between ways to launch are those of Llama 3.2 1B's layers on an H200.
_FEWEST_DOT_ROWS: Final = 16
_MANY_OUTPUTS: Final = 8192
_LONG_ROW: Final = 1024


def pack(weights: QuantizedWeights) -> torch.Tensor:
    """Returns the words of the kernels, int32 [outputs, words]; inputs are padded to whole tiles."""
    outputs, inputs = weights.codes.shape
    places = _WORD_BITS // weights.bits
    padded = functional.pad(
        weights.codes, (0, -inputs % (_TILE_WORDS * places)), value=2 ** (weights.bits - 1)
    )
    tiles = padded.view(outputs, -1, places, _TILE_WORDS).to(torch.int32)
    words = torch.zeros_like(tiles[:, :, 0])
    for place in range(places):
        words |= tiles[:, :, place] << (place * weights.bits)
    return words.view(outputs, -1)


def multiply(
    x: torch.Tensor, words: torch.Tensor, scales: torch.Tensor, bits: int, bias: torch.Tensor | None
) -> torch.Tensor:
    """Multiplies by quantized weights.

    Args:
        x: [rows, inputs]; the values of a row are contiguous.
        words: the result of `pack`.
        scales: [outputs, groups], contiguous.
        bits: of a code.
        bias: [outputs].

    Returns:
        [rows, outputs], of the type of `x`.
    """
    rows, inputs = x.shape
    outputs, num_words = words.shape
    groups = scales.shape[1]
    constants: dict[str, Any] = {"BITS": bits, "GROUP": inputs // groups if groups > 1 else 0}
    sizes = (inputs, outputs, num_words, groups)
    if rows > MANY_ROWS:
        weights = torch.empty((outputs, inputs), dtype=x.dtype, device=x.device)
        grid: tuple[int, ...] = (triton.cdiv(outputs, 16), triton.cdiv(num_words, 64))
        kernels.dequantize_kernel[grid](words, scales, weights, *sizes, **constants, N=16, W=64)
        return functional.linear(x, weights, bias)
    out = torch.empty((rows, outputs), dtype=x.dtype, device=x.device)
    constants["BIAS"] = bias is not None
    if _is_few(rows, outputs):
        tile, wide, warps = few_rows_launch(rows, num_words)
        kernels.few_rows_kernel[(triton.cdiv(outputs, tile),)](
            x, words, scales, bias, out, *sizes, x.stride(0), **constants, ROWS=rows, N=tile, W=wide, num_warps=warps
        )  # fmt: skip
        return out
    tile, warps, stages = many_rows_launch(rows, outputs)
    kernels.many_rows_kernel[(triton.cdiv(outputs, tile),)](
        x, words, scales, bias, out, rows, *sizes, x.stride(0), **constants,
        M=max(16, triton.next_power_of_2(rows)), N=tile, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return out


def _is_few(rows: int, outputs: int) -> bool:
    """Whether to multiply without tensor cores: with many outputs, unpacking them all takes longer."""
    return rows <= FEW_ROWS and rows & (rows - 1) == 0 and outputs < _MANY_OUTPUTS


@functools.cache
def few_rows_launch(rows: int, num_words: int) -> tuple[int, int, int]:
    """Returns the outputs of a program, the words that it reads at a time, and its warps."""
    if rows == 1 and num_words >= _LONG_ROW:
        return 1, 256, 8
    return 4, min(128, triton.next_power_of_2(num_words)), 4 if rows == 1 else 8


@functools.cache
def many_rows_launch(rows: int, outputs: int) -> tuple[int, int, int]:
    """Returns the outputs of a program, its warps, and how many loop iterations ahead loads start."""
    if rows <= _FEWEST_DOT_ROWS and outputs >= _MANY_OUTPUTS:
        return 32, 2, 3
    return (32 if rows <= _FEWEST_DOT_ROWS else 64), 4, 3
