"""GGUF files in Q4_0 and Q8_0 keep their codes."""

import json
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import load_file

from tests.unit.worker.model_files.test_loader import HEADS, KV_HEADS, shapes, write_gguf
from worker_svc.model_files import loader
from worker_svc.model_files.gguf_convert import convert
from worker_svc.quantized import codes
from worker_svc.quantized.checkpoint_config import read
from worker_svc.quantized.codes import Scheme

Q = gguf.GGMLQuantizationType


def _projections() -> list[str]:
    return [name for name in shapes(head=False) if name.startswith("blk.") and "norm" not in name]


def _unpermuted(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Row 2 i of a head is row i of its first half, row 2 i + 1 of its second."""
    each = weight.shape[0] // heads
    order = [head * each + 2 * i + half for head in range(heads) for half in (0, 1) for i in range(each // 2)]
    return weight[order]


@pytest.mark.parametrize("head", [True, False])
@pytest.mark.parametrize(("kind", "bits"), [(Q.Q4_0, 4), (Q.Q8_0, 8)])
def test_codes_are_kept(tmp_path: Path, kind: Any, bits: int, *, head: bool) -> None:
    """Projections and a head of their type equal the file's weights bit for bit; the rest is bfloat16."""
    names = [*_projections(), *(["output.weight"] if head else [])]
    values = write_gguf(tmp_path / "m.gguf", kinds=dict.fromkeys(names, kind), head=head)
    convert(tmp_path / "m.gguf", tmp_path)
    found = load_file(tmp_path / "model.safetensors")
    renamed = {
        "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }  # fmt: skip
    heads = {"attn_q": HEADS, "attn_k": KV_HEADS}
    for name in names:
        own = name.split(".")[-2]
        module = "lm_head" if own == "output" else f"model.layers.0.{renamed[own]}"
        expected = _unpermuted(values[name], heads[own]) if own in heads else values[name]
        packed, scales = found.pop(f"{module}.weight_packed"), found.pop(f"{module}.weight_scale")
        assert scales.dtype == torch.float16
        assert torch.equal(codes.dequantize(codes.unpack(packed, bits), scales, bits), expected)
        assert found.pop(f"{module}.weight_shape").tolist() == list(expected.shape)
    assert {tensor.dtype for tensor in found.values()} == {torch.bfloat16}
    quantization = read(tmp_path)
    assert quantization is not None
    assert quantization.scheme_of("model.layers.0.mlp.up_proj") == Scheme(4 if bits == 4 else 8, 32)
    assert (quantization.scheme_of("lm_head") is not None) == head
    assert json.loads((tmp_path / "config.json").read_text())["tie_word_embeddings"] is not head


def test_mixed_types_are_dequantized(tmp_path: Path) -> None:
    """Projections of several types become bfloat16."""
    names = _projections()
    kinds = dict.fromkeys(names, Q.Q4_0) | {names[0]: Q.Q8_0}
    values = write_gguf(tmp_path / "m.gguf", kinds=kinds)
    folder = loader.convert(tmp_path / "m.gguf", tmp_path / "cache")
    found = load_file(folder / "model.safetensors")
    assert read(folder) is None
    assert torch.equal(found["model.layers.0.mlp.up_proj.weight"], values["blk.0.ffn_up.weight"].bfloat16())
