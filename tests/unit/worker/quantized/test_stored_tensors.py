"""The tensors of every format become the same codes and scales, and refusals name the tensor."""

from pathlib import Path
from typing import get_args

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support import quantized_models
from worker_svc.quantized import codes
from worker_svc.quantized.checkpoint_config import read
from worker_svc.quantized.codes import Bits, Scheme
from worker_svc.quantized.stored_tensors import StoredLayers, quantized_module

LAYER = "model.layers.0.mlp.up_proj"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A model of one matrix of 24 outputs and 128 inputs, and a norm."""
    torch.manual_seed(0)
    tensors = {f"{LAYER}.weight": torch.randn(24, 128), "model.norm.weight": torch.ones(128)}
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


@pytest.mark.parametrize("bits", get_args(Bits))
@pytest.mark.parametrize("group", [32, 64, 128, None])
@pytest.mark.parametrize("stored", ["compressed-tensors", "gptq", "gptq_v2", "awq"])
def test_formats_hold_the_same_weights(
    source: Path, stored: quantized_models.Stored, group: int | None, bits: Bits
) -> None:
    if stored == "awq" and bits == 8:
        pytest.skip("AWQ has 4 bits")
    scheme = Scheme(bits, group)
    expected = load_file(
        quantized_models.write(source, source / "float", "float", scheme) / "model.safetensors"
    )
    folder = quantized_models.write(source, source / "stored", stored, scheme)
    quantization = read(folder)
    assert quantization is not None
    stored_tensors = load_file(folder / "model.safetensors")
    assert {quantized_module(quantization, name) for name in stored_tensors} == {LAYER, None}
    layers = StoredLayers(quantization)
    found = dict(common for each in stored_tensors.items() if (common := layers.take(*each)) is not None)
    layers.finish()
    assert set(found) == {f"{LAYER}.weight_packed", f"{LAYER}.weight_scale", "model.norm.weight"}
    packed, scales = found[f"{LAYER}.weight_packed"], found[f"{LAYER}.weight_scale"]
    assert packed.shape == (24, 128 * bits // 32)
    assert scales.shape == (24, scheme.groups(128))
    torch.testing.assert_close(
        codes.dequantize(codes.unpack(packed, bits), scales, bits),
        expected[f"{LAYER}.weight"],
        rtol=0,
        atol=0,
    )


@pytest.mark.parametrize("bits", get_args(Bits))
def test_packing_is_reversible(bits: Bits) -> None:
    given = torch.randint(0, 2**bits, (5, 64), dtype=torch.uint8)
    packed = codes.pack(given, bits)
    assert torch.equal(packed, quantized_models.words(given, bits))
    assert torch.equal(codes.unpack(packed, bits), given)
