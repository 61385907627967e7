"""Stores the same quantized model in each format of checkpoints, and dequantized, as a reference."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file, save_file

from worker_svc.devices.quantized import QuantizedWeights
from worker_svc.quantized.codes import Scheme, dequantize, quantize

Stored = Literal["compressed-tensors", "gptq", "gptq_v2", "awq", "float"]

# The output whose code is in each nibble of AWQ's words, from the lowest.
_AWQ = (0, 2, 4, 6, 1, 3, 5, 7)


def write(source: Path, folder: Path, stored: Stored, scheme: Scheme) -> Path:
    """Writes a random model's projections as rounded codes; all formats have the same codes and scales.

    Args:
        source: the folder of a model in float32.
        folder: made.
        stored: the format; "float" has the dequantized weights.
        scheme: of all projections.

    Returns:
        `folder`.
    """
    folder.mkdir(parents=True)
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        if not name.endswith("_proj.weight"):
            tensors[name] = tensor
            continue
        # Scales that float16 and bfloat16 hold, so that no format rounds them.
        codes, scales = quantize(tensor.bfloat16(), scheme)
        for kind, stored_tensor in _stored(codes, scales, scheme, stored):
            tensors[f"{name.removesuffix('.weight')}.{kind}"] = stored_tensor
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    if stored != "float":
        config["quantization_config"] = quantization_config(stored, scheme)
    (folder / "config.json").write_text(json.dumps(config))
    for path in source.glob("generation_config.json"):
        shutil.copyfile(path, folder / path.name)
    return folder


def quantization_config(stored: Stored, scheme: Scheme) -> dict[str, Any]:
    """Returns what a checkpoint of that format has in config.json."""
    group = -1 if scheme.group is None else scheme.group
    if stored == "awq":
        return {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": False, "version": "gemm"}
    if stored in ("gptq", "gptq_v2"):
        return {
            "quant_method": "gptq", "bits": scheme.bits, "group_size": group, "sym": True, "desc_act": False,
            "checkpoint_format": stored,
        }  # fmt: skip
    weights = {
        "num_bits": scheme.bits, "type": "int", "symmetric": True, "group_size": scheme.group,
        "strategy": "channel" if scheme.group is None else "group", "actorder": None,
    }  # fmt: skip
    return {
        "quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}},
    }  # fmt: skip


def exact_weights(weights: QuantizedWeights) -> torch.Tensor:
    """Returns the weights for which codes and scales stand, float64 [outputs, inputs]."""
    values = weights.codes.double() - 2 ** (weights.bits - 1)
    grouped = values.view(*weights.scales.shape, -1) * weights.scales.double().unsqueeze(-1)
    exact: torch.Tensor = grouped.view_as(values)
    return exact


def words(values: torch.Tensor, bits: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """Packs values along the last dimension into 32-bit words, written out bit by bit.

    Args:
        values: integers without sign.
        bits: of a value.
        order: which of a word's values is in each place, from the lowest; by default the next one.
    """
    per_word = 32 // bits
    places = values.long().reshape(*values.shape[:-1], -1, per_word)[..., list(order or range(per_word))]
    joined = sum(places[..., place] << (place * bits) for place in range(per_word))
    assert isinstance(joined, torch.Tensor)
    return torch.where(joined >= 2**31, joined - 2**32, joined).to(torch.int32)


def _stored(
    codes: torch.Tensor, scales: torch.Tensor, scheme: Scheme, stored: Stored
) -> Iterator[tuple[str, torch.Tensor]]:
    outputs, inputs = codes.shape
    groups, half = scales.shape[1], 2 ** (scheme.bits - 1)
    if stored == "float":
        yield "weight", dequantize(codes, scales, scheme.bits)
        return
    if stored == "compressed-tensors":
        yield "weight_packed", words(codes, scheme.bits)
        yield "weight_scale", scales
        yield "weight_shape", torch.tensor([outputs, inputs])
        return
    yield "scales", scales.t().half().contiguous()
    middle = torch.full((groups, outputs), half - (stored == "gptq"))
    if stored == "awq":
        yield "qweight", words(codes.t(), 4, _AWQ).contiguous()
        yield "qzeros", words(middle, 4, _AWQ)
        return
    yield "qweight", words(codes, scheme.bits).t().contiguous()
    yield "qzeros", words(middle, scheme.bits)
    yield "g_idx", torch.arange(inputs, dtype=torch.int32) // (scheme.group or inputs)
