"""Requests that share a prefix while it is being computed."""

import pytest

from protos.errors import InvalidArgument
from protos.steps import GroupKind
from scheduler_svc.requests.request import RequestState
from scheduler_svc.shapes.shape_config import KvGroup
from tests.support.scheduler.factories import (
    FULL,
    Rig,
    expected_tokens,
    make_rig,
    make_shapes,
    make_submission,
)

SHARED = list(range(20, 36))
KINDS = [
    (FULL,),
    (KvGroup(GroupKind.PAGED_WINDOW, 6),),
    (KvGroup(GroupKind.IN_PLACE_WINDOW, 4),),
    (FULL, KvGroup(GroupKind.IN_PLACE_WINDOW, 4)),
]


def state(rig: Rig, name: str) -> RequestState:
    request = rig.engine.find(name)
    assert request is not None
    return request.state


@pytest.mark.parametrize("groups", KINDS)
def test_the_second_of_two_waits_and_computes_only_the_rest(groups: tuple[KvGroup, ...]) -> None:
    """16 shared tokens of two requests are prefilled once, and both get their tokens."""
    rig = make_rig(groups=groups)
    prompts = {"a": [*SHARED, 50], "b": [*SHARED, 60]}
    for name, prompt in prompts.items():
        rig.submit(make_submission(prompt, request_id=name))
    assert state(rig, "b") is RequestState.DEFERRED
    assert (rig.engine.num_running, rig.engine.num_waiting) == (1, 1)
    rig.run()
    assert rig.device.prefilled == 18
    assert rig.sinks["b"].events[0].num_cached_tokens == 16
    for name, prompt in prompts.items():
        assert rig.sinks[name].tokens == expected_tokens(prompt, 8)


def test_a_request_waits_only_for_its_shared_prefix() -> None:
    """It resumes at its last shared boundary, while the first prompt is still being computed."""
    rig = make_rig()
    rig.submit(make_submission([*SHARED, *range(40, 60)], request_id="long"))
    rig.submit(make_submission([*SHARED[:4], 60], request_id="short"))
    rig.step()
    rig.step()
    assert state(rig, "short") is not RequestState.DEFERRED
    rig.run()
    assert rig.sinks["short"].events[0].num_cached_tokens == 4


def test_a_shared_prefix_may_end_inside_a_chunk() -> None:
    """With exact chunks, a request goes on once the chunk with its last shared token is computed."""
    rig = make_rig(make_shapes(chunk=8, block_size=8), chunk_starts="exact", finest_hit=2)
    rig.submit(make_submission([*SHARED, *range(40, 60)], request_id="long"))
    rig.submit(make_submission([*SHARED[:11], 60, 61], request_id="short"))
    assert state(rig, "short") is RequestState.DEFERRED
    rig.step()
    assert state(rig, "short") is RequestState.DEFERRED
    rig.step()
    assert state(rig, "short") is not RequestState.DEFERRED
    rig.run()
    assert rig.sinks["short"].events[0].num_cached_tokens == 10
    assert rig.sinks["short"].tokens == expected_tokens([*SHARED[:11], 60, 61], 8)


def test_waiting_for_a_prefix_needs_no_slot() -> None:
    """One runs and six wait for it; then all of them hit the cache."""
    rig = make_rig()
    for index in range(7):
        rig.submit(make_submission([*SHARED, 50 + index], request_id=f"r{index}", max_tokens=2))
    assert (rig.engine.num_running, rig.scheduler.num_deferred) == (1, 6)
    rig.run()
    assert rig.device.prefilled == 16 + 7


@pytest.mark.parametrize("groups", KINDS)
def test_when_the_first_request_is_aborted_the_next_one_computes(groups: tuple[KvGroup, ...]) -> None:
    """It uses the tokens computed so far, except a window with a pending copy."""
    rig = make_rig(groups=groups)
    for name in "abc":
        rig.submit(make_submission([*SHARED, ord(name) - 50], request_id=name, max_tokens=3))
    rig.step()
    assert rig.engine.abort("a")
    rig.run()
    in_place = any(group.kind is GroupKind.IN_PLACE_WINDOW for group in groups)
    assert rig.device.prefilled == 16 + 2 + (4 if in_place else 0)
    for name in "bc":
        assert rig.sinks[name].tokens == expected_tokens([*SHARED, ord(name) - 50], 3)


@pytest.mark.parametrize("why", ["refused", "failed", "preempted"])
@pytest.mark.parametrize("groups", KINDS)
def test_when_the_first_request_leaves_the_others_go_on(groups: tuple[KvGroup, ...], why: str) -> None:
    """The worker refuses it, a step of it fails, or an urgent request takes its slot."""
    rig = make_rig(make_shapes(max_num_seqs=2, buckets=(1, 2)), groups=groups)
    refusal = InvalidArgument("cannot be constrained")
    if why == "refused":
        rig.refuses = lambda moment: refusal if moment.request_id == "a" else None
    if why == "failed":
        rig.fails = lambda moment: moment.request_id == "a" and not rig.failers
    for name in "abc":
        rig.submit(make_submission([*SHARED, ord(name) - 50], request_id=name, max_tokens=3))
    assert rig.scheduler.num_deferred == 2
    rig.step()
    if why == "preempted":
        for name in ("urgent", "too"):
            rig.submit(make_submission([5, len(name)], request_id=name, priority=-1))
        assert rig.engine.find("a").slot is None  # type: ignore[union-attr]
    rig.run()
    for name in "abc"[why == "refused" :]:
        assert rig.sinks[name].tokens == expected_tokens([*SHARED, ord(name) - 50], 3)
    assert (rig.sinks["a"].events[-1].error is refusal) == (why == "refused")
    assert rig.engine.num_waiting == 0


def test_a_request_does_not_wait_behind_a_less_urgent_one() -> None:
    """It computes the prefix itself and ends first."""
    rig = make_rig(num_blocks=200)
    owner = list(range(5, 45))
    rig.submit(make_submission(owner, request_id="owner", max_tokens=1, priority=5))
    for index in range(2):
        prompt = [3 + (31 * index + 3 * position) % 90 for position in range(40)]
        rig.submit(make_submission(prompt, request_id=f"between{index}", max_tokens=1, priority=3))
    rig.submit(make_submission([*owner[:20], 9], request_id="urgent", max_tokens=1))
    assert state(rig, "urgent") is RequestState.PREFILLING
    while rig.engine.find("urgent"):
        rig.step()
    assert [name for name, sink in rig.sinks.items() if sink.events] == ["urgent"]
    rig.run()
    assert rig.sinks["urgent"].tokens == expected_tokens([*owner[:20], 9], 1)
    assert rig.sinks["owner"].tokens == expected_tokens(owner, 1)


def test_without_prefix_caching_no_request_waits() -> None:
    """No prefix could be found."""
    rig = make_rig(prefix_caching=False)
    for name in "ab":
        rig.submit(make_submission([*SHARED, 50], request_id=name))
    assert rig.engine.num_running == 2


def test_a_deferred_request_waits_for_the_copy_of_an_in_place_window() -> None:
    """The copy runs a step after the chunk; before it, the second request would miss."""
    rig = make_rig(make_shapes(chunk=8, block_size=8), groups=(KvGroup(GroupKind.IN_PLACE_WINDOW, 4),))
    for name in "ab":
        rig.submit(make_submission([*SHARED[:8], ord(name) - 50, 60], request_id=name, max_tokens=2))
    rig.step()
    assert state(rig, "b") is RequestState.DEFERRED
    rig.run()
    assert rig.sinks["b"].events[0].num_cached_tokens == 8
