"""The tensors of every format become the same codes and scales, and refusals name the tensor."""

from pathlib import Path
from typing import get_args

import pytest
import torch
from safetensors.torch import load_file, save_file

from protos.errors import ConfigurationRefused
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
    """The codes and scales of each format are those of the dequantized weights; other tensors stay."""
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
    """Words are those that the formats define, and unpack to the same codes."""
    given = torch.randint(0, 2**bits, (5, 64), dtype=torch.uint8)
    packed = codes.pack(given, bits)
    assert torch.equal(packed, quantized_models.words(given, bits))
    assert torch.equal(codes.unpack(packed, bits), given)


MIDDLE = (
    "has zero points other than the middle of the range, which are not served; choose a symmetric checkpoint"
)
ORDER = (torch.arange(128) // 64).index_fill(0, torch.tensor([3]), 1)


@pytest.mark.parametrize(
    ("stored", "name", "change", "text"),
    [
        ("gptq", f"{LAYER}.qzeros", 16, MIDDLE), ("awq", f"{LAYER}.qzeros", 16, MIDDLE),
        ("gptq", f"{LAYER}.g_idx", ORDER, "orders groups by activations, which is not served; choose a checkpoint without g_idx"),
        ("compressed-tensors", f"{LAYER}.weight_zero_point", torch.ones(3), "has zero points, which are not served"),
        ("compressed-tensors", "lm_head.weight_packed", torch.zeros(3), "is quantized, but quantization_config does not name its"),
    ],
)  # fmt: skip
def test_zero_points_and_orders_are_refused(
    source: Path, stored: quantized_models.Stored, name: str, change: torch.Tensor | int, text: str
) -> None:
    """A single zero point off the middle, or one input in another group, is found."""
    quantization = read(quantized_models.write(source, source / "stored", stored, Scheme(4, 64)))
    assert quantization is not None
    stored_tensors = load_file(source / "stored" / "model.safetensors")
    if isinstance(change, int):
        tensor = stored_tensors[name]
        tensor[1, 2] += change
    else:
        tensor = change
    layers = StoredLayers(quantization)

    def check() -> None:
        for each in {**stored_tensors, name: tensor}.items():
            layers.take(*each)
        layers.finish()

    with pytest.raises(ConfigurationRefused) as refused:
        check()
    assert f"{name} {text}" in refused.value.message
