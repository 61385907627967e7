"""A checkpoint that does not fit its configuration is refused before the model is built, by name."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from protos.errors import ConfigurationRefused
from tests.support import tiny_models
from tests.support.zoo import families
from worker_svc.devices import open_device
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


def test_a_head_needs_its_bias(tmp_path: Path) -> None:
    """Where vLLM runs the model of transformers, the bias is named, too."""
    source = write("phi", tmp_path / "whole")
    text = refusal(changed(source, tmp_path / "model", without("lm_head.bias")))
    assert "the weights lack lm_head.bias" in text


def test_ranks_compare_the_whole_checkpoint(llama: Path, tmp_path: Path) -> None:
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


def test_a_loader_that_does_not_fit_its_own_model_is_refused_by_name(tmp_path: Path) -> None:
    """Dbrx is refused, because vLLM's loader looks for parameters that its layers no longer have."""
    from transformers import DbrxConfig

    config = DbrxConfig(
        d_model=64, n_heads=2, n_layers=2, max_seq_len=512, vocab_size=256,
        attn_config={"kv_n_heads": 1, "clip_qkv": 8.0, "rope_theta": 5e5},
        ffn_config={"ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2, "ffn_act_fn": {"name": "silu"}},
    )  # fmt: skip
    assert "cannot load DbrxForCausalLM" in refusal(tiny_models.save_model(config, tmp_path))
