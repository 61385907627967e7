"""Calibration, its text, and matrices quantized with a Hessian."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from protos.errors import ConfigurationRefused
from tests.support import tiny_models
from worker_svc.quantized.calibration import Calibrated, calibrate, own_text, quantize_with, text_of
from worker_svc.quantized.codes import Scheme, dequantize, quantize

pytestmark = pytest.mark.filterwarnings("ignore")  # importing transformers

SCHEME = Scheme(4, 32)
QUERY = "model.layers.1.self_attn.q_proj"


def _silent(*_: object) -> None:
    pass


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama in float32, with a tokenizer that has a token for each word."""
    folder = tiny_models.write("llama", tmp_path_factory.mktemp("calibration") / "llama")
    tiny_models.write_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def model(source: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(source).eval().requires_grad_(False)


@pytest.fixture(scope="module")
def modules(model: Any) -> dict[str, int]:
    return {name: each.in_features for name, each in model.named_modules() if name.endswith("_proj")}


@pytest.fixture(scope="module")
def calibrated(source: Path, modules: dict[str, int]) -> Calibrated:
    return calibrate(source, modules, SCHEME, None, 1024, _silent)


def _divergence(model: Any, weights: dict[str, torch.Tensor], ids: torch.Tensor) -> float:
    """Returns how far other weights move the distribution of the next token, in nats a token."""
    expected = model(ids).logits.log_softmax(-1)
    modules = dict(model.named_modules())
    saved = {name: modules[name].weight.data for name in weights}
    for name, weight in weights.items():
        modules[name].weight.data = weight
    found = model(ids).logits.log_softmax(-1)
    for name, weight in saved.items():
        modules[name].weight.data = weight
    return float((expected.exp() * (expected - found)).sum(-1).mean())


def test_calibration_keeps_more_than_rounding(
    model: Any, calibrated: Calibrated, modules: dict[str, int]
) -> None:
    """On text that calibration did not read, the next token's distribution moves less than with rounding."""
    assert calibrated.keys() == modules.keys()
    weights = {name: dequantize(*made, 4) for name, made in calibrated.items()}
    named = dict(model.named_modules())
    rounded = {name: dequantize(*quantize(named[name].weight, SCHEME), 4) for name in modules}
    ids = own_text(model, 512, 128, _silent)[:, 1:]
    assert _divergence(model, weights, ids) < 0.8 * _divergence(model, rounded, ids)


def test_a_model_in_float16(
    model: Any, source: Path, modules: dict[str, int], calibrated: Calibrated, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text((source / "config.json").read_text().replace("float32", "float16"))
    halves = {name: each.half() for name, each in load_file(source / "model.safetensors").items()}
    save_file(halves, tmp_path / "model.safetensors", metadata={"format": "pt"})
    made = calibrate(tmp_path, modules, SCHEME, None, 1024, _silent)
    assert {scales.dtype for _, scales in made.values()} == {torch.float16}
    named = dict(model.named_modules())
    for name, found in made.items():
        weight = named[name].weight
        error, least = (
            (dequantize(*each, 4) - weight).norm() / weight.norm() for each in (found, calibrated[name])
        )
        assert error < 1.05 * least


def test_a_module_that_is_no_linear_layer_is_left_out(source: Path, modules: dict[str, int]) -> None:
    """Names that transformers does not know, or with other shapes, are not calibrated; the rest is."""
    wanted = {QUERY: modules[QUERY], "model.layers.9.mlp.up_proj": 64, "model.layers.0.mlp.up_proj": 1}
    assert calibrate(source, wanted, SCHEME, None, 64, _silent).keys() == {QUERY}


def test_own_text(model: Any) -> None:
    """The model's text begins with its first token, has whole rows, is likely and the same each time."""
    ids = own_text(model, 1000, 100, _silent)
    assert ids.shape == (10, 100)
    assert torch.equal(ids, own_text(model, 1000, 100, _silent))
    assert set(ids[:, 0].tolist()) == {model.config.bos_token_id}
    assert len(set(ids[:, 1].tolist())) > 5
    assert not set(ids[:, 2:].flatten().tolist()) & {model.config.eos_token_id}
    shuffled = ids[:, torch.randperm(100, generator=torch.Generator().manual_seed(0))]
    assert _perplexity(model, ids) < 0.8 * _perplexity(model, shuffled)


def _perplexity(model: Any, ids: torch.Tensor) -> float:
    logits = model(ids[:, :-1]).logits
    return math.exp(float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(" ".join(f"w{n}" for n in range(100)))
    return path


def test_text_of_a_file(source: Path, file: Path) -> None:
    """Rows are whole and spread over the file; a short file gives fewer tokens than wanted."""
    assert text_of(file, source, 1000, 40).tolist() == [[*range(2, 42)], [*range(42, 82)]]
    spread = text_of(file, source, 30, 10)
    assert spread[:, 0].tolist() == [2, 32, 62]


def test_refusals(source: Path, file: Path, tmp_path: Path) -> None:
    def refusal(folder: Path, text: Path | None = None) -> str:
        with pytest.raises(ConfigurationRefused) as refused:
            calibrate(folder, {QUERY: 64}, SCHEME, text, 64, _silent)
        assert "\n" not in refused.value.message
        return refused.value.message

    file.write_text("w1 w2")
    assert f"{file} has 2 tokens, and calibration needs at least 256" in refusal(source, file)
    file.write_bytes(b"\xff")
    assert refusal(source, file).startswith(f"cannot read the calibration text {file}: 'utf-8' codec")
    changed = tmp_path / "changed"
    changed.mkdir()
    config = json.loads((source / "config.json").read_text())
    (changed / "config.json").write_text(json.dumps(config | {"architectures": ["LlamaModel"]}))
    assert f"{changed} has the architecture LlamaModel" in refusal(changed)
    (changed / "config.json").write_text(json.dumps(config | {"model_type": "of-tomorrow"}))
    assert refusal(changed).startswith(f"transformers cannot run {changed}, so it cannot be calibrated: ")
    (changed / "config.json").write_text(json.dumps(config))
    tensors = load_file(source / "model.safetensors")
    tensors.pop(f"{QUERY}.weight")
    save_file(tensors, changed / "model.safetensors", metadata={"format": "pt"})
    assert refusal(changed) == f"{changed} has no {QUERY}.weight; fetch the model again"


SCHEMES = (Scheme(4, 32), Scheme(4, None), Scheme(8, 64))


def _case(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns a matrix and the Hessian of inputs of which some are alike and some are large."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(24, 128, generator=generator).bfloat16()
    x = torch.randn(400, 128, generator=generator) @ torch.randn(128, 128, generator=generator)
    x *= torch.rand(128, generator=generator) * 3
    return weight, x.t() @ x


def _cost(
    weight: torch.Tensor, made: tuple[torch.Tensor, torch.Tensor], hessian: torch.Tensor, bits: int
) -> float:
    error = dequantize(*made, bits) - weight.float()
    return float(((error @ hessian) * error).sum())


@pytest.mark.parametrize("unused", [0, 40])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_cost_is_less_than_that_of_rounding(scheme: Scheme, unused: int) -> None:
    """By the Hessian, errors cost much less than with rounding, also if some inputs were always zero."""
    weight, hessian = _case()
    hessian[:unused], hessian[:, :unused] = 0, 0
    made = quantize_with(weight, hessian, scheme)
    assert made is not None
    rounded = quantize(weight, scheme)
    assert _cost(weight, made, hessian, scheme.bits) < 0.6 * _cost(weight, rounded, hessian, scheme.bits)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_result_is_like_that_of_rounding(scheme: Scheme) -> None:
    """Groups keep their place: weights stay near, although the largest inputs are rounded first."""
    weight, hessian = _case()
    made = quantize_with(weight, hessian, scheme)
    assert made is not None
    codes, scales = made
    assert codes.dtype == torch.uint8
    assert codes.shape == weight.shape
    assert int(codes.max()) < 2**scheme.bits
    assert scales.dtype == weight.dtype
    assert scales.shape == (24, scheme.groups(128))
    widest = weight.float().view(24, scales.shape[1], -1).abs().amax(-1) / (2 ** (scheme.bits - 1) - 0.5)
    # From half the scale that just holds the largest weight, to that one; fits may move it a little.
    assert bool((scales.float().abs() < 1.2 * widest).all())
    assert bool((scales.float().abs() > 0.4 * widest).all())
    again = quantize_with(weight, hessian, scheme)
    assert again is not None
    assert all(map(torch.equal, made, again))
    error = dequantize(codes, scales, scheme.bits) - weight.float()
    assert error.norm() < (0.25 if scheme.bits == 4 else 0.02) * weight.float().norm()


def test_independent_inputs_are_rounded_to_the_nearest_code() -> None:
    weight, _ = _case()
    made = quantize_with(weight, torch.diag(torch.rand(128)), Scheme(4, 32))
    assert made is not None
    codes, scales = made
    steps = scales.float().repeat_interleave(32, dim=1)
    assert torch.equal(codes.float() - 8, torch.round(weight.float() / steps).clamp(-8, 7))


def test_the_long_side_of_the_codes_is_where_the_largest_weight_is() -> None:
    """Codes reach from -8 to 7, so a group whose largest weight is positive gets a negative scale."""
    weight = torch.linspace(-1, 1, 32)[None].repeat(2, 1)
    weight[0, -1], weight[1, 0] = 8 / 7, -8 / 7
    made = quantize_with(weight, torch.eye(32), Scheme(4, 32))
    assert made is not None
    assert torch.sign(made[1]).flatten().tolist() == [-1, 1]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_groups_of_zeros_stay_zero(dtype: torch.dtype) -> None:
    """Their scales are finite and not zero, in types that cannot hold the smallest scale, too."""
    _, hessian = _case()
    weight = torch.zeros(3, 128, dtype=dtype)
    made = quantize_with(weight, hessian, Scheme(4, 32))
    assert made is not None
    assert bool((made[1].isfinite() & (made[1] != 0)).all())
    assert float(dequantize(*made, 4).abs().max()) == 0


@pytest.mark.parametrize("hessian", [torch.zeros(128, 128), torch.full((128, 128), torch.nan)])
def test_a_hessian_that_says_nothing(hessian: torch.Tensor) -> None:
    assert quantize_with(_case()[0], hessian, Scheme(4, 32)) is None
