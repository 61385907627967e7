"""The runner gives the outputs of transformers, alone and in a batch, within a chunk and beyond a window."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from tests.support.prompts import PROMPTS
from tests.support.reference import Reference, open_reference
from tests.support.sampling_params import sampling_params
from tests.support.worker import parity_process
from tests.support.worker.harness import Harness, load, tokens_of
from tests.support.worker.parity_process import Job, differences
from worker_svc.devices.cpu.kernels.ops import product_kernels
from worker_svc.model_files.loader import fetch

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore"),  # importing vLLM and transformers
]


NUM_TOKENS = 24
# Prompts of 5 to about 700 tokens.
CHOSEN = (0, 3, 9, 11, 14, 19)


@pytest.fixture(scope="module")
def reference(smollm2: Path) -> Reference:
    return open_reference(smollm2, torch.float32)


@pytest.fixture(scope="module")
def prompts(reference: Reference) -> list[list[int]]:
    return [reference.encode(PROMPTS[index]) for index in CHOSEN]


@pytest.mark.slow
def test_bfloat16_logprobs(smollm2: Path, prompts: list[list[int]]) -> None:
    """In bfloat16, log-probabilities of sampled tokens differ little on average.

    The limit is 0.05 with our own kernels. vLLM's kernels round more often; they serve processors without
    bfloat16 instructions.
    """
    greedy = sampling_params(temperature=0.0, logprobs=0)
    results = Harness(load(smollm2, "bfloat16")).generate(prompts, NUM_TOKENS, greedy)
    reference = open_reference(smollm2, torch.bfloat16)
    differences = []
    for prompt, outputs in zip(prompts, results, strict=True):
        tokens = tokens_of(outputs)
        ours = torch.tensor([output.logprobs[0].logprob for output in outputs])
        theirs = reference.logprobs(prompt, tokens).gather(1, torch.tensor(tokens)[:, None])[:, 0]
        differences.append((ours - theirs).abs())
    assert torch.cat(differences).mean() <= (0.05 if product_kernels(torch.bfloat16) else 0.1)


@pytest.mark.slow
def test_hybrid_model_equals_reference() -> None:
    """Gemma 3 in float32, with prompts on both sides of its window of 512, gives the reference's tokens."""
    folder = fetch("gemma3-270m")
    reference = open_reference(folder, torch.float32)
    prompts = [reference.encode(PROMPTS[index]) for index in (0, 11, 19)]
    beginning_of_sequence = 2
    assert all(prompt[0] == beginning_of_sequence for prompt in prompts)
    assert len(prompts[-1]) > 512 + 128
    harness = Harness(load(folder, "float32"), max_num_seqs=4, decode_buckets=(1, 2, 4))
    assert [group.window for group in harness.groups] == [0, 512]
    results = [tokens_of(outputs) for outputs in harness.generate(prompts, 16)]
    assert _mismatches(reference, prompts, results) == []
    # Blocks entirely behind the window are never read; they may be another request's by now.
    harness.prefill(0, prompts[-1])
    behind = (len(prompts[-1]) - 512) // 128
    window_layers = [layer.name for layer in harness.groups[1].layers]
    for name in window_layers:
        harness.runner.cache.by_layer()[name][1 : 1 + behind] = torch.nan
    tokens = [harness.decode([0])[0].token_ids[0] for _ in range(8)]
    assert tokens == results[-1][1:9]


@pytest.mark.parametrize("model", ["smollm2", pytest.param("gemma3-270m", marks=pytest.mark.slow)])
def test_every_bucket_equals_reference(model: str) -> None:
    """In float32, tokens and top log-probabilities equal the reference's with garbage in all padding."""
    folder = fetch(model)
    reference = open_reference(folder, torch.float32)
    text = reference.encode(PROMPTS[19])
    prompts = [text[:length] for length in (5, 12, 20, 40, 140)]
    job = Job(str(folder), prompts, backend="compiled", max_model_len=256)
    assert differences(reference, prompts, parity_process.run(job)) == []


def _mismatches(
    reference: Reference, prompts: Sequence[Sequence[int]], continuations: Sequence[Sequence[int]]
) -> list[str]:
    found = [
        reference.greedy_mismatch(prompt, tokens)
        for prompt, tokens in zip(prompts, continuations, strict=True)
    ]
    return [text for text in found if text]
