"""Turns the stored tensors of quantized layers into one form, while a checkpoint is read.

The form is that of compressed-tensors: `weight_packed`, int32 [outputs, words] of `codes.pack`, and
`weight_scale`, [outputs, groups].
"""

from collections.abc import Sequence
from typing import Final

import torch

from protos.errors import ConfigurationRefused
from worker_svc.quantized import codes
from worker_svc.quantized.checkpoint_config import MARLIN, CheckpointQuantization, Format

_WEIGHT: Final = "weight_packed"
_SCALE: Final = "weight_scale"
# By format, the names of tensors and what they become; an empty name stands for nothing.
_NAMES: Final[dict[Format, dict[str, str]]] = {
    "compressed-tensors": {
        _WEIGHT: _WEIGHT, _SCALE: _SCALE, "weight_shape": "", "weight_zero_point": "", "weight_g_idx": "",
    },
    "gptq": {"qweight": _WEIGHT, "scales": _SCALE, "qzeros": "", "g_idx": "", "B": "", "s": ""},
    "awq": {"qweight": _WEIGHT, "scales": _SCALE, "qzeros": ""},
}  # fmt: skip
# AWQ packs 8 consecutive outputs into a word. Its nibbles, from the lowest, hold these.
_AWQ_ORDER: Final = (0, 2, 4, 6, 1, 3, 5, 7)
_WORD: Final = 32
_MATRIX: Final = 2  # dimensions


def quantized_module(quantization: CheckpointQuantization, tensor: str) -> str | None:
    """Returns the module whose packed weights a tensor of that name has; `None` for other tensors."""
    module, _, kind = tensor.rpartition(".")
    return module if _NAMES[quantization.format].get(kind) == _WEIGHT else None


class StoredLayers:
    """Turns stored tensors into the common form; without a quantization, all stay as they are.

    Zero points, orders and shapes become nothing: `finish` checks them.
    """

    def __init__(self, quantization: CheckpointQuantization | None) -> None:
        self._quantization = quantization
        self._names = _NAMES[quantization.format] if quantization else {}
        self._is_awq = quantization is not None and quantization.format == "awq"
        self._sizes: dict[str, tuple[int, int]] = {}
        """Outputs and inputs of each layer, by its codes."""
        self._others: dict[str, torch.Tensor] = {}
        """Tensors of which nothing is left."""

    def has_values(self, name: str) -> bool:
        """Whether `finish` reads the numbers of a tensor of that name."""
        return self._names.get(name.rpartition(".")[2]) == ""

    def missing_scheme(self, name: str) -> codes.Scheme | None:
        """Returns the scheme that the layer of a plain tensor should have, after the last tensor.

        "Linear" does not say which layers a quantizer skipped, such as routers and heads of classifiers: it
        leaves all of the same last name as they are.
        """
        kinds = {module.rpartition(".")[2] for module in self._sizes}
        is_skipped = kinds and name.split(".")[-2] not in kinds
        return None if is_skipped else self._scheme(name)

    def _scheme(self, name: str) -> codes.Scheme | None:
        module = name.rpartition(".")[0]
        return None if self._quantization is None else self._quantization.scheme_of(module)

    def stored_name(self, name: str) -> str:
        """Returns the name in the files of a tensor in the common form."""
        module, _, kind = name.rpartition(".")
        names = {common: stored for stored, common in self._names.items() if common}
        return f"{module}.{names.get(kind, kind)}"

    def stored_shape(self, name: str, shape: Sequence[int]) -> tuple[int, ...]:
        """Returns the shape of a file's tensor of that name, from its shape in the common form."""
        kind = name.rpartition(".")[2]
        if kind not in self._names or kind == self._names[kind] or len(shape) != _MATRIX:
            return tuple(shape)
        outputs, columns = shape
        if self._is_awq and kind == "qweight":
            return columns * len(_AWQ_ORDER), outputs // len(_AWQ_ORDER)
        return columns, outputs

    def take(self, name: str, tensor: torch.Tensor) -> tuple[str, torch.Tensor] | None:
        """Returns a stored tensor's name and value in the common form; `None` if nothing is left of it.

        Tensors of layers that are not quantized stay as they are. Scales that are not finite and tensors of
        another type are refused.
        """
        module, _, kind = name.rpartition(".")
        names = self._names
        if kind not in names:
            return name, tensor
        scheme = self._scheme(name)
        if scheme is None:
            raise ConfigurationRefused(
                f"{name} is quantized, but quantization_config does not name its layer"
            )
        _check_kind(name, kind, tensor)
        if kind in ("B", "s"):
            raise ConfigurationRefused(f"{name} {MARLIN}")
        if not names[kind]:
            self._others[name] = tensor
            return None
        if tensor.dim() == _MATRIX:
            if self._is_awq and kind == "qweight":
                tensor = codes.pack(_from_awq(tensor), scheme.bits)
            elif kind != names[kind]:
                tensor = tensor.t().contiguous()
            if names[kind] == _WEIGHT:
                self._sizes[module] = tensor.shape[0], tensor.shape[1] * _WORD // scheme.bits
        elif names[kind] == _SCALE and tensor.dim() == 1 and scheme.group is None:
            tensor = tensor[:, None]
        if names[kind] == _SCALE and not tensor.is_meta and not bool(tensor.isfinite().all()):
            raise ConfigurationRefused(f"{name} is not finite; fetch the checkpoint again")
        return f"{module}.{names[kind]}", tensor

    def finish(self) -> None:
        """Checks zero points, group orders and shapes, which are not loaded, after the last tensor."""
        for name, tensor in self._others.items():
            module, _, kind = name.rpartition(".")
            if kind == "weight_zero_point":
                if tensor.any():
                    raise ConfigurationRefused(
                        f"{name} has zero points, which are not served; choose another checkpoint"
                    )
                continue
            scheme = self._scheme(name)
            if scheme is None or module not in self._sizes:
                continue
            outputs, inputs = self._sizes[module]
            zeros = scheme.groups(inputs), outputs * scheme.bits // _WORD
            expected = {"qzeros": zeros, "weight_shape": (_MATRIX,)}.get(kind, (inputs,))
            if tuple(tensor.shape) != expected:
                raise ConfigurationRefused(
                    f"tensor {name} is {list(tensor.shape)} in the file, but its layer has {list(expected)};"
                    " fetch the checkpoint again"
                )
            if kind == "qzeros":
                _check_middle(name, tensor, scheme.bits, is_awq=self._is_awq)
            elif kind != "weight_shape":
                _check_order(name, tensor, scheme.group)
            elif tensor.tolist() != [outputs, inputs]:
                raise ConfigurationRefused(
                    f"{name} is {tensor.tolist()}, but the codes are of [{outputs}, {inputs}]; fetch the checkpoint again"
                )


def _check_kind(name: str, kind: str, tensor: torch.Tensor) -> None:
    """Refuses codes and zeros other than int32, and scales other than floating-point numbers."""
    if kind in ("scales", _SCALE):
        fits, expected = tensor.is_floating_point() and tensor.itemsize > 1, "floating-point numbers"
    elif kind in ("qweight", "qzeros", _WEIGHT):
        fits, expected = tensor.dtype == torch.int32, "int32"
    else:
        return
    if not fits:
        raise ConfigurationRefused(
            f"tensor {name} holds {str(tensor.dtype).removeprefix('torch.')}, but quantization_config describes"
            f" {expected}; use the config.json that belongs to the weights"
        )


def _check_order(name: str, order: torch.Tensor, group: int | None) -> None:
    """Refuses an assignment of inputs to groups other than one after another."""
    inputs = torch.arange(order.numel())
    expected = torch.zeros_like(inputs) if group is None else inputs // group
    if not torch.equal(order.flatten().long(), expected):
        raise ConfigurationRefused(
            f"{name} orders groups by activations, which is not served; choose a checkpoint without g_idx"
        )


def _check_middle(name: str, zeros: torch.Tensor, bits: int, *, is_awq: bool) -> None:
    """Refuses zero points outside the middle. GPTQ's first version stores one less, whatever the label."""
    middle = 2 ** (bits - 1)
    values = (zeros.unsqueeze(-1) >> torch.arange(0, _WORD, bits, dtype=torch.int32)) & (2**bits - 1)
    if not any(bool((values == each).all()) for each in (middle, middle - (not is_awq))):
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
_BLOCKS_SHAPE: Final = ("experts", "outputs", "groups", 16)


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


def _check_pair(base: str, blocks: torch.Tensor, scales: torch.Tensor) -> None:
    """Refuses blocks other than [experts, outputs, groups, 16] and scales that do not fit them."""
    for name, tensor in ((base + BLOCKS, blocks), (base + SCALES, scales)):
        if tensor.dtype != torch.uint8:
            kind = str(tensor.dtype).removeprefix("torch.")
            raise ConfigurationRefused(f"tensor {name} holds {kind}, but MXFP4 has uint8; fetch it again")
    if blocks.dim() != len(_BLOCKS_SHAPE) or blocks.shape[-1] != _BLOCKS_SHAPE[-1]:
        raise ConfigurationRefused(
            f"tensor {base}{BLOCKS} is {list(blocks.shape)} in the file, but MXFP4 has"
            f" [{', '.join(map(str, _BLOCKS_SHAPE))}]; fetch it again"
        )
    if scales.shape != blocks.shape[:-1]:
        raise ConfigurationRefused(
            f"tensor {base}{SCALES} is {list(scales.shape)} in the file, but the blocks in {base}{BLOCKS} need"
            f" {list(blocks.shape[:-1])}; fetch it again"
        )


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
            _check_pair(base, blocks, scales)
            return base, dequantize(blocks, scales, self._dtype)
        return name, tensor

    def check_pairs(self) -> None:
        """Refuses blocks without scales and the reverse, after the last tensor."""
        for name in self._waiting:
            other = (
                name.removesuffix(BLOCKS) + SCALES
                if name.endswith(BLOCKS)
                else name.removesuffix(SCALES) + BLOCKS
            )
            raise ConfigurationRefused(f"the weights lack {other}; fetch the checkpoint again")
