"""An adapter's configuration names the layers that PEFT adapts with it."""

from typing import Any

import pytest

from worker_svc.lora.targets import Targets, read_targets

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
