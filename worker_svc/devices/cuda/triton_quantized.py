"""Products with quantized weights on GPUs: packs weights and launches the kernels.

A single row reads each weight once and multiplies without tensor cores. More rows use tensor cores on the
exact integers, which half precision holds. A chunk of a prompt is bound by arithmetic, so its weights are
dequantized once for PyTorch's own product.
"""

import functools
import os
from typing import Any, Final

import torch
import triton
from torch.nn import functional

from worker_svc.devices.cuda import triton_quantized_kernels as kernels
from worker_svc.devices.quantized import QuantizedWeights

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
        kernels.dequantize_kernel[grid](
            lanes, scales, weights, outputs, **constants, TILES=tiles, N=16, W=128
        )
        return functional.linear(x, weights, bias)
    out = torch.empty((rows, outputs), dtype=x.dtype, device=x.device)
    constants |= {"BIAS": bias is not None, "ASSEMBLY": not _interpreted(), **_start(x.device)}
    if rows == 1:
        words = lanes.view(torch.int32)
        tile, wide, warps = one_row_launch(words.shape[1])
        kernels.one_row_kernel[(triton.cdiv(outputs, tile),)](
            x, words, scales, bias, out, outputs, **constants,
            WORDS=words.shape[1], N=tile, W=wide, num_warps=warps,
        )  # fmt: skip
        return out
    tile, splits, warps = many_rows_launch(rows, outputs, inputs)
    kernels.many_rows_kernel[(triton.cdiv(outputs, tile),)](
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
