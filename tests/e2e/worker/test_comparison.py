"""A checkpoint that does not fit its configuration is refused before the model is built, by name."""

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from protos.errors import ConfigurationRefused
from tests.support import quantized_models, tiny_models
from tests.support.zoo import families
from worker_svc.devices import open_device
from worker_svc.quantized.codes import Scheme
from worker_svc.ranks.layout import RankLayout
from worker_svc.vllm_adapter import startup
from worker_svc.vllm_adapter.model import VllmModel

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore"),  # importing vLLM and transformers
]

Tensors = dict[str, torch.Tensor]
SLOW = ("gemma3", "phi3", "qwen2-moe", "mixtral", "granite-moe", "deepseek-v2", "bloom")


def open_model(folder: Path, layout: RankLayout | None = None) -> VllmModel:
    device = open_device("cpu")
    torch.set_num_threads(1)
    startup.prepare(device.name)
    return VllmModel(folder, device, dtype="float32", seed=0, layout=layout)


def write(family: str, folder: Path) -> Path:
    module: Any = tiny_models if family in tiny_models.FAMILIES else families
    return Path(module.write(family, folder))


def changed(
    source: Path,
    folder: Path,
    change: Callable[[Tensors], Tensors] = dict,
    **config: Any,
) -> Path:
    """Copies a model with other tensors and fields of config.json."""
    shutil.copytree(source, folder, dirs_exist_ok=True)
    save_file(change(load_file(source / "model.safetensors")), folder / "model.safetensors")
    fields = json.loads((source / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**fields, **config}))
    return folder


def without(*names: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {name: tensor for name, tensor in tensors.items() if not name.startswith(names)}


def with_tensors(**changes: torch.Tensor) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {**tensors, **changes}


def refusal(folder: Path, layout: RankLayout | None = None) -> str:
    with pytest.raises(ConfigurationRefused) as caught:
        open_model(folder, layout)
    assert "\n" not in caught.value.message
    return caught.value.message


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.write("llama", tmp_path_factory.mktemp("llama"))


@pytest.mark.parametrize(
    "family", ["llama", *(pytest.param(family, marks=pytest.mark.slow) for family in SLOW)]
)
def test_every_tensor_is_needed_in_its_shape(family: str, tmp_path: Path) -> None:
    """Without a tensor, or with one that is a row longer or shorter, the model is refused by the name."""
    source = write(family, tmp_path / "whole")
    tensors = load_file(source / "model.safetensors")
    open_model(source)
    tied = (
        {"lm_head.weight"}
        if json.loads((source / "config.json").read_text())["tie_word_embeddings"]
        else set()
    )
    kinds = {name.replace(".1.", ".0."): name for name in tensors}.values()
    for number, name in enumerate(kinds):
        if name in tied:
            continue
        text = refusal(changed(source, tmp_path / f"{number}-missing", without(name)))
        assert "the weights lack" in text
        assert name.rsplit(".", 2)[-2] in text or "experts" in text or name.endswith("bias"), (name, text)
        for rows in (-1, 1):
            resized = torch.zeros(tensors[name].shape[0] + rows, *tensors[name].shape[1:])
            text = refusal(changed(source, tmp_path / f"{number}-{rows}", with_tensors(**{name: resized})))
            # Where vLLM splits a tensor of all experts, the parameter is named.
            assert f"tensor {name} is {list(resized.shape)} in the file" in text or "experts" in text
        shutil.rmtree(tmp_path / f"{number}-missing")


@pytest.mark.parametrize(
    ("config", "parts"),
    [
        ({"intermediate_size": 96}, ("mlp.down_proj.weight is [64, 128]", "[64, 96]")),
        ({"intermediate_size": 160}, ("mlp.down_proj.weight is [64, 128]", "[64, 160]")),
        ({"vocab_size": 250}, ("lm_head.weight is [256, 64]", "[250, 64]")),
        ({"vocab_size": 300}, ("lm_head.weight is [256, 64]", "[300, 64]")),
        ({"num_key_value_heads": 1}, ("self_attn.k_proj.weight is [64, 64]", "[32, 64]")),
        ({"num_key_value_heads": 4}, ("self_attn.k_proj.weight is [64, 64]", "[128, 64]")),
        ({"num_attention_heads": 8}, ("self_attn.o_proj.weight is [64, 128]", "[64, 256]")),
        ({"hidden_size": 128}, ("lm_head.weight is [256, 64]", "[256, 128]")),
        ({"head_dim": 16}, ("self_attn.k_proj.weight is [64, 64]", "[32, 64]")),
        ({"num_hidden_layers": 1}, ("layers that config.json does not describe", "model.layers.1.")),
        ({"num_hidden_layers": 3}, ("the weights lack", "model.layers.2.self_attn.q_proj.weight")),
        ({"attention_bias": True}, ("the weights lack")),
    ],
)  # fmt: skip
def test_a_contradicting_configuration_is_refused(
    llama: Path, tmp_path: Path, config: Mapping[str, Any], parts: tuple[str, str]
) -> None:
    """The refusal has the tensor and both shapes, or the missing tensor."""
    text = refusal(changed(llama, tmp_path / "model", **config))
    assert all(part in text for part in parts), text


@pytest.mark.parametrize(
    ("config", "part"),
    [
        ({"num_attention_heads": 3}, "(64) is not a multiple of the number of attention heads (3)"),
        ({"num_key_value_heads": 3}, "num_heads (4) is not divisible by num_kv_heads (3)"),
        ({"num_key_value_heads": 0}, "config.json has a value that vLLM does not take"),
        ({"vocab_size": "256"}, "Field 'vocab_size' expected int, got str"),
        ({"intermediate_size": None}, "Field 'intermediate_size' expected int, got NoneType"),
        ({"max_position_embeddings": 0}, "max_model_len must be a positive integer"),
    ],
)
def test_an_impossible_configuration_is_refused(
    llama: Path, tmp_path: Path, config: Mapping[str, Any], part: str
) -> None:
    """Head counts that do not divide, zeros and values of another type, each in one line."""
    text = refusal(changed(llama, tmp_path / "model", **config))
    assert text.startswith(f"cannot serve {tmp_path / 'model'}: ")
    assert part in text


@pytest.mark.parametrize("dtype", [torch.int8, torch.int64, torch.bool])
def test_integers_are_no_weights(llama: Path, tmp_path: Path, dtype: torch.dtype) -> None:
    """Codes without their quantization would be read as numbers; other floating-point types are converted."""
    name = "model.layers.1.mlp.down_proj.weight"

    def as_type(kind: torch.dtype) -> Callable[[Tensors], Tensors]:
        return lambda tensors: {**tensors, name: tensors[name].to(kind)}

    kind = str(dtype).removeprefix("torch.")
    assert f"tensor {name} holds {kind}" in refusal(changed(llama, tmp_path / "integers", as_type(dtype)))
    open_model(changed(llama, tmp_path / "floats", as_type(torch.float64)))


def test_a_head_needs_its_bias(tmp_path: Path) -> None:
    """Where vLLM runs the model of transformers, the bias is named, too."""
    source = write("phi", tmp_path / "whole")
    text = refusal(changed(source, tmp_path / "model", without("lm_head.bias")))
    assert "the weights lack lm_head.bias" in text


@pytest.mark.parametrize("stored", ["compressed-tensors", "gptq", "awq"])
def test_quantized_layers_are_compared(llama: Path, tmp_path: Path, stored: quantized_models.Stored) -> None:
    """All tensors of a layer, codes, scales, or codes of another width: each is refused by name."""
    source = quantized_models.write(llama, tmp_path / "whole", stored, Scheme(4, 32))
    open_model(source)
    layer = "model.layers.1.mlp.down_proj"
    codes = "weight_packed" if stored == "compressed-tensors" else "qweight"
    scales = "weight_scale" if stored == "compressed-tensors" else "scales"
    for number, names in enumerate(((f"{layer}.",), (f"{layer}.{codes}",), (f"{layer}.{scales}",))):
        assert layer in refusal(changed(source, tmp_path / f"missing-{number}", without(*names)))

    def twice(tensors: Tensors) -> Tensors:
        return {**tensors, f"{layer}.{codes}": tensors[f"{layer}.{codes}"].repeat(1, 2)}

    assert layer in refusal(changed(source, tmp_path / "twice", twice))


def test_ranks_compare_the_whole_checkpoint(llama: Path, tmp_path: Path) -> None:
    """A rank refuses tensors that only other ranks would read."""
    folder = changed(llama, tmp_path / "model", without("model.layers.1.mlp.down_proj.weight"))
    for layout in (RankLayout(1, tensor=2), RankLayout(0, pipeline=2)):
        assert "the weights lack model.layers.1.mlp.down_proj.weight" in refusal(folder, layout)


def test_extra_weights_are_ignored(llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Unknown modules, tensors and files change nothing; one log line names them."""
    names = (
        "value_head.weight",
        "value_head.bias",
        "scale",
        "model.layers.1.memory",
        "model.rotary_emb.inv_freq",
    )
    extra = dict.fromkeys(names, torch.ones(2, 2))
    folder = changed(
        llama, tmp_path / "model", lambda tensors: {**tensors, **{n: t.clone() for n, t in extra.items()}}
    )
    (folder / "adapter_model.safetensors").write_bytes(b"")
    open_model(folder).load_weights()
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "extra_weights_ignored" in line]
    assert all(
        name in line for name in ("adapter_model.safetensors", "'scale'", "value_head.bias", "num_tensors=")
    )


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.self_attn.o_proj.weight_scale", "model.layers.0.self_attn.o_proj.weight.absmax",
        "model.layers.0.self_attn.q_norm.weight", "lm_head.weight_scale",
        "model.layers.0.self_attn.q_proj.lora_A.weight",
    ],
)  # fmt: skip
def test_unknown_tensors_of_known_layers_are_refused(llama: Path, tmp_path: Path, name: str) -> None:
    """Scales, norms and biases change what a layer computes."""
    folder = changed(llama, tmp_path / "model", lambda tensors: {**tensors, name: torch.ones(2)})
    assert name in refusal(folder)


def test_renamed_weights_are_refused(llama: Path, tmp_path: Path) -> None:
    """Unknown tensors are named where others are missing."""
    folder = changed(
        llama, tmp_path / "model",
        lambda tensors: {name.replace("self_attn", "attention"): tensor for name, tensor in tensors.items()},
    )  # fmt: skip
    text = refusal(folder)
    assert "the weights lack model.layers.0.self_attn.q_proj.weight" in text
    assert "but unknown model.layers.0.attention" in text


def test_a_loader_that_does_not_fit_its_own_model_is_refused_by_name(tmp_path: Path) -> None:
    """Dbrx is refused, because vLLM's loader looks for parameters that its layers no longer have."""
    from transformers import DbrxConfig

    config = DbrxConfig(
        d_model=64, n_heads=2, n_layers=2, max_seq_len=512, vocab_size=256,
        attn_config={"kv_n_heads": 1, "clip_qkv": 8.0, "rope_theta": 5e5},
        ffn_config={"ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2, "ffn_act_fn": {"name": "silu"}},
    )  # fmt: skip
    assert "cannot load DbrxForCausalLM" in refusal(tiny_models.save_model(config, tmp_path))
