"""What a checkpoint's quantization_config means, and every refusal, by its text."""

import json
from pathlib import Path
from typing import Any

import pytest

from protos.errors import ConfigurationRefused
from tests.support.quantized_models import quantization_config
from worker_svc.quantized.checkpoint_config import CheckpointQuantization, read
from worker_svc.quantized.codes import Scheme

W4 = Scheme(4, 64)
GPTQ, AWQ = quantization_config("gptq", W4), quantization_config("awq", W4)
WAY = "choose another checkpoint, or make one with `triptych quantize`"
OTHER_METHODS = (
    "fp8", "fbgemm-fp8", "modelopt", "quark", "torchao", "auto-round", "bitsandbytes", "fp-quant", "hqq", "aqlm",
)  # fmt: skip


def _read(folder: Path, config: dict[str, Any] | None) -> CheckpointQuantization | None:
    written = {} if config is None else {"quantization_config": config}
    (folder / "config.json").write_text(json.dumps(written))
    return read(folder)


def _compressed(**weights: Any) -> dict[str, Any]:
    config = quantization_config("compressed-tensors", W4)
    config["config_groups"]["group_0"]["weights"] |= weights
    return config


def _grouped(**fields: Any) -> dict[str, Any]:
    config = _compressed()
    config["config_groups"]["group_0"] |= fields
    return config


@pytest.mark.parametrize("scheme", [Scheme(4, 32), W4, Scheme(4, 128), Scheme(4, None), Scheme(8, None)])
@pytest.mark.parametrize("stored", ["compressed-tensors", "gptq", "gptq_v2", "awq"])
def test_the_scheme_is_read(tmp_path: Path, stored: Any, scheme: Scheme) -> None:
    """Each format's bits and groups apply to linear layers, and not to the output head."""
    if stored == "awq" and scheme.bits == 8:
        pytest.skip("AWQ has 4 bits")
    found = _read(tmp_path, quantization_config(stored, scheme))
    assert found is not None
    assert found.scheme_of("model.layers.0.self_attn.q_proj") == scheme
    assert found.scheme_of("lm_head") is None


def test_models_that_do_not_stay_quantized(tmp_path: Path) -> None:
    assert _read(tmp_path, None) is None
    assert _read(tmp_path, {"quant_method": "mxfp4"}) is None


@pytest.mark.parametrize(
    ("config", "method"),
    [
        *(({"quant_method": method}, method) for method in OTHER_METHODS),
        ({"quant_method": "gptq_marlin"}, "gptq-marlin"),
        ({"producer": {"name": "modelopt"}}, "a method that config.json does not name"),
    ],
)
def test_other_methods_are_refused(tmp_path: Path, config: dict[str, Any], method: str) -> None:
    with pytest.raises(ConfigurationRefused) as refused:
        _read(tmp_path, config)
    assert refused.value.message == _by(method)


def test_other_places_of_a_configuration(tmp_path: Path) -> None:
    """The text model's configuration, `compression_config` and ModelOpt's own file count, too."""
    path = tmp_path / "config.json"
    path.write_text(
        json.dumps({"compression_config": _compressed() | {"quant_method": "compressed_tensors"}})
    )
    assert read(tmp_path) == _read(tmp_path, _compressed())
    path.write_text(json.dumps({"text_config": {"quantization_config": {"quant_method": "mxfp4"}}}))
    with pytest.raises(ConfigurationRefused) as refused:
        read(tmp_path)
    assert refused.value.message == _by("mxfp4")
    (tmp_path / "hf_quant_config.json").write_text("{}")
    with pytest.raises(ConfigurationRefused) as refused:
        _read(tmp_path, None)
    assert refused.value.message == _by("modelopt")


def _by(method: str) -> str:
    served = "compressed-tensors, gptq, awq, and mxfp4 of gpt-oss"
    return f"the checkpoint is quantized by {method} (served: {served}), which is not served; {WAY}"


def test_layers_by_name(tmp_path: Path) -> None:
    """A target that names a layer wins over "Linear", and ignored names win over both."""
    config = _compressed()
    config["config_groups"]["group_1"] = {
        "targets": ["lm_head", "re:.*down_proj"],
        "weights": {"num_bits": 8, "strategy": "channel"},
    }
    config["ignore"] = ["model.layers.0.mlp.down_proj", "re:.*layers[.]1[.].*"]
    found = _read(tmp_path, config)
    assert found is not None
    assert found.scheme_of("lm_head") == Scheme(8, None)
    assert found.scheme_of("model.layers.2.mlp.down_proj") == Scheme(8, None)
    assert found.scheme_of("model.layers.2.mlp.up_proj") == W4
    assert found.scheme_of("model.layers.0.mlp.down_proj") is None
    assert found.scheme_of("model.layers.1.mlp.up_proj") is None


def test_modules_that_awq_leaves_out(tmp_path: Path) -> None:
    config = quantization_config("awq", W4) | {"modules_to_not_convert": ["mlp.gate"]}
    found = _read(tmp_path, config)
    assert found is not None
    assert found.scheme_of("model.layers.2.mlp.gate") is None
    assert found.scheme_of("model.layers.2.mlp.up_proj") == W4


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (_compressed(symmetric=False), "symmetric is false"),
        (_compressed(num_bits=3), "weights of 3 bits"),
        (_compressed(type="float"), "weights of type float"),
        (_compressed(group_size=256), "groups of 256 inputs"),
        (_compressed(actorder="group"), "the order of activations"),
        (_compressed(strategy="block"), "a scale per block"),
        (_compressed() | {"format": "int-quantized"}, "the format int-quantized"),
        (_compressed() | {"kv_cache_scheme": {"num_bits": 8}}, "quantizes the KV cache"),
        (_compressed() | {"sparsity_config": {"format": "sparse-24"}}, "sparse weights"),
        (_compressed() | {"transform_config": {"config_groups": {}}}, "transforms activations"),
        (_compressed() | {"config_groups": {}}, "without weights"),
        (_grouped(input_activations={"num_bits": 8}), "quantizes activations"),
        (_grouped(targets=["Linear", "Embedding"]), "quantizes the embeddings"),
        (GPTQ | {"sym": False}, "sym is false"),
        (GPTQ | {"desc_act": True}, "desc_act"),
        (GPTQ | {"bits": 2}, "weights of 2 bits"),
        (GPTQ | {"dynamic": {"-:.*": {}}}, "dynamic"),
        (GPTQ | {"checkpoint_format": "bitblas"}, "GPTQ's format bitblas"),
        (AWQ | {"version": "gemv"}, "AWQ's format gemv"),
        (AWQ | {"bits": 8}, "AWQ weights of 8 bits"),
    ],
)
def test_refusals(tmp_path: Path, config: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigurationRefused, match=f"{reason}.*, which is not served; {WAY}"):
        _read(tmp_path, config)


def test_an_unreadable_configuration_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationRefused, match=r"cannot be read \(KeyError\('bits'\)\); fetch it again"):
        _read(tmp_path, {"quant_method": "gptq"})


def test_a_left_over_description_beside_an_absent_file_is_ignored(tmp_path: Path) -> None:
    """A link to nowhere is no quantized file; the check of tensors names it."""
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "quantize_config.json").write_text(json.dumps(GPTQ))
    (tmp_path / "model.safetensors").symlink_to(tmp_path / "gone")
    assert read(tmp_path) is None
