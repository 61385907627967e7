"""Multimodal checkpoints serve text with --language-model-only, as transformers does without an image."""

import json
from pathlib import Path

import pytest
import torch

from tests.support import tiny_models
from tests.support.reference import Reference
from tests.support.worker import parity_process
from tests.support.worker.harness import load
from tests.support.worker.parity_process import Job, differences
from tests.support.zoo import families
from worker_svc.model_files.checkpoint import Checkpoint
from worker_svc.settings import Backend
from worker_svc.vllm_adapter.configuration import text_weight

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore"),  # importing vLLM and transformers
]

BACKENDS: tuple[Backend, ...] = ("eager", "compiled")
QUICK = ("gemma3-vision",)


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(family, marks=[] if family in QUICK else [pytest.mark.slow])
        for family in families.MULTIMODAL
    ],
)
def test_text_is_served(family: str, tmp_path: Path) -> None:
    """Eager steps and graphs give the reference's outputs, and only the text model's weights are loaded."""
    folder = families.write(family, tmp_path)
    reference = Reference(folder, torch.float32)
    # The last ids of the vocabulary stand for images.
    prompts = parity_process.random_prompts(tiny_models.VOCAB_SIZE - 6)
    for backend in BACKENDS:
        job = Job(str(folder), prompts, backend=backend, language_model_only=True)
        assert differences(reference, prompts, parity_process.run(job)) == []
    model = load(folder, "float32", language_model_only=True)
    checkpoint = Checkpoint.open(folder)
    tensors = {name: each for shard in checkpoint.shards for name, each in shard.tensors.items()}
    text_bytes = sum(each.num_bytes for name, each in tensors.items() if text_weight(name))
    assert text_bytes < checkpoint.num_bytes()
    # Beside the weights there is a table of rotary embeddings, two for Gemma 3.
    table = 4 * 32 * tiny_models.CONTEXT
    assert (model.size.weight_bytes - text_bytes) // table == (2 if family == "gemma3-vision" else 1)


@pytest.mark.slow
def test_a_flat_configuration_is_served(tmp_path: Path) -> None:
    """Published Qwen2-VL folders have the text model's settings beside the others, in older words."""
    folder = families.write("qwen2-vl", tmp_path)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    text = config.pop("text_config")
    rope = text.pop("rope_parameters")
    older = {
        "torch_dtype": config.pop("dtype"),
        "rope_theta": rope["rope_theta"],
        "rope_scaling": {"type": "mrope", "mrope_section": rope["mrope_section"]},
    }
    for name in ("model_type", "layer_types", "dtype"):
        del text[name]
    path.write_text(json.dumps(text | config | older))
    reference = Reference(folder, torch.float32)
    prompts = [list(range(3, 3 + length)) for length in (3, 64, 130)]
    job = Job(str(folder), prompts, language_model_only=True)
    assert differences(reference, prompts, parity_process.run(job)) == []


@pytest.mark.slow
def test_gemmas_older_configuration_is_served(tmp_path: Path) -> None:
    """Gemma 3's published folders describe windows and rotary positions in older words."""
    folder = families.write("gemma3-vision", tmp_path)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    text = config["text_config"]
    config["torch_dtype"] = config.pop("dtype")
    for name in ("layer_types", "rope_parameters", "dtype"):
        text.pop(name, None)
    text |= {
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window_pattern": 2,
    }
    path.write_text(json.dumps(config))
    reference = Reference(folder, torch.float32)
    prompts = [list(range(3, 3 + length)) for length in (3, 64, 130)]
    answers = parity_process.run(Job(str(folder), prompts, language_model_only=True))
    assert differences(reference, prompts, answers) == []
    config["text_config"] |= {"rope_scaling": None}
    path.write_text(json.dumps(config))
    # The reference applied the factor, too.
    assert differences(Reference(folder, torch.float32), prompts, answers) != []


def test_names_of_weights_in_older_and_newer_checkpoints() -> None:
    """Both ways to name a text model's weights become its own names; other parts are left out."""
    expected = "model.layers.0.mlp.up_proj.weight"
    for name in (
        "language_model.model.layers.0.mlp.up_proj.weight",
        "model.language_model.layers.0.mlp.up_proj.weight",
        expected,
    ):
        assert text_weight(name) == expected
    assert text_weight("language_model.lm_head.weight") == text_weight("lm_head.weight") == "lm_head.weight"
    for part in ("vision_tower.x", "model.vision_tower.x", "visual.x", "model.multi_modal_projector.x"):
        assert text_weight(part) is None
