"""Quantized weights on NPUs: the vendor's form and its constraints."""

import os

import pytest
import torch

from protos.errors import ConfigurationRefused
from worker_svc.devices.quantized import PlainQuantizedLinear, QuantizedWeights
from worker_svc.devices.rbln.device import BITS_VARIABLE, NpuProducts


@pytest.mark.parametrize(
    ("inputs", "groups", "expected"), [(256, 2, 4), (256, 4, 4), (256, 1, 1), (128, 1, 1)]
)
def test_a_group_of_128_is_two_of_64(inputs: int, groups: int, expected: int) -> None:
    torch.manual_seed(0)
    codes = torch.randint(0, 16, (5, inputs), dtype=torch.uint8)
    weights = QuantizedWeights(codes, torch.rand(5, groups), 4)
    layer = NpuProducts().layer(weights, torch.float32, wide=False)
    assert isinstance(layer, PlainQuantizedLinear)
    assert layer.scales.shape == (5, expected)
    assert layer.codes.dtype == torch.int8
    x = torch.randn(3, inputs)
    plain = PlainQuantizedLinear(weights, torch.float32)
    torch.testing.assert_close(layer(x, None), plain(x, None))
    stored = sum(parameter.nbytes for parameter in layer.parameters())
    assert stored == NpuProducts().num_bytes(5, inputs, groups, 4, torch.float32)


def test_the_compiler_is_told_the_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(BITS_VARIABLE, "none")
    NpuProducts().check({4}, {64, 128})
    assert os.environ[BITS_VARIABLE] == "4"


def test_what_the_compiler_does_not_take_is_refused() -> None:
    with pytest.raises(ConfigurationRefused) as refused:
        NpuProducts().check({8, 4}, {64, None})
    assert refused.value.message == (
        "an NPU takes weights of one size, and the checkpoint has 4 and 8 bits;"
        " choose another checkpoint, or use `triptych quantize --lm-head keep`"
    )
    with pytest.raises(ConfigurationRefused) as refused:
        NpuProducts().check({4}, {32})
    assert refused.value.message == (
        "an NPU takes groups of 64 or 128 inputs or a scale per output channel, and the checkpoint has groups of"
        " 32; choose another checkpoint"
    )
