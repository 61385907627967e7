"""gpt-oss with experts in MXFP4, as its authors publish it."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.reference import Reference
from tests.support.worker import parity_process
from tests.support.worker.parity_process import Job, differences
from tests.support.zoo import families
from worker_svc.model_files.checkpoint import Checkpoint
from worker_svc.quantized.stored_tensors import BLOCKS, SCALES

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore"),  # importing vLLM and transformers
]


def test_experts_in_mxfp4_equal_transformers_dequantized_ones(tmp_path: Path) -> None:
    """The experts get the values that transformers makes of the same bytes, and the answers are its own."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    plain = families.write("gpt-oss", tmp_path / "plain")
    packed = tmp_path / "packed"
    shutil.copytree(plain, packed)
    weights = load_file(plain / "model.safetensors")
    stored = dict(weights)
    generator = torch.Generator().manual_seed(2)
    for name in [name for name in weights if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = weights[name].shape
        shape = (experts, outputs, inputs // 32)
        blocks = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8, generator=generator)
        scales = torch.randint(122, 126, shape, dtype=torch.uint8, generator=generator)
        del stored[name]
        stored |= {name + BLOCKS: blocks, name + SCALES: scales}
        weights[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    save_file(weights, plain / "model.safetensors", {"format": "pt"})
    save_file(stored, packed / "model.safetensors", {"format": "pt"})
    config = json.loads((packed / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (packed / "config.json").write_text(json.dumps(config))

    prompts = parity_process.random_prompts()
    answers = parity_process.run(Job(str(packed), prompts, backend="compiled"))
    assert differences(Reference(plain, torch.float32), prompts, answers) == []
    # Refused for lack of memory by what the weights take, not by what the file takes.
    assert Checkpoint.open(packed).num_bytes(4) >= Checkpoint.open(plain).num_bytes(4)
