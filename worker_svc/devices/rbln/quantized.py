"""Products with quantized weights on NPUs: plain PyTorch, which the vendor's compiler recognizes.

The constraints are vllm-rbln 0.12.0's: a single number of bits in a process, groups of 64 (128 is two of
these with equal scales) or a scale per output channel.
"""

import os
from collections.abc import Collection
from typing import Final

import torch

from protos.errors import ConfigurationRefused
from worker_svc.devices.quantized import QuantizedProducts, QuantizedWeights

BITS_VARIABLE: Final = "RBLN_QUANT_BITS"
"""Where the compiler reads the bits of a code."""
_GROUP: Final = 64
_GROUPS: Final = (_GROUP, 2 * _GROUP, None)


class NpuProducts(QuantizedProducts):
    """The pattern with the vendor's groups."""

    def check(self, bits: Collection[int], groups: Collection[int | None]) -> None:
        """Tells the compiler the number of bits."""
        if len(set(bits)) > 1:
            raise ConfigurationRefused(
                f"an NPU takes weights of one size, and the checkpoint has {' and '.join(map(str, sorted(bits)))} bits;"
                " choose another checkpoint, or use `triptych quantize --lm-head keep`"
            )
        if other := [group for group in groups if group not in _GROUPS]:
            raise ConfigurationRefused(
                f"an NPU takes groups of {_GROUP} or {2 * _GROUP} inputs or a scale per output channel, and the"
                f" checkpoint has groups of {other[0]}; choose another checkpoint"
            )
        os.environ[BITS_VARIABLE] = str(next(iter(bits)))

    def num_bytes(self, outputs: int, inputs: int, groups: int, bits: int, dtype: torch.dtype) -> int:
        return super().num_bytes(outputs, inputs, groups * _repeats(inputs, groups), bits, dtype)

    def layer(self, weights: QuantizedWeights, dtype: torch.dtype, *, wide: bool) -> torch.nn.Module:
        repeats = _repeats(weights.codes.shape[1], weights.scales.shape[1])
        scales = weights.scales.repeat_interleave(repeats, dim=1)
        return super().layer(QuantizedWeights(weights.codes, scales, weights.bits), dtype, wide=wide)


def _repeats(inputs: int, groups: int) -> int:
    return 2 if groups > 1 and inputs // groups == 2 * _GROUP else 1
