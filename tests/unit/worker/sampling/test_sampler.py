"""The sampler keeps and draws the right tokens, independently of neighbours and batches."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from protos.triptych.v1 import common_pb2
from tests.support.sampling_params import changed, complete_params
from tests.support.worker.sampling import admit, choose, draw_many, make_state, request
from worker_svc.sampling.filters import find_threshold
from worker_svc.sampling.sampler import (
    argmax_of_blocks,
    argmax_rows,
    compute_logprobs,
    filtered_masses,
    sample,
    unpack_logprobs,
)
from worker_svc.sampling.state import FilterScope, SamplingOps
from worker_svc.sampling.workspace import Workspace

VOCAB = 50


def pick(
    logits: torch.Tensor,
    samplings: list[common_pb2.SamplingParams],
    lengths: list[int] | None = None,
    padding: int = 0,
) -> list[int]:
    """Samples a token for each request; `logits` are [rows, vocab], or [vocab] for all rows."""
    logits = logits.expand(len(samplings), -1) if logits.dim() == 1 else logits
    state = make_state([request(slot, each) for slot, each in enumerate(samplings)], logits.shape[-1])
    return choose(state, logits, lengths or [1] * len(samplings), padding=padding).tolist()


def seeds(count: int, **fields: float) -> list[common_pb2.SamplingParams]:
    """Returns equal parameters with different seeds."""
    return [complete_params(seed=seed, **fields) for seed in range(count)]


def some_logits(rows: int = 1, seed: int = 0) -> torch.Tensor:
    """Returns random logits, float32 [rows, VOCAB]."""
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 2


def test_top_k_keeps_ties() -> None:
    """Tokens as probable as the k-th are all kept, so their order does not matter."""
    logits = torch.tensor([1.0, 1.0, 1.0, 0.0])
    assert set(draw_many(logits, complete_params(top_k=2), 1000).tolist()) == {0, 1, 2}


def test_a_flat_nucleus_is_found() -> None:
    """A nucleus of thousands of almost equal tokens ends at the right token."""
    logits = torch.linspace(1.0, 0.0, 5_000)
    tokens = draw_many(logits, complete_params(top_p=0.5), 2_000)
    cutoff = int((logits.softmax(-1).cumsum(-1) < 0.5).sum())
    assert cutoff - 20 < int(tokens.max()) <= cutoff


def test_the_threshold_search_is_exact() -> None:
    """The threshold is bit for bit the k-th largest value, for values of all magnitudes and with ties."""
    generator = torch.Generator().manual_seed(3)
    values = torch.rand(4, 300, generator=generator) * torch.tensor([1.0, 1e-3, 1e-20, 1e-40])[:, None]
    values[:, ::7] = values[:, 1::7][:, : values[:, ::7].shape[1]]
    values[:, 5], values[:, 6] = 1.0, 0.0
    ordered = values.sort(dim=-1, descending=True).values
    ((_, tile),) = Workspace(4, 300, torch.device("cpu")).tiles(4)
    for k in (1, 2, 3, 17, 150, 299, 300):
        found = find_threshold(values.view(torch.int32), None, torch.full((4, 1), k), tile)
        assert torch.equal(found.view(torch.float32)[:, 0], ordered[:, k - 1])
    assert (find_threshold(values.view(torch.int32), None, torch.full((4, 1), 301), tile) <= 0).all()


@given(
    vocab=st.sampled_from([1, 2, 127, 128, 129, 256, 300, 1000]),
    rows=st.integers(1, 4),
    seed=st.integers(0, 2**32),
    special=st.lists(
        st.tuples(
            st.integers(0, 3), st.integers(0, 999), st.sampled_from([torch.nan, torch.inf, -torch.inf, 3.0])
        ),
        max_size=6,
    ),
    flat=st.booleans(),
)
@settings(deadline=None)
def test_argmax_rows_equals_argmax(
    vocab: int, rows: int, seed: int, special: list[tuple[int, int, float]], flat: bool
) -> None:
    """It agrees for any vocabulary size, for ties, and for infinite and NaN logits."""
    logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed))
    logits = logits.round() if flat else logits
    for row, token, value in special:
        logits[row % rows, token % vocab] = value
    forbidden = torch.full((rows, vocab), -torch.inf)
    for argmax in (argmax_rows, argmax_of_blocks):
        assert torch.equal(argmax(logits), logits.argmax(dim=-1))
        assert torch.equal(argmax(forbidden), torch.zeros(rows, dtype=torch.int64))


@given(
    fields=st.fixed_dictionaries(
        {
            "temperature": st.sampled_from([0.0, -0.0, 0.5]),
            "min_p": st.sampled_from([0.0, -0.0, 0.2]),
            "top_k": st.sampled_from([0, 3]),
            "top_p": st.sampled_from([1.0, 0.6]),
            "presence_penalty": st.sampled_from([0.0, -0.0]),
            "frequency_penalty": st.sampled_from([0.0, -0.0]),
        }
    ),
    seed=st.integers(0, 2**64 - 1),
)
@settings(deadline=None)
def test_zeros_of_either_sign_turn_parameters_off(fields: dict[str, Any], seed: int) -> None:
    """A row beside rows with every filter and penalty draws the same token as alone with positive zeros."""
    sampling = complete_params(seed=seed, **fields)
    plain = changed(sampling, **{name: value or type(value)() for name, value in fields.items()})
    busy = [
        complete_params(seed=1, min_p=0.1, top_k=20, top_p=0.9, presence_penalty=1.0),
        complete_params(seed=2, top_k=VOCAB - 1, top_p=0.5),
    ]
    logits = some_logits(3, seed=seed % 1000)
    assert pick(logits, [sampling, *busy])[0] == pick(logits[:1], [plain])[0]


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "flat"])
def test_searching_few_tokens_keeps_the_same_tokens(kind: str) -> None:
    """With a small top_k, the few largest weights give the same result as the whole vocabulary."""
    logits = torch.randn(8, 500, generator=torch.Generator().manual_seed(4))
    logits = {"float32": logits, "bfloat16": (logits * 2).bfloat16().float(), "flat": logits.round()}[kind]
    each = [complete_params(top_k=k, top_p=p, min_p=m) for k, p, m in (
        (1, 1, 0), (50, 1, 0), (64, 0.9, 0), (20, 0.5, 0), (20, 0.05, 0), (40, 0.99, 0.3), (0, 1, 0), (0, 1, 0.2)
    )]  # fmt: skip
    state = make_state([request(slot, sampling) for slot, sampling in enumerate(each)], 500)
    few = state.batch(list(range(8)), [1] * 8).needs
    assert (few.top_k, few.top_p) == (FilterScope.FEW, FilterScope.FEW)
    kept = []
    for needs in (
        few,
        replace(few, top_p=FilterScope.ALL),
        replace(few, top_k=FilterScope.ALL, top_p=FilterScope.ALL),
        replace(few, top_k=FilterScope.ALL),
    ):
        ((_, tile),) = state.workspace(8).tiles(8)
        best = logits.amax(dim=-1, keepdim=True)
        kept.append(filtered_masses(state, needs, logits, best, torch.arange(8), tile).clone())
    assert all(torch.equal(other, kept[0]) for other in kept[1:])
    assert (kept[0] > 0).any(dim=-1).all()


MIXED = [
    complete_params(seed=2**64 - 1),
    complete_params(seed=5, top_p=0.8),
    complete_params(seed=6, top_k=4, temperature=1.5),
    complete_params(seed=7, min_p=0.1),
    complete_params(temperature=0.0),
    complete_params(seed=8, top_k=30, top_p=0.9, min_p=0.01, logprobs=2),
    complete_params(seed=11, top_k=VOCAB - 1, top_p=0.7),
    complete_params(seed=9, logit_bias={3: 2.0}, presence_penalty=1.0),
    complete_params(seed=10, allowed_token_ids=(1, 2, 3), repetition_penalty=1.5),
    complete_params(temperature=0.0, bad_words=((1,), (0, 2)), frequency_penalty=0.5),
]


def test_draws_do_not_depend_on_neighbours() -> None:
    logits = some_logits(len(MIXED), seed=1)
    lengths = [3, 9, 1, 60, 2, 5, 33, 7, 4, 8]
    together = pick(logits, MIXED, lengths)
    for row, sampling in enumerate(MIXED):
        alone = pick(logits[row : row + 1], [sampling], lengths[row : row + 1])
        padded = pick(logits[row : row + 1], [sampling], lengths[row : row + 1], padding=3)
        assert alone == padded == [together[row]]


def test_captured_variants_draw_the_same_tokens() -> None:
    logits = some_logits(len(MIXED), seed=2)
    state = make_state([request(slot, each) for slot, each in enumerate(MIXED)], VOCAB)
    rows, lengths = torch.arange(len(MIXED)), [4] * len(MIXED)
    for slots in ([4], [0], [0, 4], [1, 2], [2, 6], [5, 3, 0], [9], [7, 8], list(range(len(MIXED)))):
        needs = state.batch(slots, lengths).needs
        covering = [each for each in state.variants() if each.covers(needs)]
        assert covering or needs.none
        arguments = logits[slots], rows[slots], torch.full((len(slots),), 4)
        expected = sample(state, needs, *arguments)[0].tolist()
        assert all(sample(state, each, *arguments)[0].tolist() == expected for each in covering)


def test_a_row_without_an_allowed_token_reports_it() -> None:
    nothing = complete_params(seed=1, allowed_token_ids=(2,), bad_words=((2,),))
    logits = some_logits(3)
    reported = pick(logits, [nothing, changed(nothing, temperature=0.0), complete_params(temperature=0.0)])
    assert reported == [-1, -1, int(logits[2].argmax())]


def test_min_tokens_yields_where_only_an_end_token_is_allowed() -> None:
    """A request does not fail if its grammar or token list allows nothing but an end token."""
    sampling = complete_params(temperature=0.0, allowed_token_ids=(2, 4), bad_words=((4,),), min_tokens=3)
    state = make_state([request(0, sampling)], VOCAB, ends=(2, 4))
    assert choose(state, some_logits(), [1]).tolist() == [2]


def test_needs_are_the_union_of_the_rows() -> None:
    state = make_state([request(slot, each) for slot, each in enumerate(MIXED)], VOCAB)
    lengths = [17] * len(MIXED)
    assert state.batch([0], lengths).needs == SamplingOps(random=True)
    assert state.batch([1, 2], lengths).needs == SamplingOps(
        random=True, top_k=FilterScope.FEW, top_p=FilterScope.ALL
    )
    assert state.batch([4, 3], lengths).needs == SamplingOps(random=True, greedy=True, min_p=True)
    assert state.batch([9], lengths).needs == SamplingOps(greedy=True, bans=16, ban_prefix=1, history=64)
    assert state.batch([7, 8], [5] * 10).needs == SamplingOps(random=True, masks=True, biases=16, history=16)


def test_bans_end_with_min_tokens() -> None:
    """After min_tokens, a request needs no bans for them. Bad words and other parameters remain."""
    least = complete_params(temperature=0.0, min_tokens=3)
    some = [least, changed(least, min_tokens=5, seed=1, temperature=1.0), changed(least, bad_words=((7,),))]
    state = make_state([request(slot, each) for slot, each in enumerate(some)], VOCAB, ends=(2,))
    for slots in ([0], [0, 1], [1, 0]):
        assert state.batch(slots, [3] * 3).needs.bans
    assert state.batch([0], [4] * 3).needs == SamplingOps(greedy=True)
    assert state.batch([0, 1], [4] * 3).needs == SamplingOps(greedy=True, random=True, bans=16)
    assert state.batch([0, 1], [6] * 3).needs == SamplingOps(greedy=True, random=True)
    assert state.batch([2], [60] * 3).needs == SamplingOps(greedy=True, bans=16)
    assert [state.restricts(slot) for slot in range(3)] == [False, False, True]
    logits = torch.zeros(2, VOCAB)
    logits[:, 2] = 9.0
    assert choose(state, logits[:1], [4] * 3, [0]).tolist() == [2]
    # The next request in the slot starts with its own bans; a request with enough tokens has none.
    admit(state, request(0, least))
    assert choose(state, logits[:1], [1] * 3, [0]).tolist() == [0]
    admit(state, request(0, least, output=(5, 6, 7)))
    assert state.batch([0], [4] * 3).needs == SamplingOps(greedy=True)


def test_logprobs_of_the_chosen_token_alone() -> None:
    """A count of 0 returns only the chosen token's log-probability; padding rows return none."""
    (entry,) = unpack_logprobs(compute_logprobs(torch.zeros(3, 4), torch.tensor([1, 0, 0])), [0])
    assert entry is not None
    assert entry.logprob == pytest.approx(-1.386294, abs=1e-5)
    assert (entry.rank, list(entry.top_token_ids)) == (1, [])


def test_logprobs_have_at_most_20_tokens_beside_the_chosen_one() -> None:
    """A larger count gives 20, or the whole vocabulary if that is smaller."""
    for vocab in (5, 40):
        (entry,) = unpack_logprobs(compute_logprobs(torch.randn(1, vocab), torch.tensor([1])), [50])
        assert entry is not None
        assert len(entry.top_token_ids) == len(entry.top_logprobs) == min(vocab, 20)
