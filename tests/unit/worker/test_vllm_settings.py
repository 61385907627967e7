"""The sampling parameters that requests have if they omit them."""

import json
from pathlib import Path
from typing import Any

import pytest

from protos.errors import ConfigurationRefused
from protos.service.settings import load
from worker_svc.api import convert
from worker_svc.settings import Settings
from worker_svc.vllm_settings import default_sampling, recommended

_MODEL = {"temperature": 0.6, "top_k": 20}


def test_recommendations_have_our_names() -> None:
    """Whatever else a generation_config.json has, only sampling parameters count."""
    config = {"temperature": 0.6, "top_p": None, "max_new_tokens": 5, "do_sample": True, "eos_token_id": [1]}
    assert recommended(config) == {"temperature": 0.6, "max_tokens": 5}
    assert convert._default_sampling(recommended(config)).max_tokens == 5


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ([], _MODEL),
        (["--generation-config", "vllm"], {}),
        (["--generation-config", "FOLDER"], {"top_p": 0.9}),
        (
            ["--override-generation-config", '{"top_k": 5, "max_new_tokens": 9}'],
            {**_MODEL, "top_k": 5, "max_tokens": 9},
        ),
        (["--generation-config=vllm", '--override-generation-config={"min_p": 0.1}'], {"min_p": 0.1}),
        (["--override-generation-config", '{"attn_temperature_tuning": true}'], _MODEL),
    ],
)
def test_where_defaults_come_from(flags: list[str], expected: dict[str, float], tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({"top_p": 0.9, "do_sample": True}))
    settings = load(Settings, ["--model", "m", *(flag.replace("FOLDER", str(tmp_path)) for flag in flags)])
    chosen = default_sampling(_MODEL, settings.generation_config, settings.override_generation_config)
    assert chosen == expected


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"temperature": "hot"}, "should have a number for temperature"),
        ({"temperature": -1}, "has temperature out of its bounds"),
        ({"top_p": 0}, "has top_p out of its bounds"),
        ({"max_new_tokens": 0}, "has max_new_tokens out of its bounds"),
        ([1], "should be a valid dictionary"),
    ],
)
def test_bad_overrides_are_refused(overrides: Any, message: str) -> None:
    """In one line that names the parameter; a top_k of -1 is off, as in vLLM."""
    load(Settings, ["--model", "m", "--override-generation-config", '{"top_k": -1}'])
    with pytest.raises(ConfigurationRefused, match=f"--override-generation-config .*{message}"):
        load(Settings, ["--model", "m", "--override-generation-config", json.dumps(overrides)])


def test_a_folder_without_the_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationRefused, match=r"generation_config\.json cannot be read"):
        default_sampling({}, str(tmp_path), {})
