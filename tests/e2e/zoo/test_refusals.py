"""What is not served is refused in one line that names the architecture, before anything is built."""

import json
from pathlib import Path
from typing import Any

import pytest

from protos.errors import ConfigurationRefused
from tests.support.zoo import families
from worker_svc.devices import open_device
from worker_svc.vllm_adapter import startup
from worker_svc.vllm_adapter.configuration import TEXT_MODELS
from worker_svc.vllm_adapter.model import VllmModel

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.filterwarnings("ignore"),  # importing vLLM
]


def refusal(folder: Path, config: dict[str, Any], **options: Any) -> str:
    """Returns the line with which the worker refuses a model that has this config.json."""
    (folder / "config.json").write_text(json.dumps(config))
    startup.prepare("cpu")
    with pytest.raises(ConfigurationRefused) as refused:
        VllmModel(folder, open_device("cpu"), dtype="float32", seed=0, **options)
    assert "\n" not in str(refused.value)
    return str(refused.value)


@pytest.mark.parametrize("architecture", families.REFUSED)
def test_an_architecture_is_refused_by_name(architecture: str, tmp_path: Path) -> None:
    config, reason = families.REFUSED[architecture]
    line = refusal(tmp_path, {"architectures": [architecture], **config})
    assert architecture.split(maxsplit=1)[0] in line
    assert reason in line


@pytest.mark.parametrize("architecture", TEXT_MODELS)
def test_a_multimodal_model_needs_the_flag(architecture: str, tmp_path: Path) -> None:
    line = refusal(tmp_path, {"architectures": [architecture], "text_config": {}})
    assert line.startswith(f"{architecture} is multimodal")
    assert "pass --language-model-only" in line
