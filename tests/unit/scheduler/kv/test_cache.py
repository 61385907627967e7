"""All KV groups of a replica together: hits, copies and kept windows, case by case."""

import pytest

from protos.steps import GroupKind
from scheduler_svc.kv.cache import KvCache
from scheduler_svc.kv.prefix_index import KeepEnds, KeepJunctions, KeepPolicy
from scheduler_svc.kv.sequence import SequenceKv
from scheduler_svc.shapes.shape_config import KvGroup
from tests.support.scheduler.factories import (
    FULL,
    make_request,
    make_rig,
    make_sampling,
    make_sequence,
    make_shapes,
    make_submission,
)

PAGED = KvGroup(GroupKind.PAGED_WINDOW, 6)
IN_PLACE = KvGroup(GroupKind.IN_PLACE_WINDOW, 4)


def make_cache(
    *groups: KvGroup, chunk: int = 4, block_size: int = 4, num_blocks: int = 17,
    keep: KeepPolicy | None = None,
) -> KvCache:  # fmt: skip
    shapes = make_shapes(chunk=chunk, block_size=block_size)
    return KvCache(shapes, groups, [num_blocks] * len(groups), model="m", keep=keep)


def prefill(kv: KvCache, prompt: range | list[int], *, chunk: int = 4) -> SequenceKv:
    """Admits a sequence and computes it as a worker would, copies included."""
    request = make_sequence(prompt)
    assert kv.admit(request)
    while request.num_computed < len(request.token_ids):
        start = request.num_computed
        end = min(start + chunk, len(request.token_ids))
        assert kv.grow(request, end) is not None
        kv.settle_copies(kv.copies.take())
        kv.prefixes.index_chunk(request, start, end)
        request.num_computed = end
    kv.settle_copies(kv.copies.take())
    return request


def test_log_probabilities_of_a_prompt_disable_prefix_hits() -> None:
    """The request computes its whole prompt; later requests hit what it computed."""
    kv = make_cache(FULL)
    prefill(kv, range(20, 36))
    wanting = make_request(range(20, 40), sampling=make_sampling(prompt_logprobs=0)).kv
    assert kv.prefixes.peek(wanting) == 0
    assert kv.admit(wanting)
    assert (wanting.num_cached, wanting.num_computed) == (0, 0)
    for start in range(0, 20, 4):
        assert kv.grow(wanting, start + 4) is not None
        kv.prefixes.index_chunk(wanting, start, start + 4)
        wanting.num_computed = start + 4
    assert kv.prefixes.peek(make_sequence(range(20, 41))) == 20


@pytest.mark.parametrize(("keep", "at_8"), [(KeepJunctions(), 8), (KeepEnds(), 0)])
def test_which_windows_are_kept(keep: KeepPolicy, at_8: int) -> None:
    """Both policies keep the end of a prompt; only one keeps earlier boundaries."""
    kv = make_cache(IN_PLACE, keep=keep)
    kv.release(prefill(kv, range(20, 34)))
    assert kv.prefixes.peek(make_sequence(range(20, 40))) == 12
    assert kv.prefixes.peek(make_sequence([*range(20, 28), 90])) == at_8


def test_a_junction_is_kept_from_the_second_prompt_on() -> None:
    """The junction is unknown when the first prompt passes it."""
    kv = make_cache(IN_PLACE, keep=KeepEnds())
    parting = [[*range(20, 28), *range(tail, tail + 8)] for tail in (40, 50, 60)]
    cached = []
    for prompt in parting:
        request = prefill(kv, prompt)
        cached.append(request.num_cached)
        kv.release(request)
    assert cached == [0, 0, 8]


def test_cheap_windows_are_evicted_first() -> None:
    """Room for three windows: the end of the first prompt outlives cheap boundaries of the second."""
    kv = make_cache(IN_PLACE, num_blocks=5)
    kv.release(prefill(kv, range(20, 29)))
    kv.release(prefill(kv, range(40, 61)))
    assert kv.prefixes.peek(make_sequence(range(20, 40))) == 8
    assert kv.prefixes.peek(make_sequence(range(40, 70))) == 20


def test_groups_shorten_a_hit_until_all_agree() -> None:
    """Windows kept at 4 and 12, and at 4 and 8: only 4 tokens are in both groups."""
    kv = make_cache(IN_PLACE, IN_PLACE)
    request = prefill(kv, range(20, 33))
    keys, _ = kv.prefixes.lookup_keys(request)
    for group, end in zip(kv.groups, (2, 3), strict=True):
        block = group.pool.lookup(keys[end - 1])
        assert block is not None
        group.pool.touch([block])
        group.pool._forget(block)
        group.pool.free([block])
    assert kv.prefixes.peek(request) == 4


def test_a_window_is_found_only_after_its_copy_was_run() -> None:
    """It is not found before the copy, after a failed step, or after a reset in between."""
    for done, reset, found in ((True, False, 4), (False, False, 0), (True, True, 0)):
        kv = make_cache(IN_PLACE)
        request = make_sequence(range(20, 26))
        assert kv.admit(request)
        assert kv.grow(request, 4) is not None
        kv.prefixes.index_chunk(request, 0, 4)
        assert kv.prefixes.peek(request) == 0
        copies = kv.copies.take()
        if reset:
            kv.prefixes.reset()
        kv.settle_copies(copies, done=done)
        assert kv.prefixes.peek(request) == found
        kv.release(request)
        assert kv.usage == 0


def test_a_sequence_as_large_as_the_memory_shortens_its_hit() -> None:
    """All eight blocks are needed and none is left for a copy, so the hit ends at a whole block."""
    kv = make_cache(FULL, chunk=2, num_blocks=9)
    kv.release(prefill(kv, range(20, 27), chunk=2))
    request = make_sequence([*range(20, 26), *range(50, 75)])
    assert kv.prefixes.peek(request) == 6
    assert kv.admit(request)
    assert request.num_cached == 4


def test_a_fork_outlives_its_origin_before_the_first_plan() -> None:
    """The origin's own copy stays queued, because the fork copies on from it."""
    kv = make_cache(FULL, chunk=2, block_size=8)
    kv.release(prefill(kv, range(20, 28), chunk=2))
    origin, fork = make_sequence(range(20, 28)), make_sequence(range(20, 28))
    assert kv.admit(origin)
    assert kv.fork(origin, fork, origin.num_computed)
    kv.release(origin)
    copies = kv.copies.take()
    first, second = copies
    assert first.target is second.source
    assert second.target is fork.tables[0].blocks[0]


@pytest.mark.parametrize("groups", [(FULL,), (PAGED,), (IN_PLACE,), (FULL, PAGED), (FULL, IN_PLACE)])
def test_a_hit_runs_the_chunks_of_a_miss(groups: tuple[KvGroup, ...]) -> None:
    """Chunks of 4 over blocks of 8: the rest of a prompt is cut where a miss would cut it."""
    rig = make_rig(make_shapes(chunk=4, block_size=8), groups=groups)
    cuts = []
    for name in "ab":
        rig.submit(make_submission(range(20, 35), request_id=name, max_tokens=1))
        plans = [plan.work for plan in rig.run() if plan.work is not None]
        cuts.append([(work.start, work.num_tokens) for work in plans])  # type: ignore[union-attr]
    assert cuts == [[(0, 4), (4, 4), (8, 4), (12, 3)], [(12, 3)]]


def test_a_shared_block_becomes_free_when_all_its_users_leave() -> None:
    """It counts once, and what the new sequence hits is neither missing nor free."""
    kv = make_cache(FULL, num_blocks=13)
    shared = [prefill(kv, [*range(20, 36), 40 + number]) for number in range(3)]
    pool = kv.groups[0].pool
    assert pool.num_free == 12 - 4 - 3
    new = make_sequence(range(60, 80))  # 6 blocks with its first token
    assert kv.num_to_leave(new, shared) == 1
    assert kv.num_to_leave(new, shared, at_least=2) == 2
    longer = make_sequence(range(50, 86))  # 10 blocks
    assert kv.num_to_leave(longer, shared[:2]) is None
    assert kv.num_to_leave(longer, shared) == 3
    assert kv.num_to_leave(make_sequence([*range(20, 36), 50]), shared) == 0
    assert (
        kv.num_to_leave(make_sequence([*range(20, 36), *range(60, 84)]), shared) == 2
    )  # 11 blocks, 4 of them hit
    for one in shared:
        assert not kv.admit(longer)
        kv.release(one)
    assert kv.admit(longer)
    kv.check_integrity()
