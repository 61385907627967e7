"""Writes the weights of a GGUF file as safetensors.

A file whose projections are all Q4_0 or all Q8_0 keeps their codes and scales: the folder is a checkpoint of
compressed-tensors with groups of 32. Everything else is dequantized to bfloat16. The weights equal those of
transformers' converter bit for bit.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import torch
from gguf.quants import dequantize
from safetensors.torch import save_file

from worker_svc.model_files.gguf_file import StoredTensor
from worker_svc.quantized.checkpoint_config import quantization_config, quantization_group
from worker_svc.quantized.codes import Bits, Scheme, pack

# Types whose blocks of 32 weights are codes and a scale, with their bits. Other types have zero points or
# codes of other sizes.
_BITS: dict[Any, Bits] = {gguf.GGMLQuantizationType.Q4_0: 4, gguf.GGMLQuantizationType.Q8_0: 8}
_BLOCK = 32
# Rows dequantized at a time: a step takes several times their size in float32.
_ROWS = 4096


def _bits_of_projections(tensors: Mapping[str, StoredTensor]) -> Bits | None:
    kinds = {tensor.kind for name, tensor in tensors.items() if _is_projection(name)}
    return _BITS.get(kinds.pop()) if len(kinds) == 1 else None


def _is_projection(name: str) -> bool:
    return re.fullmatch(r"blk\.\d+\.(attn_(q|k|v|output)|ffn_(gate|up|down))\.weight", name) is not None


def write_weights(
    tensors: Mapping[str, StoredTensor], names: Mapping[str, str], config: dict[str, Any], path: Path
) -> dict[str, Any]:
    """Writes a model's weights to `path`; returns what config.json says of their quantization.

    `names` has Hugging Face's names by GGUF's. `ValueError` names a tensor with numbers that are not finite.
    """
    bits = _bits_of_projections(tensors)
    weights = dict(_weights(tensors, names, config, bits))
    save_file(weights, path, metadata={"format": "pt"})
    path.chmod(0o644)  # save_file makes it private, but a cache may be shared
    if not bits:
        return {}
    head, is_packed = ["lm_head"], "lm_head.weight_packed" in weights
    group = quantization_group(Scheme(bits, _BLOCK), ["Linear", *(head if is_packed else [])])
    return {"quantization_config": quantization_config({"group_0": group}, [] if is_packed else head)}


def _weights(
    tensors: Mapping[str, StoredTensor], names: Mapping[str, str], config: dict[str, Any], bits: Bits | None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields all tensors; with `bits`, projections and an output head of their type keep their codes."""
    is_gemma = config["model_type"] == "gemma3_text"
    reordered = () if is_gemma else (".q_proj.weight", ".k_proj.weight")
    for stored, name in names.items():
        tensor = tensors[stored]
        heads = tensor.shape[0] // config["head_dim"] if name.endswith(reordered) else 0
        is_head = name == "lm_head.weight" and _BITS.get(tensor.kind) == bits
        if bits and (is_head or _is_projection(stored)):
            codes, scales = (_unpermute(each, heads) for each in _blocks(tensor.data, bits))
            _check_finite(stored, scales)
            module = name.removesuffix(".weight")
            yield f"{module}.weight_packed", pack(codes, bits)
            yield f"{module}.weight_scale", scales.contiguous()
            yield f"{module}.weight_shape", torch.tensor(codes.shape)
            continue
        # Gemma's layers add 1 to a stored norm; GGUF stores the sum.
        offset = 1 if is_gemma and name.endswith("norm.weight") else 0
        parts = [
            torch.from_numpy(dequantize(tensor.data[first : first + _ROWS], tensor.kind) - offset).to(
                torch.bfloat16
            )
            for first in range(0, len(tensor.data), _ROWS)
        ]
        weight = _unpermute(torch.cat(parts), heads)
        _check_finite(stored, weight)
        yield name, weight[0] if name.endswith("norm.weight") else weight


def _check_finite(name: str, values: torch.Tensor) -> None:
    if not bool(values.isfinite().all()):
        raise ValueError(f"tensor {name} has numbers that are not finite; fetch it again")


def _blocks(data: Any, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Splits rows of blocks into codes, uint8 [rows, columns], and scales, float16 [rows, groups].

    Codes have no sign: half of their range stands for 0. A block is its scale and then its codes. In Q4_0,
    byte i holds the codes of weights i and i + 16.
    """
    rows = torch.from_numpy(data.copy())
    blocks = rows.view(rows.shape[0], -1, 2 + _BLOCK * bits // 8)
    stored = blocks[..., 2:]
    codes = stored ^ 0x80 if bits == 8 else torch.cat((stored & 0xF, stored >> 4), dim=-1)
    return codes.flatten(1), blocks[..., :2].contiguous().view(torch.float16).squeeze(-1)


def _unpermute(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Undoes llama.cpp's interleaving of the two halves of each head, which serves its rotary embedding.

    It only moves rows. With 0 heads nothing moves.
    """
    if not heads:
        return weight
    rows, columns = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, columns).transpose(1, 2).reshape(rows, columns)
