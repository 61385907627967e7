"""The experts of gpt-oss in MXFP4: numbers of 4 bits, 32 of which share a power of two.

The format is that of the OCP Microscaling specification 1.0, as gpt-oss checkpoints store it: `_blocks`,
uint8 [experts, outputs, groups, 16], with the earlier of two inputs in a byte's lower half, and `_scales`,
uint8 [experts, outputs, groups], exponents with a bias of 127. They run in the model's type, dequantized.
"""

import json
from pathlib import Path
from typing import Final

import torch

BLOCKS: Final = "_blocks"
SCALES: Final = "_scales"
# One bit of sign, two of exponent, one of mantissa.
_MAGNITUDES: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_BIAS: Final = 127


def is_mxfp4(folder: Path) -> bool:
    """Whether a model's experts are stored in MXFP4, as its config.json says."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    found = config.get("quantization_config")
    return isinstance(found, dict) and found.get("quant_method") == "mxfp4"


def dequantize(blocks: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns the experts' weights in the layout of gpt-oss's other types, [experts, inputs, outputs]."""
    values = torch.tensor([*_MAGNITUDES, *(-each for each in _MAGNITUDES)])
    experts, outputs, groups, half = blocks.shape
    weights = torch.empty(experts, 2 * half * groups, outputs, dtype=dtype, device=blocks.device)
    if blocks.is_meta:
        return weights
    # One at a time: the indices of a whole layer would take several times its memory.
    for expert in range(experts):
        codes = torch.stack((blocks[expert] & 0xF, blocks[expert] >> 4), dim=-1).flatten(-2)
        powers = torch.exp2(scales[expert].float() - _BIAS)
        weights[expert] = (values[codes.int()] * powers.unsqueeze(-1)).flatten(-2).t()
    return weights


class Mxfp4Experts:
    """Turns pairs of stored tensors into weights, while a checkpoint is read.

    Other tensors stay as they are.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        """Makes weights of this type."""
        self._dtype = dtype
        self._waiting: dict[str, torch.Tensor] = {}

    def take(self, name: str, tensor: torch.Tensor) -> tuple[str, torch.Tensor] | None:
        """Returns the next tensor of the model and its name; `None` until a pair is complete."""
        for own, other in ((BLOCKS, SCALES), (SCALES, BLOCKS)):
            if not name.endswith(own):
                continue
            base = name.removesuffix(own)
            found = self._waiting.pop(base + other, None)
            if found is None:
                self._waiting[name] = tensor
                return None
            blocks, scales = (tensor, found) if own == BLOCKS else (found, tensor)
            return base, dequantize(blocks, scales, self._dtype)
        return name, tensor
