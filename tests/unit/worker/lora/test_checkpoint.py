"""What PEFT's checkpoints may contain: everything is read, or refused by name."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from protos.errors import InvalidArgument, NotFound, TriptychError
from worker_svc.lora.checkpoint import CONFIG, WEIGHTS, Targets, is_named_like, read_adapter, read_targets

PATH = "model.layers.0.self_attn.q_proj"
CONFIGURATION: dict[str, Any] = {
    "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 8, "bias": "none", "use_dora": False,
    "target_modules": ["q_proj"], "init_lora_weights": True, "modules_to_save": None, "rank_pattern": {},
}  # fmt: skip


def _tensors(path: str = PATH, rank: int = 4, suffix: str = ".weight") -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    key = f"base_model.model.{path}"
    return {
        f"{key}.lora_A{suffix}": torch.randn(rank, 6),
        f"{key}.lora_B{suffix}": torch.randn(10, rank),
    }


def _write(folder: Path, tensors: dict[str, torch.Tensor] | None = None, **changes: Any) -> Path:
    (folder / CONFIG).write_text(json.dumps({**CONFIGURATION, **changes}))
    save_file(_tensors() if tensors is None else tensors, folder / WEIGHTS)
    return folder


@pytest.mark.parametrize(
    ("changes", "scaling"),
    [
        ({}, 2.0),
        ({"use_rslora": True}, 8 / math.sqrt(4)),
        ({"alpha_pattern": {"layers.0.self_attn.q_proj": 3}}, 3 / 4),
        ({"alpha_pattern": {"k_proj": 3}}, 2.0),
        ({"r": 9, "rank_pattern": {r"^model.layers.0.self_attn\.q_proj": 4}}, 2.0),
    ],
)
def test_the_scaling_is_part_of_b(tmp_path: Path, changes: dict[str, Any], scaling: float) -> None:
    """Plain and rank-stabilized scaling and PEFT's patterns determine B."""
    read = read_adapter(_write(tmp_path, **changes), name="a", max_rank=4)
    a, b = read.matrices[PATH]
    expected = list(_tensors().values())
    assert torch.equal(a, expected[0])
    torch.testing.assert_close(b, expected[1] * scaling)
    assert read.rank == 4


def test_adapters_named_default_are_read(tmp_path: Path) -> None:
    """Some trainers keep PEFT's name of the adapter in the keys."""
    read = read_adapter(_write(tmp_path, _tensors(suffix=".default.weight")), name="a", max_rank=4)
    assert set(read.matrices) == {PATH}


def test_the_digest_follows_configuration_and_weights(tmp_path: Path) -> None:
    def digest(*args: Any, **changes: Any) -> str:
        return read_adapter(_write(tmp_path, *args, **changes), name="a", max_rank=8).digest

    first = digest()
    assert digest() == first
    assert digest(lora_alpha=9) != first
    assert digest({key: tensor + 1 for key, tensor in _tensors().items()}) != first


@pytest.mark.parametrize(
    ("base_model", "named_like"),
    [
        ("meta-llama/Llama-3.2-1B", True),
        ("mirror/llama-3.2-1b", True),
        ("/models/Llama-3.2-1B/", True),
        (r"C:\models\Llama-3.2-1B", True),
        ("", True),
        ("meta-llama/Llama-3.2-1B-Instruct", False),
        ("Llama-3.2-1B/checkpoint-500", False),
    ],
)
def test_names_of_base_models(base_model: str, named_like: bool) -> None:
    """The last component counts, without case; an adapter that names no base is not suspect."""
    assert is_named_like(base_model, ("/srv/current", "meta-llama/Llama-3.2-1B")) == named_like


@pytest.mark.parametrize(("value", "base_model"), [("org/base", "org/base"), (None, ""), (3, "")])
def test_the_base_model_is_kept(tmp_path: Path, value: object, base_model: str) -> None:
    folder = _write(tmp_path, base_model_name_or_path=value)
    assert read_adapter(folder, name="a", max_rank=4).base_model == base_model


def _no_config(folder: Path) -> None:
    (folder / CONFIG).unlink()


def _pickled(folder: Path) -> None:
    (folder / WEIGHTS).rename(folder / "adapter_model.bin")


def _damaged(folder: Path) -> None:
    data = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(data[:-5])


def _not_json(folder: Path) -> None:
    (folder / CONFIG).write_text("{")


def _a_list(folder: Path) -> None:
    (folder / CONFIG).write_text("[]")


@pytest.mark.parametrize(
    ("spoil", "error", "text"),
    [
        (_no_config, NotFound, "has no adapter_config.json"),
        (_pickled, InvalidArgument, r"pickled weights \(adapter_model.bin\), which may run code"),
        (_damaged, InvalidArgument, "adapter_model.safetensors cannot be read"),
        (_not_json, InvalidArgument, "adapter_config.json cannot be read"),
        (_a_list, InvalidArgument, "is not a JSON object"),
        (lambda folder: (folder / WEIGHTS).unlink(), NotFound, "has no adapter_model.safetensors"),
    ],
)
def test_damaged_folders(
    tmp_path: Path, spoil: Callable[[Path], None], error: type[TriptychError], text: str
) -> None:
    spoil(_write(tmp_path))
    with pytest.raises(error, match=f"adapter tuned.*{text}"):
        read_adapter(tmp_path, name="tuned", max_rank=8)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"peft_type": "IA3"}, "is of kind IA3, but only LORA is served"),
        ({"task_type": "SEQ_CLS"}, "is for SEQ_CLS"),
        ({"use_dora": True}, "uses DoRA"),
        ({"bias": "all"}, "uses trained biases"),
        ({"modules_to_save": ["lm_head"]}, "uses whole trained modules"),
        ({"trainable_token_indices": [3]}, "uses trained token embeddings"),
        ({"fan_in_fan_out": True}, "uses transposed weights"),
        ({"target_parameters": ["mlp.experts.gate_up_proj"]}, "as for experts"),
        (
            {"init_lora_weights": "pissa_niter_4"},
            "initialized by pissa_niter_4, which changes the base model",
        ),
        ({"r": 0}, "r in adapter_config.json is 0, not a positive number"),
        ({"lora_alpha": "8"}, "lora_alpha in adapter_config.json is '8'"),
        (
            {"rank_pattern": {"q_proj": "x"}},
            "rank_pattern in adapter_config.json is not an object of positive numbers",
        ),
        ({"alpha_pattern": {"(": 3}}, r"has '\('; only names of layers are served"),
        (
            {"alpha_pattern": {"q_proj": float("nan")}},
            "alpha_pattern in adapter_config.json is not an object of",
        ),
        (
            {"rank_pattern": {"q_proj": 0}},
            "rank_pattern in adapter_config.json is not an object of positive numbers",
        ),
        ({"lora_alpha": float("inf")}, "lora_alpha in adapter_config.json is inf"),
        ({"rank_pattern": {r"(\w+\w*)+!": 3}}, "only names of layers are served"),
        ({"r": 3}, f"{PATH} has rank 4 in adapter_model.safetensors, but 3 in adapter_config.json"),
    ],
)
def test_unserved_configurations(tmp_path: Path, changes: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidArgument, match=text):
        read_adapter(_write(tmp_path, **changes), name="tuned", max_rank=8)


@pytest.mark.parametrize(
    ("tensors", "text"),
    [
        (_tensors() | {"base_model.model.model.embed_tokens.lora_embedding_A": torch.ones(4, 6)}, "adapts the embedding"),
        (_tensors() | {"base_model.model.lm_head.weight": torch.ones(4, 6)}, "a tensor that is not served: base_model.model.lm_head.weight"),
        (_tensors() | {f"base_model.model.{PATH}.lora_magnitude_vector": torch.ones(4)}, "lora_magnitude_vector"),
        (dict(list(_tensors().items())[:1]), f"only one of the two matrices of {PATH}"),
        ({}, "has no weights in adapter_model.safetensors"),
        (_tensors() | _tensors(suffix=".default.weight"), f"has two matrices . of {PATH}"),
        ({key: tensor.to(torch.int8) for key, tensor in _tensors().items()}, "has the type I8, not a float's"),
        ({key: tensor[0] for key, tensor in _tensors().items()}, "not a matrix"),
        (_tensors() | {f"base_model.model.{PATH}.lora_B.weight": torch.ones(10, 5)}, "do not fit together"),
        (_tensors() | {f"base_model.model.{PATH}.lora_B.weight": torch.full((10, 4), torch.nan)}, "are not finite"),
        (_tensors() | {f"base_model.model.{PATH}.lora_B.weight": torch.full((10, 4), 3e38)}, "are not finite"),
        (_tensors(rank=9), "has rank 9, above --max-lora-rank 8"),
    ],
)  # fmt: skip
def test_unserved_tensors(tmp_path: Path, tensors: dict[str, torch.Tensor], text: str) -> None:
    rank = 9 if "rank 9" in text else 4
    with pytest.raises(InvalidArgument, match=text):
        read_adapter(_write(tmp_path, tensors, r=rank), name="tuned", max_rank=8)


Q0, Q1, V1 = (f"model.layers.{number}.self_attn.{name}" for number, name in ((0, "q_proj"), (1, "q_proj"), (1, "v_proj")))  # fmt: skip
PATHS = (Q0, Q1, V1, "model.layers.1.mlp.layers.0.up_proj", "lm_head", "q_proj")
CASES: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    ({"target_modules": ["q_proj", "query_key_value"]}, (Q0, Q1, "q_proj")),
    ({"target_modules": ["self_attn.q_proj", V1]}, (Q0, Q1, V1)),
    ({"target_modules": ["roj"]}, ()),
    ({"target_modules": ["q_proj", "v_proj"], "exclude_modules": ["layers.1.self_attn.q_proj"]}, (Q0, V1, "q_proj")),
    ({"target_modules": ["q_proj", "v_proj"], "layers_to_transform": [1]}, (Q1, V1, "q_proj")),
    ({"target_modules": ["q_proj", "v_proj"], "layers_to_transform": 0}, (Q0, "q_proj")),
    ({"target_modules": ["up_proj", V1], "layers_to_transform": [0]}, (V1,)),
    ({"target_modules": ["up_proj"], "layers_to_transform": [1]}, (PATHS[3],)),
    ({"target_modules": ["self_attn.q_proj"], "layers_to_transform": [1], "layers_pattern": "layers"}, (Q1,)),
    ({"target_modules": ["self_attn.q_proj"], "layers_to_transform": [1], "layers_pattern": ["h", "layers"]}, (Q1,)),
    ({"target_modules": ["self_attn.q_proj"], "layers_to_transform": [1], "layers_pattern": ["h"]}, ()),
]  # fmt: skip
"""Configurations, and the paths among `PATHS` that they name."""


@pytest.mark.parametrize(("config", "named"), CASES)
def test_names_of_layers(config: dict[str, Any], named: tuple[str, ...]) -> None:
    """Names are whole paths or their ends; numbers and exclusions narrow them down."""
    targets = read_targets(config)
    assert isinstance(targets, Targets)
    assert tuple(path for path in PATHS if targets.include(path)) == named


@pytest.mark.parametrize(
    "config",
    [
        {"target_modules": r".*\.q_proj"},
        {"target_modules": None},
        {"target_modules": ["q_proj"], "exclude_modules": r".*\.1\..*"},
        {"target_modules": ["q_proj"], "layers_to_transform": [1], "layers_pattern": [r"(\w+)+"]},
        {"target_modules": ["q_proj"], "layers_to_transform": "1"},
    ],
)
def test_expressions_are_not_evaluated(config: dict[str, Any]) -> None:
    """Nothing is known of their layers, because matching may take for ever."""
    assert read_targets(config) is None
