"""Turns the stored tensors of quantized layers into one form, while a checkpoint is read.

The form is that of compressed-tensors: `weight_packed`, int32 [outputs, words] of `codes.pack`, and
`weight_scale`, [outputs, groups].
"""

import json
from pathlib import Path
from typing import Final

import torch

from protos.errors import ConfigurationRefused
from worker_svc.quantized import codes
from worker_svc.quantized.checkpoint_config import CheckpointQuantization, Format

_WEIGHT: Final = "weight_packed"
_SCALE: Final = "weight_scale"
# By format, the names of tensors and what they become; an empty name stands for nothing.
_NAMES: Final[dict[Format, dict[str, str]]] = {
    "compressed-tensors": {
        _WEIGHT: _WEIGHT, _SCALE: _SCALE, "weight_shape": "", "weight_zero_point": "", "weight_g_idx": "",
    },
    "gptq": {"qweight": _WEIGHT, "scales": _SCALE, "qzeros": "", "g_idx": ""},
    "awq": {"qweight": _WEIGHT, "scales": _SCALE, "qzeros": ""},
}  # fmt: skip
# AWQ packs 8 consecutive outputs into a word. Its nibbles, from the lowest, hold these.
_AWQ_ORDER: Final = (0, 2, 4, 6, 1, 3, 5, 7)
_WORD: Final = 32


def quantized_module(quantization: CheckpointQuantization, tensor: str) -> str | None:
    """Returns the module whose packed weights a tensor of that name has; `None` for other tensors."""
    module, _, kind = tensor.rpartition(".")
    return module if _NAMES[quantization.format].get(kind) == _WEIGHT else None


class StoredLayers:
    """Turns stored tensors into the common form, and checks that codes and scales belong together.

    vLLM counts every parameter of such layers as loaded, so nothing else notices one that is missing.
    """

    def __init__(self, quantization: CheckpointQuantization) -> None:
        self._quantization = quantization
        self._codes: dict[str, tuple[int, ...]] = {}
        self._scales: dict[str, tuple[int, ...]] = {}

    def take(self, name: str, tensor: torch.Tensor) -> tuple[str, torch.Tensor] | None:
        """Returns a stored tensor's name and value in the common form; `None` if nothing is left of it.

        Tensors of layers that are not quantized stay as they are. Zero points, an order of activations and
        scales that are not finite are refused.
        """
        module, _, kind = name.rpartition(".")
        quantization, names = self._quantization, _NAMES[self._quantization.format]
        if kind not in names:
            return name, tensor
        scheme = quantization.scheme_of(module)
        if scheme is None:
            raise ConfigurationRefused(
                f"{name} is quantized, but quantization_config does not name its layer"
            )
        if kind == "weight_zero_point":
            raise ConfigurationRefused(
                f"{name} has zero points, which are not served; choose another checkpoint"
            )
        if kind.endswith("g_idx"):
            _check_order(name, tensor, scheme.group)
        if kind == "qzeros":
            _check_middle(name, tensor, scheme.bits, quantization.middle_zero_point)
        if not names[kind]:
            return None
        if quantization.format == "awq" and kind == "qweight":
            tensor = codes.pack(_from_awq(tensor), scheme.bits)
        elif quantization.format != "compressed-tensors":
            tensor = tensor.t().contiguous()
        if names[kind] == _SCALE and tensor.dim() == 1:
            tensor = tensor[:, None]
        self._note(module, names[kind], tensor)
        return f"{module}.{names[kind]}", tensor

    def _note(self, module: str, kind: str, tensor: torch.Tensor) -> None:
        if kind == _WEIGHT:
            self._codes[module] = tuple(tensor.shape)
            return
        self._scales[module] = tuple(tensor.shape)
        if not tensor.is_meta and not bool(tensor.isfinite().all()):
            raise ConfigurationRefused(f"{module}.{kind} is not finite; fetch the checkpoint again")

    def check(self) -> None:
        """Refuses codes without scales, the reverse, and shapes unlike the scheme; after the last file."""
        for module in sorted(self._codes.keys() ^ self._scales.keys()):
            missing = _SCALE if module in self._codes else _WEIGHT
            raise ConfigurationRefused(f"{module} has no {missing}; fetch the checkpoint again")
        for module, found in self._codes.items():
            scheme = self._quantization.scheme_of(module)
            assert scheme is not None  # `take` has refused others
            inputs = found[-1] * _WORD // scheme.bits
            expected = (found[0], scheme.groups(inputs))
            if len(found) != 2 or self._scales[module] != expected:
                raise ConfigurationRefused(
                    f"{module} has scales {list(self._scales[module])}, but its codes need {list(expected)};"
                    " quantization_config does not describe it"
                )


def _check_order(name: str, order: torch.Tensor, group: int | None) -> None:
    """Refuses an assignment of inputs to groups other than one after another."""
    if order.is_meta:
        return
    inputs = torch.arange(order.numel())
    expected = torch.zeros_like(inputs) if group is None else inputs // group
    if not torch.equal(order.flatten().long(), expected):
        raise ConfigurationRefused(
            f"{name} orders groups by activations, which is not served; choose a checkpoint without g_idx"
        )


def _check_middle(name: str, zeros: torch.Tensor, bits: int, middle: int | None) -> None:
    if zeros.is_meta:
        return
    values = zeros.to(torch.int32).unsqueeze(-1) >> torch.arange(0, _WORD, bits, dtype=torch.int32)
    if not bool(((values & (2**bits - 1)) == middle).all()):
        raise ConfigurationRefused(
            f"{name} has zero points other than the middle of the range, which are not served;"
            " choose a symmetric checkpoint"
        )


def _from_awq(words: torch.Tensor) -> torch.Tensor:
    """Returns codes, uint8 [outputs, inputs], of AWQ's words, int32 [inputs, outputs / 8]."""
    shifts = torch.arange(0, _WORD, 4, dtype=torch.int32, device=words.device)
    nibbles = ((words.unsqueeze(-1) >> shifts) & 0xF).to(torch.uint8)
    ordered = torch.empty_like(nibbles)
    ordered[..., list(_AWQ_ORDER)] = nibbles
    return ordered.flatten(1).t().contiguous()


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
