"""LoRA adapters on a GPU: captured graphs with a mixed batch equal models with the adapters merged in."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.bench.lora.step_cost import RANK, write_adapter
from tests.support import tiny_models
from tests.support.reference import Reference
from tests.support.worker.harness import Harness, load, tokens_of
from worker_svc.devices import open_device
from worker_svc.lora.checkpoint import WEIGHTS, LoraLimits

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU, and CI has none"),
    pytest.mark.filterwarnings("ignore"),  # importing vLLM and transformers
]

LIMITS = LoraLimits(max_loras=3, max_rank=RANK, max_cpu_loras=3)
PROMPTS = [list(range(5, 5 + length)) for length in (4, 140, 17, 64, 9)]
MIX = (0, None, 1, 0, 1)


def _merged(base: Path, adapter: Path, folder: Path) -> Reference:
    """Returns the reference for a model with the adapter merged into its weights."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    tensors = load_file(adapter / WEIGHTS)
    with torch.no_grad():
        for key in tensors:
            if key.endswith("lora_A.weight"):
                path = key.removesuffix(".lora_A.weight")
                change = tensors[f"{path}.lora_B.weight"] @ tensors[key]
                model.get_parameter(path.removeprefix("base_model.model.") + ".weight").add_(change)
    model.save_pretrained(folder)
    return Reference(folder, torch.float32)


@pytest.mark.parametrize("level", [1, 2])
def test_a_mixed_batch_in_captured_graphs(tmp_path: Path, level: int) -> None:
    """Two adapters and the base model in one batch; afterwards a slot gets the other adapter."""
    base = tiny_models.write("llama", tmp_path / "model")
    adapters = [write_adapter(tmp_path / f"adapter{seed}", base, seed) for seed in range(2)]
    references: dict[int | None, Reference] = {None: Reference(base, torch.float32)}
    for number, path in enumerate(adapters):
        references[number] = _merged(base, path, tmp_path / f"merged{number}")
    device = open_device("cuda")
    harness = Harness(
        load(base, "float32", device=device, lora=LIMITS), max_num_seqs=8, decode_buckets=(1, 8), max_model_len=512,
        device=device, level=level,
    )  # fmt: skip
    for number, path in enumerate(adapters):
        harness.load_adapter(number + 1, path)
    results = [
        [harness.prefill(slot, prompt, adapter_id=0 if adapter is None else adapter + 1)]
        for slot, (prompt, adapter) in enumerate(zip(PROMPTS, MIX, strict=True))
    ]
    for _ in range(8):
        for result, output in zip(results, harness.decode(range(len(PROMPTS))), strict=True):
            result.append(output)
    for adapter, prompt, result in zip(MIX, PROMPTS, results, strict=True):
        assert references[adapter].greedy_mismatch(prompt, tokens_of(result)) == ""
    assert references[None].greedy_mismatch(PROMPTS[0], tokens_of(results[0]))  # the adapters change answers
    harness.release(range(len(PROMPTS)))
    for adapter_id in (3, 4):  # in the slots of the others
        harness.load_adapter(adapter_id, adapters[1])
        harness.prefill(1, PROMPTS[0], adapter_id=adapter_id)
        harness.release([1])
    tokens = tokens_of([harness.prefill(0, PROMPTS[0], adapter_id=4)])
    for _ in range(5):
        tokens += tokens_of(harness.decode([0]))
    assert references[1].greedy_mismatch(PROMPTS[0], tokens) == ""
