"""The same conversations through vLLM's KVCacheManager and our KvCache: hits are never shorter than vLLM's.

Both are driven as their schedulers drive them: look up, allocate, prefill in chunks, decode token by token,
free. The rules are the same up to these differences, which decide whether a test says "equal" or "at least":

- vLLM finds whole blocks, ours whole chunks, or with exact chunks multiples of a few tokens. Where these
  are blocks, hits are equal. Where they are parts of a block, ours also finds the beginning of a block that
  vLLM computes again: at least. Whole chunks larger than a block have no counterpart and are not compared.
- vLLM indexes generated tokens; ours does so with ``cache_generated``, as here. vLLM indexes a block when
  it schedules the step that fills it, ours when that step is done; here no request looks while a step runs.
- Both recompute the last token, and several groups agree on a hit at the same block size. EAGLE is off.
- Both evict the least recently used content, and the end of a sequence before its beginning. With one KV
  group and equal pools, hits are therefore equal under eviction, too. Ours allocates the block of the first
  generated token at admission, vLLM a step later; requests here generate at least two tokens to hide that.
- vLLM frees blocks behind a window at every step, ours when a sequence takes its next block. Both happen at
  the same step if the window without its last token is whole blocks; only such windows are compared under
  eviction.
- vLLM's KV groups share one pool; ours have one each, here as large as vLLM's. Their histories are the same
  only until the first hit that differs: ours must be longer there. Later a single hit may be shorter,
  because ours only read content that vLLM computed again, which changes the order of eviction. The sum of
  hits may not be smaller.
- Live requests always fit in both, so evictions take only cached content.
"""

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import hypothesis.strategies as st
import pytest
from hypothesis import given

from scheduler_svc.kv.cache import CacheOptions
from scheduler_svc.shapes.shape_config import ShapeConfig
from tests.support.property_settings import scaled
from tests.support.scheduler import vllm_peer
from tests.support.scheduler.kv_cache_driver import KvCacheDriver

pytestmark = pytest.mark.property

SLOW = pytest.mark.slow

BLOCK = 8
MAX_LEN = 160
MAX_LIVE = 3
# Most blocks that all live requests together need in one group.
LIVE_BLOCKS = MAX_LIVE * (MAX_LEN // BLOCK + 1)
AMPLE = 1_600
FULL = (None,)


class Cache(Protocol):
    """A KV cache under comparison."""

    def admit(self, request_id: str, token_ids: Sequence[int], cache_salt: str) -> int | None:
        """Prefills a request; returns its cached tokens, or None if it does not fit."""

    def append(self, request_id: str, token_ids: Sequence[int]) -> bool:
        """Generates tokens; returns False if they do not fit."""

    def free(self, request_id: str) -> None:
        """Ends a request."""


@dataclass(frozen=True)
class Turn:
    """One request of a conversation."""

    conversation: int
    """The conversation that it continues; all of them share three system prompts."""
    keep: int
    """Tokens of the history to keep; fewer than all stand for an edited earlier message."""
    user: int
    """New tokens of the prompt."""
    generated: int
    """Tokens of the answer, which join the history."""
    lingers: bool
    """Whether the request is still alive while the next one runs."""
    tenant: int
    """0 or 1; tenants share nothing."""


TURNS = st.lists(
    st.builds(
        Turn, conversation=st.integers(0, 5), keep=st.integers(0, MAX_LEN) | st.just(MAX_LEN), user=st.integers(0, 40),
        generated=st.integers(2, 24), lingers=st.booleans(), tenant=st.sampled_from((0, 0, 0, 1)),
    ),
    min_size=4, max_size=24,
)  # fmt: skip
SYSTEM_PROMPTS = ([11] * 21, [12] * 32, [11] * 16 + [13] * 24)


def _shapes(chunk: int) -> ShapeConfig:
    return ShapeConfig(MAX_LEN, MAX_LIVE, chunk, BLOCK, (MAX_LIVE,))


def play(turns: Sequence[Turn], *caches: Cache) -> list[tuple[int, ...]]:
    """Runs the same requests through all caches; returns, per request, the tokens that each cache found."""
    hits: list[tuple[int, ...]] = []
    histories: dict[tuple[int, int], list[int]] = {}
    alive: list[str] = []
    fresh = itertools.count(100)
    for index, turn in enumerate(turns):
        key = (turn.tenant, turn.conversation)
        history = histories.get(key) or SYSTEM_PROMPTS[turn.conversation % 3]
        prompt = [*history[: turn.keep], *itertools.islice(fresh, turn.user)][: MAX_LEN - turn.generated] or [
            1
        ]
        answer = list(itertools.islice(fresh, turn.generated))
        request_id = f"r{index}"
        found = [cache.admit(request_id, prompt, "ab"[turn.tenant]) for cache in caches]
        assert all(hit is not None for hit in found), f"{request_id} fits, and was not admitted: {found}"
        hits.append(tuple(hit or 0 for hit in found))
        assert all(cache.append(request_id, answer) for cache in caches), "its tokens fit"
        histories[key] = prompt + answer
        alive.append(request_id)
        while len(alive) > (MAX_LIVE - 1 if turn.lingers else 0):
            for cache in caches:
                cache.free(alive[0])
            del alive[0]
    for request_id in alive:
        for cache in caches:
            cache.free(request_id)
    return hits


def compare(
    turns: Sequence[Turn], windows: Sequence[int | None], *, chunk: int = BLOCK, blocks: int = AMPLE,
    options: CacheOptions = CacheOptions(cache_generated=True),  # noqa: B008 - immutable
) -> list[tuple[int, ...]]:  # fmt: skip
    """Returns (ours, vLLM's) per request; ``blocks`` is the size of each of our pools and of vLLM's pool."""
    theirs = vllm_peer.KvCachePeer(
        windows, num_blocks=blocks, block_size=BLOCK, max_model_len=MAX_LEN, chunk=chunk
    )
    return play(turns, KvCacheDriver(windows, _shapes(chunk), blocks, options), theirs)


def random_turns(seed: int, count: int) -> list[Turn]:
    """Returns a long trace, always the same for a seed."""
    dice = random.Random(seed)
    return [
        Turn(
            conversation=dice.randrange(6), keep=dice.choice((MAX_LEN, MAX_LEN, dice.randrange(MAX_LEN))),
            user=dice.randrange(41), generated=dice.randrange(2, 25), lingers=dice.random() < 0.5,
            tenant=dice.choice((0, 0, 0, 1)),
        )
        for _ in range(count)
    ]  # fmt: skip


def first_difference(hits: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """Returns the first pair of hits that differ; (0, 0) if none do."""
    return next(((ours, theirs) for ours, theirs in hits if ours != theirs), (0, 0))


# Each example builds new vLLM objects.
examples = scaled(100)
WINDOWS = st.sampled_from((2, 5, BLOCK, 9, 12, 24, 33))
# Windows that free a block exactly when the next one is needed.
EVEN_WINDOWS = st.sampled_from((BLOCK + 1, 2 * BLOCK + 1, 4 * BLOCK + 1))


@pytest.fixture(autouse=True, scope="module")
def _vllm() -> None:
    vllm_peer.prepare()


@examples
@given(turns=TURNS, full=st.booleans(), windows=st.lists(WINDOWS, max_size=2, unique=True))
def test_hits_are_those_of_vllm(turns: list[Turn], full: bool, windows: list[int]) -> None:
    """Full attention, sliding windows, or both, and room for everything: each hit is equal."""
    groups = (*FULL, *windows) if full or not windows else windows[:1]
    assert all(ours == theirs for ours, theirs in compare(turns, groups))


@examples
@given(turns=TURNS, window=st.none() | EVEN_WINDOWS, spare=st.integers(1, 30))
def test_one_group_evicts_what_vllm_evicts(turns: list[Turn], window: int | None, spare: int) -> None:
    """One group and a pool little larger than the live requests: each hit is equal."""
    assert all(ours == theirs for ours, theirs in compare(turns, (window,), blocks=LIVE_BLOCKS + spare))


@pytest.mark.parametrize(
    ("window", "spare"),
    [
        (None, 2),
        (9, 40),
        *(pytest.param(*each, marks=SLOW) for each in ((None, 40), (9, 2), (33, 2), (33, 40))),
    ],
)
def test_one_group_evicts_what_vllm_evicts_for_long(window: int | None, spare: int) -> None:
    """The same over hundreds of requests and thousands of evictions."""
    hits = compare(random_turns(spare, 400), (window,), blocks=LIVE_BLOCKS + spare)
    assert all(ours == theirs for ours, theirs in hits)
    assert sum(ours > 0 for ours, _ in hits) > 200


@examples
@given(turns=TURNS, window=EVEN_WINDOWS, spare=st.integers(1, 30))
def test_hybrids_evict_no_more_than_vllm(turns: list[Turn], window: int, spare: int) -> None:
    """Full attention beside a sliding window in small pools: at the first difference, ours kept more."""
    ours, theirs = first_difference(compare(turns, (None, window), blocks=2 * LIVE_BLOCKS + spare))
    assert ours >= theirs


@pytest.mark.parametrize(
    "windows", [(None, 9), *(pytest.param(each, marks=SLOW) for each in ((None, 33), (None, 12, 33)))]
)
def test_hybrids_evict_no_more_than_vllm_for_long(windows: tuple[int | None, ...]) -> None:
    """The same over hundreds of requests and thousands of evictions, and in sum."""
    hits = compare(random_turns(1, 400), windows, blocks=len(windows) * LIVE_BLOCKS + 20)
    ours, theirs = first_difference(hits)
    assert ours > theirs
    assert sum(ours for ours, _ in hits) > sum(theirs for _, theirs in hits)


@examples
@given(
    turns=TURNS,
    chunk=st.sampled_from((1, 2, 4)),
    windows=st.sampled_from(((None,), (9,), (None, 12), (None, 5, 33))),
)
def test_chunks_smaller_than_blocks_find_more(
    turns: list[Turn], chunk: int, windows: tuple[int | None, ...]
) -> None:
    """Room for everything: each hit is at least vLLM's, and longer by less than a block."""
    assert all(theirs <= ours < theirs + BLOCK for ours, theirs in compare(turns, windows, chunk=chunk))


@examples
@given(
    turns=TURNS,
    chunk=st.sampled_from((2, 8, 32)),
    finest=st.sampled_from((2, 4, 8)),
    windows=st.sampled_from(((None,), (9,), (None, 12), (None, 5, 33))),
)
def test_exact_chunks_find_more_at_any_size(
    turns: list[Turn], chunk: int, finest: int, windows: tuple[int | None, ...]
) -> None:
    """Hits end inside chunks and blocks: each is at least vLLM's, and longer by less than a block."""
    options = CacheOptions(cache_generated=True, chunk_starts="exact", finest_hit=finest)
    hits = compare(turns, windows, chunk=chunk, options=options)
    assert all(theirs <= ours < theirs + BLOCK for ours, theirs in hits)


@examples
@given(
    turns=TURNS, chunk=st.sampled_from((1, 2, 4)), window=st.none() | EVEN_WINDOWS, spare=st.integers(1, 30)
)
def test_chunks_smaller_than_blocks_evict_no_more(
    turns: list[Turn], chunk: int, window: int | None, spare: int
) -> None:
    """A small pool: at the first difference, ours found more."""
    ours, theirs = first_difference(compare(turns, (window,), chunk=chunk, blocks=LIVE_BLOCKS + spare))
    assert ours >= theirs


@pytest.mark.parametrize(
    ("window", "chunk"),
    [(None, 2), (9, 4), *(pytest.param(*each, marks=SLOW) for each in ((None, 4), (9, 2), (33, 2), (33, 4)))],
)
def test_chunks_smaller_than_blocks_find_more_for_long(window: int | None, chunk: int) -> None:
    """Hundreds of requests in a small pool: keeping partial blocks never costs more than it gains."""
    hits = compare(random_turns(1, 400), (window,), chunk=chunk, blocks=LIVE_BLOCKS + 20)
    assert sum(ours for ours, _ in hits) > sum(theirs for _, theirs in hits)
