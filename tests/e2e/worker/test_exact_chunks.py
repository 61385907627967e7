"""On announced paths, a token has the same bits in any partition into chunks and decode steps."""

from pathlib import Path

import pytest
import torch

from protos.steps import GroupKind, SlotOutput
from tests.support import quantized_models
from tests.support.sampling_params import sampling_params
from tests.support.worker.harness import Harness, load, tokens_of
from tests.support.worker.peft_adapters import AdapterSpec, write_adapter
from tests.support.zoo import families
from worker_svc.devices.cpu.kernels.ops import product_kernels
from worker_svc.lora.checkpoint import LoraLimits
from worker_svc.quantized.codes import Scheme
from worker_svc.settings import Backend
from worker_svc.vllm_adapter.configuration import Dtype

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore"),  # importing vLLM and transformers
    pytest.mark.skipif(product_kernels(torch.bfloat16) is None, reason="our kernels do not run here"),
]

REPORTED = sampling_params(temperature=0.0, logprobs=5)
# Beyond the 512 keys of a part, and beyond the window of 64 tokens.
PROMPT = [3 + (i * i * 31 + i * 17) % 250 for i in range(643)]
PARTITIONS = (
    [0, 1, 128, 200, 201, 329, 457, 520, 642],
    [0, 96, 224, 352, 480, 513, 514, 640],
)


def _harness(folder: Path, *, lora: LoraLimits | None = None) -> Harness:
    return Harness(load(folder, "bfloat16", lora=lora), max_num_seqs=5, decode_buckets=(1, 4))


def _kv(harness: Harness, slot: int) -> list[torch.Tensor]:
    """Returns the blocks of a slot in every layer; slots are admitted in order and fill whole tables."""
    width = harness.shapes.table_width
    blocks = slice(1 + slot * width, 1 + (slot + 1) * width)
    return [cache[blocks].clone() for cache in harness.runner.cache.by_layer().values()]


def _said(output: SlotOutput) -> tuple[list[int], str]:
    return list(output.token_ids), repr(output.logprobs)


def _check(harness: Harness, adapter_id: int = 0) -> None:
    """Compares partitions of a prompt, and of what the model goes on to say."""
    assert harness.runner.is_exact
    whole = harness.prefill(0, PROMPT, REPORTED, adapter_id=adapter_id)
    kv = _kv(harness, 0)
    for slot, starts in enumerate(PARTITIONS, 1):
        assert _said(harness.prefill(slot, PROMPT, REPORTED, starts, adapter_id=adapter_id)) == _said(whole)
        assert all(map(torch.equal, _kv(harness, slot), kv))
    outputs = [whole]
    for count in range(40):
        outputs.append(harness.decode((0, 1, 2)[: 3 if count % 2 else 1])[0])
        assert _said(outputs[-1])[0]
    # The last token that a step said is not computed yet.
    again = harness.prefill(3, [*PROMPT, *tokens_of(outputs[:-1])], REPORTED, adapter_id=adapter_id)
    assert _said(again) == _said(outputs[-1])
    assert all(map(torch.equal, _kv(harness, 3), _kv(harness, 0)))


@pytest.mark.parametrize(
    "family",
    [
        "llama",
        "mistral",
        "gemma3",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("qwen2", "qwen3", "llama3", "phi3", "phi3-long", "granite")
        ),
    ],
)
def test_families(family: str, tmp_path: Path) -> None:
    """Keys, values, tokens and log-probabilities are equal for all kinds of attention in our kernels."""
    _check(_harness(families.write(family, tmp_path)))


@pytest.mark.parametrize("scheme", [Scheme(4, 64), Scheme(8, None)], ids=["w4", "w8"])
def test_quantized_weights(scheme: Scheme, tmp_path: Path) -> None:
    source = families.write("llama", tmp_path / "source")
    _check(_harness(quantized_models.write(source, tmp_path / "stored", "compressed-tensors", scheme)))


def test_adapters(tmp_path: Path) -> None:
    folder = families.write("llama", tmp_path / "model")
    adapter = write_adapter(folder, tmp_path / "adapter", AdapterSpec(seed=1))
    harness = _harness(folder, lora=LoraLimits(max_loras=2, max_rank=8, max_cpu_loras=2))
    harness.load_adapter(1, adapter)
    _check(harness, adapter_id=1)


@pytest.mark.parametrize(
    ("family", "dtype", "window", "backend"),
    [
        ("llama", "float32", GroupKind.PAGED_WINDOW, "compiled"),
        ("llama", "bfloat16", GroupKind.PAGED_WINDOW, "eager"),
        ("mistral", "bfloat16", GroupKind.IN_PLACE_WINDOW, "compiled"),
        ("mixtral", "bfloat16", GroupKind.PAGED_WINDOW, "compiled"),
        pytest.param("deepseek-v2", "bfloat16", GroupKind.PAGED_WINDOW, "compiled", marks=pytest.mark.slow),
    ],
)
def test_other_paths_announce_nothing(
    family: str, dtype: Dtype, window: GroupKind, backend: Backend, tmp_path: Path
) -> None:
    """The wheel's kernels, experts, latent attention and plain PyTorch may round a chunk as a whole."""
    model = load(families.write(family, tmp_path), dtype)
    harness = Harness(
        model, max_num_seqs=2, decode_buckets=(1,), max_model_len=256, window_kind=window, backend=backend
    )
    assert not harness.runner.is_exact
