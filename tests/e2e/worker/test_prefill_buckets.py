"""On CPUs a chunk's results do not depend on its bucket, and so on its padding."""

from pathlib import Path
from typing import Any

import pytest
import torch

from protos.steps import GroupKind, SlotOutput
from tests.support.sampling_params import sampling_params
from tests.support.tiny_models import write
from tests.support.worker.harness import Harness, load
from worker_svc.devices.cpu.kernels.ops import product_kernels
from worker_svc.model_files.loader import fetch
from worker_svc.vllm_adapter.configuration import Dtype

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore"),  # importing vLLM and transformers
    pytest.mark.skipif(product_kernels(torch.bfloat16) is None, reason="these kernels are for AVX512_BF16"),
]

REPORTED = sampling_params(temperature=0.0, logprobs=5, prompt_logprobs=0)
# Around each bucket's end, a single token, and what follows one and two whole chunks.
LENGTHS = (1, 32, 33, 64, 100, 129, 192, 300)


def check(folder: Path, dtype: Dtype, **shapes: Any) -> None:
    """Compares prompts of all lengths, and four tokens after each, with buckets and with one chunk size."""
    model = load(folder, dtype)
    vocabulary = min(model.description.vocab_size, 40_000)
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(3, vocabulary, (length,), generator=generator).tolist() for length in LENGTHS]

    def results(*buckets: int) -> list[list[SlotOutput]]:
        harness = Harness(
            model, max_model_len=512, max_num_seqs=16, decode_buckets=(1, 16), prefill_buckets=buckets,
            **shapes,
        )  # fmt: skip
        made = harness.runner.signatures()
        assert {each.query_len for each in made if each.kind == "prefill"} == {*buckets, 128}
        return harness.generate(prompts, 4, REPORTED)

    assert results(32, 64, 128) == results()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_no_bit_of_a_real_model_depends_on_the_bucket(dtype: Dtype) -> None:
    check(fetch("smollm2"), dtype)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_no_bit_depends_on_the_bucket(tmp_path: Path, dtype: Dtype) -> None:
    check(write("llama", tmp_path), dtype)


@pytest.mark.parametrize("kind", [GroupKind.IN_PLACE_WINDOW, GroupKind.PAGED_WINDOW])
def test_windows_slide_by_real_tokens_alone(tmp_path: Path, kind: GroupKind) -> None:
    check(write("gemma3", tmp_path), "bfloat16", window_kind=kind, block_size=512)


@pytest.mark.parametrize("family", ["mixtral", "glm4-moe"])
def test_experts_are_routed_by_real_tokens_alone(tmp_path: Path, family: str) -> None:
    check(write(family, tmp_path), "bfloat16")
