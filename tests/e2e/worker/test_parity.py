"""The runner gives the outputs of transformers; a seeded request gives its tokens in any batch."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from protos.steps import Admission, Prefill
from protos.triptych.v1 import common_pb2
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
SAMPLINGS = [
    sampling_params(seed=1, temperature=1.0),
    sampling_params(seed=2, temperature=0.9, top_p=0.9, top_k=40, min_p=0.02),
    sampling_params(seed=3, presence_penalty=0.8, frequency_penalty=0.4, repetition_penalty=1.2),
    sampling_params(temperature=0.0, repetition_penalty=1.3),
    sampling_params(seed=5, temperature=1.3, top_p=0.8, min_tokens=20, logit_bias={28: -5.0}),
]


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


def _resumed(
    harness: Harness, prompt: list[int], output: list[int], sampling: common_pb2.SamplingParams, slot: int
) -> list[int]:
    """Returns the remaining tokens of a request that is admitted again with its output so far."""
    known = [*prompt, *output]
    first = harness.admit(slot, known, sampling)
    admit = [Admission(slot, known, 0, sampling, first.blocks, num_prompt_tokens=len(prompt))]
    outputs = []
    for start in range(0, len(known), harness.shapes.chunk):
        count = min(harness.shapes.chunk, len(known) - start)
        work = Prefill(slot, start, count, start + count == len(known))
        outputs, admit = harness.run(admit=admit, work=work), []
    harness.lengths[slot] = len(known)
    rest = tokens_of(outputs)
    while len(output) + len(rest) < NUM_TOKENS:
        rest += tokens_of(harness.decode([slot]))
    return rest


@pytest.mark.slow
def test_the_same_tokens_alone_in_a_batch_in_another_order_and_after_preemption(
    smollm2: Path, prompts: list[list[int]]
) -> None:
    """Tokens depend only on prompt and parameters, in float32, in which kernels of all shapes agree."""
    prompts = prompts[: len(SAMPLINGS)]
    harness = Harness(load(smollm2, "float32"), max_num_seqs=8, decode_buckets=(1, 8))
    together = [tokens_of(each) for each in harness.generate(prompts, NUM_TOKENS, SAMPLINGS)]
    backwards = [tokens_of(each) for each in harness.generate(prompts[::-1], NUM_TOKENS, SAMPLINGS[::-1])]
    assert backwards[::-1] == together
    for prompt, sampling, expected in zip(prompts, SAMPLINGS, together, strict=False):
        (alone,) = harness.generate([prompt], NUM_TOKENS, sampling)
        assert tokens_of(alone) == expected
        assert _resumed(harness, prompt, expected[:9], sampling, 3) == expected[9:]
        harness.release((3,))
    assert len({tuple(tokens) for tokens in together}) == len(together)


def test_prompt_log_probabilities_equal_the_references(
    smollm2: Path, reference: Reference, prompts: list[list[int]]
) -> None:
    prompt = max(prompts, key=len)
    prompt = (prompt * (300 // len(prompt) + 1))[:300]
    harness = Harness(load(smollm2, "float32"), max_num_seqs=2, decode_buckets=(1, 2))
    output = harness.prefill(0, prompt, sampling_params(temperature=0.0, prompt_logprobs=3, logprobs=0))
    expected = reference.logprobs(prompt[:1], [*prompt[1:], 0])
    assert len(output.prompt_logprobs) == len(prompt) - 1
    for index, entry in enumerate(output.prompt_logprobs):
        row = expected[index]
        assert entry.logprob == pytest.approx(float(row[prompt[index + 1]]), abs=2e-3)
        assert list(entry.top_logprobs) == pytest.approx(row.topk(3).values.tolist(), abs=2e-3)
    assert output.logprobs[0].logprob == pytest.approx(float(expected[-1].max()), abs=2e-3)


def _mismatches(
    reference: Reference, prompts: Sequence[Sequence[int]], continuations: Sequence[Sequence[int]]
) -> list[str]:
    found = [
        reference.greedy_mismatch(prompt, tokens)
        for prompt, tokens in zip(prompts, continuations, strict=True)
    ]
    return [text for text in found if text]
