"""Compares every parameter with vLLM's sampler on the same logits.

Compared are adjusted logits, kept tokens, their probabilities and greedy choices. Known differences are
excluded: tokens of equal logits (we keep or drop them together; in vLLM a sort decides), tokens so close to a
threshold that float32 rounding decides, and rows without any allowed token.
"""

from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from protos.triptych.v1 import common_pb2
from tests.support.property_settings import scaled
from tests.support.sampling_params import complete_params
from tests.support.worker.sampling import make_state, request
from worker_svc.sampling.adjust import adjust_logits
from worker_svc.sampling.sampler import compute_logprobs, filtered_masses, sample
from worker_svc.sampling.state import SamplingState
from worker_svc.vllm_adapter import startup

VOCAB = 96
ENDS = (2, 90)

tokens = st.integers(0, VOCAB - 1)


class Row(NamedTuple):
    """A request and its tokens so far."""

    sampling: common_pb2.SamplingParams
    prompt: list[int]
    output: list[int]


@st.composite
def rows(draw: st.DrawFn) -> Row:
    """Draws a request with any parameters, most of them off."""

    def maybe(strategy: st.SearchStrategy[Any], off: Any) -> Any:
        return draw(st.one_of(st.just(off), strategy))

    prompt = draw(st.lists(tokens, min_size=1, max_size=12))
    output = draw(st.lists(tokens, max_size=12))
    words = draw(st.lists(st.lists(tokens, min_size=1, max_size=4), max_size=4))
    started: bool = draw(st.booleans())
    if output and started:
        words.append([*output[-draw(st.integers(1, 3)) :], draw(tokens)])
    fields: dict[str, Any] = {
        "temperature": draw(st.sampled_from([0.0, 0.3, 1.0, 1.7])),
        "top_p": maybe(st.floats(0.0625, 0.984375, width=32), 1.0),
        "top_k": maybe(st.integers(1, VOCAB + 5), 0),
        "min_p": maybe(st.floats(0.0009765625, 0.5, width=32), 0.0),
        "presence_penalty": maybe(st.floats(-2, 2, width=32), 0.0),
        "frequency_penalty": maybe(st.floats(-2, 2, width=32), 0.0),
        "repetition_penalty": maybe(st.floats(0.5, 2, width=32), 1.0),
        "logit_bias": maybe(st.dictionaries(tokens, st.floats(-100, 100, width=32), max_size=8), {}),
        "allowed_token_ids": tuple(maybe(st.lists(tokens, min_size=5, max_size=60, unique=True), [])),
        "bad_words": tuple(map(tuple, words)),
        "min_tokens": maybe(st.integers(1, 20), 0),
        "stop_token_ids": tuple(draw(st.lists(tokens, max_size=3))),
    }
    return Row(complete_params(**fields), prompt, output)


def logits_of(seed: int, count: int) -> torch.Tensor:
    """Returns logits without ties, float32 [rows, vocab]."""
    return torch.randn(count, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


@pytest.fixture(scope="module", autouse=True)
def _platform() -> None:
    startup.prepare("cpu")


def vllm_results(batch: list[Row], logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns vLLM's logits after all adjustments, and its probabilities after filters."""
    from vllm import SamplingParams
    from vllm.v1.sample.logits_processor import LogitsProcessors
    from vllm.v1.sample.logits_processor.builtin import (
        LogitBiasLogitsProcessor,
        MinPLogitsProcessor,
        MinTokensLogitsProcessor,
    )
    from vllm.v1.sample.logits_processor.interface import BatchUpdate
    from vllm.v1.sample.metadata import SamplingMetadata
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p_pytorch
    from vllm.v1.sample.sampler import Sampler

    cpu, count = torch.device("cpu"), len(batch)
    config: Any = SimpleNamespace(scheduler_config=SimpleNamespace(max_num_seqs=count))
    processors = LogitsProcessors(
        [each(config, cpu, False) for each in (MinTokensLogitsProcessor, LogitBiasLogitsProcessor, MinPLogitsProcessor)]
    )  # fmt: skip
    added = []
    for index, (sampling, prompt, output) in enumerate(batch):
        params = SamplingParams(
            temperature=max(sampling.temperature, 1e-2),  # vLLM drops the filters below this
            min_p=sampling.min_p,
            logit_bias=dict(sampling.logit_bias) or None,
            min_tokens=sampling.min_tokens,
            max_tokens=64,
            stop_token_ids=list(sampling.stop_token_ids),
        )
        params.update_from_generation_config({"eos_token_id": list(ENDS)}, ENDS[0])
        added.append((index, params, prompt, output))
    for processor in processors.all:
        processor.update_state(BatchUpdate(count, [], added, []))

    def column(name: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.tensor([getattr(row.sampling, name) for row in batch], dtype=dtype)

    allowed = torch.zeros(count, VOCAB, dtype=torch.bool)
    prompts = torch.full((count, max(len(row.prompt) for row in batch)), VOCAB)
    for index, row in enumerate(batch):
        prompts[index, : len(row.prompt)] = torch.tensor(row.prompt)
        if row.sampling.allowed_token_ids:
            allowed[index] = True
            allowed[index, list(row.sampling.allowed_token_ids)] = False
    temperature, top_k = column("temperature"), column("top_k", torch.int32)
    top_k = torch.where((top_k == 0) | (top_k > VOCAB), VOCAB, top_k)
    metadata = SamplingMetadata(
        temperature=temperature, all_greedy=False, all_random=False, top_p=column("top_p"), top_k=top_k, generators={},
        max_num_logprobs=None, no_penalties=False, prompt_token_ids=prompts, frequency_penalties=column("frequency_penalty"),
        presence_penalties=column("presence_penalty"), repetition_penalties=column("repetition_penalty"),
        output_token_ids=[row.output for row in batch], allowed_token_ids_mask=allowed,
        bad_words_token_ids={i: [list(w.token_ids) for w in row.sampling.bad_words] for i, row in enumerate(batch) if row.sampling.bad_words},
        logitsprocs=processors,
    )  # fmt: skip
    processed = Sampler().apply_logits_processors(logits.clone(), metadata, predict_bonus_token=False)
    filtered = Sampler.apply_temperature(processed.clone(), temperature, all_random=False)
    for processor in processors.argmax_invariant:
        filtered = processor.apply(filtered)
    filtered = apply_top_k_top_p_pytorch(filtered, top_k, metadata.top_p)
    return processed, filtered.softmax(dim=-1)


def our_results(batch: list[Row], logits: torch.Tensor) -> tuple[SamplingState, torch.Tensor, torch.Tensor]:
    """Returns the state, the adjusted logits and the probabilities of the worker's sampler."""
    requests = [request(slot, row.sampling, row.prompt, row.output) for slot, row in enumerate(batch)]
    state = make_state(requests, VOCAB, ends=ENDS)
    lengths = [len(each.token_ids) for each in requests]
    slots = list(range(len(batch)))
    needs, index = state.batch(slots, lengths).needs, torch.tensor(slots)
    workspace = state.workspace(len(batch))
    adjusted = adjust_logits(
        state, needs, logits, index, torch.tensor(lengths), workspace.logits(len(batch))
    ).clone()
    masses = []
    for part, tile in workspace.tiles(len(batch)):
        best = adjusted[part].amax(dim=-1, keepdim=True)
        masses.append(filtered_masses(state, needs, adjusted[part], best, index[part], tile).double())
    mass = torch.cat(masses)
    return state, adjusted, mass / mass.sum(dim=-1, keepdim=True)


def near_a_threshold(row: Row, processed: torch.Tensor) -> torch.Tensor:
    """Returns the tokens that rounding may keep or drop, bool [vocab].

    `processed` are the row's adjusted logits before temperature.
    """
    sampling = row.sampling
    weights = (processed.double() / (sampling.temperature or 1)).softmax(-1)
    near = (weights - sampling.min_p * weights.max()).abs() < 1e-5 * weights.max()
    weights = torch.where(weights < sampling.min_p * weights.max(), 0, weights)
    if sampling.top_k:
        kth = weights.sort(descending=True).values[min(sampling.top_k, VOCAB) - 1]
        near |= (weights - kth).abs() < 1e-5 * kth
        weights = torch.where(weights < kth, 0, weights)
    weights /= weights.sum()
    above = torch.stack([weights[weights > weight].sum() for weight in weights])
    # A token whose mass vanishes in the sum of the others is always near a threshold.
    return near | ((above - sampling.top_p).abs() < 1e-4) | (weights < 1e-6)


@pytest.mark.property
@scaled(max_examples=200)
@given(batch=st.lists(rows(), min_size=1, max_size=5), seed=st.integers(0, 2**32))
def test_any_parameters_give_the_same_probabilities(batch: list[Row], seed: int) -> None:
    compare(batch, logits_of(seed, len(batch)))


ALONE: dict[str, Any] = {
    "temperature": 0.6, "top_p": 0.85, "top_k": 9, "min_p": 0.07, "presence_penalty": 1.1, "frequency_penalty": -0.6,
    "repetition_penalty": 1.4, "logit_bias": {5: 4.5, 60: -100.0}, "allowed_token_ids": (1, 2, 31, 32, 95),
    "bad_words": ((8, 9, 10), (9, 11), (12,), (7, 7)), "min_tokens": 9, "stop_token_ids": (33, 34),
}  # fmt: skip


@pytest.mark.parametrize("name", ALONE)
def test_each_parameter_alone(name: str) -> None:
    fields = {name: ALONE[name], "min_tokens": 9} if name == "stop_token_ids" else {name: ALONE[name]}
    prompt, output = [3, 7, 8, 9], [7, 40, 40, 8, 9]
    batch = [
        Row(complete_params(**fields), prompt, output),
        Row(complete_params(), prompt, output),
        Row(complete_params(**{**fields, "temperature": 0.0}), prompt, output),
    ]
    for seed in range(20):
        compare(batch, logits_of(seed, 3))


def compare(batch: list[Row], logits: torch.Tensor) -> None:
    """Asserts that both samplers agree on a batch."""
    processed, probabilities = vllm_results(batch, logits)
    state, adjusted, kept = our_results(batch, logits)
    lengths = [len(row.prompt) + len(row.output) for row in batch]
    slots = list(range(len(batch)))
    needs = state.batch(slots, lengths).needs
    chosen, reported = sample(state, needs, logits, torch.tensor(slots), torch.tensor(lengths))
    for index, row in enumerate(batch):
        if (processed[index] == -torch.inf).all():
            # No token is allowed: vLLM samples from NaN, we report -1, except where only min_tokens forbids
            # the rest.
            assert reported[index] == -1 or row.sampling.min_tokens
            continue
        torch.testing.assert_close(adjusted[index], processed[index], rtol=1e-5, atol=1e-5)
        if row.sampling.temperature == 0:
            assert adjusted[index, reported[index]] >= processed[index].max() - 1e-5
            continue
        differ = (kept[index] > 0) != (probabilities[index] > 0)
        assert not (differ & ~near_a_threshold(row, processed[index])).any()
        if not differ.any():
            torch.testing.assert_close(kept[index].float(), probabilities[index], rtol=1e-4, atol=1e-6)
        assert kept[index, chosen[index]] > 0


def test_logprobs_match_vllm() -> None:
    """The chosen token's log-probability and rank, and the most probable tokens, come from the raw logits."""
    from vllm.v1.sample.sampler import Sampler

    logits, chosen = logits_of(5, 8), torch.arange(8) * 7
    expected = Sampler.gather_logprobs(Sampler.compute_logprobs(logits), 20, chosen)
    found = compute_logprobs(logits, chosen)
    torch.testing.assert_close(found[:, :1].float(), expected.logprobs[:, :1])
    assert torch.equal(found[:, 1].long(), expected.selected_token_ranks.long())
    assert torch.equal(found[:, 2:22].long(), expected.logprob_token_ids[:, 1:].long())
    torch.testing.assert_close(found[:, 22:].float(), expected.logprobs[:, 1:])
