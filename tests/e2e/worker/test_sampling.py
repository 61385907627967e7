"""Sampling on a real model is reproducible in any batch; log-probabilities equal those of transformers."""

from pathlib import Path

import pytest
import torch

from protos.steps import Admission, Prefill
from protos.triptych.v1 import common_pb2
from tests.support.prompts import PROMPTS
from tests.support.reference import Reference, open_reference
from tests.support.sampling_params import sampling_params
from tests.support.worker.harness import Harness, load, tokens_of

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore"),  # importing vLLM and transformers
]

NUM_TOKENS = 24
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
    return [reference.encode(text) for text in PROMPTS[: len(SAMPLINGS)]]


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
    harness = Harness(load(smollm2, "float32"), max_num_seqs=8, decode_buckets=(1, 8))
    together = [tokens_of(each) for each in harness.generate(prompts, NUM_TOKENS, SAMPLINGS)]
    backwards = [tokens_of(each) for each in harness.generate(prompts[::-1], NUM_TOKENS, SAMPLINGS[::-1])]
    assert backwards[::-1] == together
    for prompt, sampling, expected in zip(prompts, SAMPLINGS, together, strict=True):
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
