"""The runner gives the outputs of transformers, alone and in a batch, within a chunk and beyond a window."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from protos.steps import GroupKind
from tests.support.prompts import PROMPTS
from tests.support.reference import Reference, open_reference
from tests.support.sampling_params import sampling_params
from tests.support.worker import parity_process
from tests.support.worker.harness import FULL, Harness, load, tokens_of
from tests.support.worker.parity_process import Job, differences
from worker_svc.devices.cpu.kernels.ops import product_kernels
from worker_svc.model_files.loader import fetch
from worker_svc.settings import Backend

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore"),  # importing vLLM and transformers
]


@pytest.fixture(scope="module", params=[24, pytest.param(64, marks=pytest.mark.slow)])
def num_tokens(request: pytest.FixtureRequest) -> int:
    """Tokens of each answer."""
    return int(request.param)


@pytest.fixture(scope="module")
def reference(smollm2: Path) -> Reference:
    return open_reference(smollm2, torch.float32)


@pytest.fixture(scope="module")
def prompts(reference: Reference) -> list[list[int]]:
    return [reference.encode(text) for text in PROMPTS]


@pytest.fixture(scope="module")
def batched(smollm2: Path, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
    """Greedy continuations in float32, all prompts decoded in one batch."""
    results = Harness(load(smollm2, "float32")).generate(prompts, num_tokens)
    return [tokens_of(outputs) for outputs in results]


def test_prompts_vary(prompts: list[list[int]]) -> None:
    """The prompts are short and long, up to about 700 tokens."""
    lengths = [len(prompt) for prompt in prompts]
    assert len(prompts) == 20
    assert min(lengths) <= 5
    assert 600 <= max(lengths) <= 760


def test_batch_equals_reference(
    reference: Reference, prompts: list[list[int]], batched: list[list[int]]
) -> None:
    """Twenty prompts decoded in one batch in float32 give the reference's tokens."""
    assert _mismatches(reference, prompts, batched) == []


@pytest.mark.slow
def test_alone_equals_batch(
    smollm2: Path, prompts: list[list[int]], batched: list[list[int]], num_tokens: int
) -> None:
    """A prompt gives the same tokens alone as in the batch; the short form tests every third prompt."""
    harness = Harness(load(smollm2, "float32"))
    step = 1 if FULL else 3
    alone = [tokens_of(harness.generate([prompt], num_tokens)[0]) for prompt in prompts[::step]]
    assert alone == batched[::step]


def test_reference_is_generate(
    reference: Reference, prompts: list[list[int]], batched: list[list[int]]
) -> None:
    """The reference's shortcut agrees with transformers' generate."""
    for index in (0, 11):
        assert reference.generate(prompts[index], 24) == batched[index][:24]


def test_demo_model_knows_paris(reference: Reference, batched: list[list[int]]) -> None:
    """The converted demo model answers sensibly."""
    assert reference.tokenizer.decode(batched[0]).startswith(" Paris.")


@pytest.mark.slow
def test_bfloat16_logprobs(smollm2: Path, prompts: list[list[int]], num_tokens: int) -> None:
    """In bfloat16, log-probabilities of sampled tokens differ little on average.

    The limit is 0.05 with our own kernels. vLLM's kernels round more often; they serve processors without
    bfloat16 instructions.
    """
    greedy = sampling_params(temperature=0.0, logprobs=0)
    prompts = prompts[::2]
    results = Harness(load(smollm2, "bfloat16")).generate(prompts, num_tokens, greedy)
    reference = open_reference(smollm2, torch.bfloat16)
    differences = []
    for prompt, outputs in zip(prompts, results, strict=True):
        tokens = tokens_of(outputs)
        ours = torch.tensor([output.logprobs[0].logprob for output in outputs])
        theirs = reference.logprobs(prompt, tokens).gather(1, torch.tensor(tokens)[:, None])[:, 0]
        differences.append((ours - theirs).abs())
    assert torch.cat(differences).mean() <= (0.05 if product_kernels(torch.bfloat16) else 0.1)


@pytest.mark.slow
def test_poisoned_memory_does_not_leak(
    smollm2: Path, prompts: list[list[int]], batched: list[list[int]]
) -> None:
    """NaN in the null block and in former requests' blocks changes no real row."""
    harness = Harness(load(smollm2, "float32"), max_num_seqs=4, decode_buckets=(1, 2, 4))
    for layer in harness.runner.cache.by_layer().values():
        layer.fill_(torch.nan)
    picked = [0, 9, 14]
    results = harness.generate([prompts[index] for index in picked], 16)
    assert [tokens_of(outputs) for outputs in results] == [batched[index][:16] for index in picked]


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


@pytest.mark.parametrize("backend", ["eager", "compiled"] if FULL else ["compiled"])
@pytest.mark.parametrize("model", ["smollm2", "gemma3-270m"])
def test_every_bucket_equals_reference(model: str, backend: Backend) -> None:
    """In float32, tokens and top log-probabilities equal the reference's with garbage in all padding."""
    folder = fetch(model)
    reference = open_reference(folder, torch.float32)
    text = reference.encode(PROMPTS[19])
    prompts = [text[:length] for length in (5, 12, 20, 40, 140)]
    job = Job(str(folder), prompts, backend=backend, max_model_len=256)
    assert differences(reference, prompts, parity_process.run(job)) == []


@pytest.mark.slow
def test_in_place_windows_give_the_tokens_of_paged_ones() -> None:
    """Gemma 3 in float32 gives the same tokens for prompts below and far above its window of 512."""
    folder = fetch("gemma3-270m")
    long = open_reference(folder, torch.float32).encode(PROMPTS[19])
    prompts = [[*long, *long[1:]], long[:40]]
    assert len(prompts[0]) > 1000

    def open_harness(kind: GroupKind) -> Harness:
        harness = Harness(
            load(folder, "float32"), max_model_len=2048, max_num_seqs=4, block_size=512,
            decode_buckets=(1, 2, 4), window_kind=kind,
        )  # fmt: skip
        assert [group.kind for group in harness.groups] == [GroupKind.FULL, kind]
        return harness

    paged = open_harness(GroupKind.PAGED_WINDOW).generate(prompts, 16)
    harness = open_harness(GroupKind.IN_PLACE_WINDOW)
    in_place = [tokens_of(outputs) for outputs in harness.generate(prompts, 16)]
    assert in_place == [tokens_of(outputs) for outputs in paged]
    # NaN in other blocks, and in the request's block before its admission, changes nothing.
    for name, cache in harness.runner.cache.by_layer().items():
        if name in {layer.name for layer in harness.groups[1].layers}:
            cache.fill_(torch.nan)
    assert tokens_of(harness.generate(prompts[1:], 16)[0]) == in_place[1]


def _mismatches(
    reference: Reference, prompts: Sequence[Sequence[int]], continuations: Sequence[Sequence[int]]
) -> list[str]:
    found = [
        reference.greedy_mismatch(prompt, tokens)
        for prompt, tokens in zip(prompts, continuations, strict=True)
    ]
    return [text for text in found if text]
