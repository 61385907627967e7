"""Several replicas on one engine: placement of requests."""

from dataclasses import replace

import pytest

from protos.errors import Internal
from protos.steps import StepResult
from scheduler_svc.replica.quarantine import Loss
from tests.support.scheduler.factories import (
    Rig,
    expected_tokens,
    make_rig,
    make_shapes,
    make_submission,
)
from tests.support.scheduler.second_replica import add_replica, run


def place_of(rig: Rig, name: str) -> str | None:
    request = rig.engine.find(name)
    assert request is not None
    return request.replica_id


def test_a_request_goes_where_its_prefix_is() -> None:
    """A request runs on the replica that has cached its prefix."""
    rig = make_rig()
    second = add_replica(rig)
    homes = {}
    for name, first in (("a", 20), ("b", 50)):
        rig.submit(make_submission(range(first, first + 17), request_id=name, max_tokens=20))
        homes[first] = place_of(rig, name)
    assert set(homes.values()) == {"replica-0", "replica-1"}
    run(rig, second)
    for name, first in (("c", 50), ("d", 20)):
        sink = rig.submit(make_submission(range(first, first + 18), request_id=name))
        assert place_of(rig, name) == homes[first]
        run(rig, second)
        assert sink.events[0].num_cached_tokens == 16


def test_a_prefix_that_is_being_computed_counts_as_cached() -> None:
    """A second request waits beside the first instead of computing the same prefix elsewhere."""
    rig = make_rig()
    second = add_replica(rig)
    rig.submit(make_submission([*range(20, 60), 3], request_id="a"))
    for _ in range(7):
        rig.step()
        second.step()
    rig.submit(make_submission([*range(20, 60), 4], request_id="b"))
    assert place_of(rig, "a") == place_of(rig, "b")
    run(rig, second)
    assert rig.device.prefilled + second.device.prefilled == 42


def test_a_request_is_placed_only_where_its_full_length_fits() -> None:
    """A small free replica does not get a request if the output would not fit."""
    rig = make_rig(num_blocks=17)
    second = add_replica(rig, num_blocks=9)
    for index in range(5):
        rig.submit(make_submission([5 + index, 6, 7], request_id=f"r{index}", max_tokens=50))
    assert second.scheduler.num_running == 0
    run(rig, second)
    for index in range(5):
        assert rig.sinks[f"r{index}"].tokens == expected_tokens([5 + index, 6, 7], 50)


def test_a_new_replica_takes_waiting_requests_at_once() -> None:
    """Waiting requests run as soon as a replica attaches."""
    rig = make_rig()
    for index in range(6):
        rig.submit(make_submission([5 + index], request_id=f"r{index}"))
    assert len(rig.engine.waiting) == 2
    second = add_replica(rig)
    assert (len(rig.engine.waiting), second.scheduler.num_running) == (0, 2)


def test_preemption_happens_on_the_replica_with_less_urgent_requests() -> None:
    """Two replicas are full; the one with less urgent requests preempts."""
    rig = make_rig()
    second = add_replica(rig)
    for index in range(8):
        rig.submit(make_submission([5 + index], request_id=f"r{index}", max_tokens=20))
    lesser = [name for name in (f"r{index}" for index in range(8)) if place_of(rig, name) == "replica-1"]
    for name in lesser:
        rig.engine.abort(name)
    for index in range(4):
        rig.submit(make_submission([50 + index], request_id=f"low{index}", priority=3, max_tokens=20))
    rig.submit(make_submission([90], request_id="urgent", priority=-1))
    assert place_of(rig, "urgent") == "replica-1"
    assert second.scheduler.stats.preemptions["priority"] == 1
    assert not rig.scheduler.stats.preemptions


@pytest.mark.parametrize("reached", [True, False])
@pytest.mark.parametrize("num_slots", [1, 3])
def test_a_failed_copy_does_not_restart_a_request_that_moved(num_slots: int, reached: bool) -> None:
    """The moved request and the new owner of its slot continue unchanged after the failed step."""
    shapes = make_shapes(chunk=4, block_size=16, max_num_seqs=1, buckets=(1,))
    rig = make_rig(shapes)
    rig.submit(make_submission(range(5, 14), request_id="warm", max_tokens=1))
    rig.run()
    moved = rig.submit(make_submission([*range(5, 14), 77], request_id="moved", max_tokens=8, priority=5))
    plan = rig.scheduler.next_plan()
    assert plan is not None
    assert plan.copies
    second = add_replica(
        rig, shapes=replace(shapes, max_num_seqs=num_slots, buckets=tuple(range(1, num_slots + 1)))
    )
    blockers = [f"blocker{index}" for index in range(num_slots)]
    for index, name in enumerate(blockers):
        rig.submit(make_submission([60 + index, 9], request_id=name, max_tokens=8))
    assert {place_of(rig, name) for name in blockers} == {"replica-1"}
    urgent = rig.submit(make_submission([8, 8, 8], request_id="urgent", max_tokens=30))
    rig.engine.abort(blockers[-1])
    assert (place_of(rig, "urgent"), place_of(rig, "moved")) == ("replica-0", "replica-1")
    if reached:
        rig.device.run(plan)
    rig.scheduler.update(StepResult(plan.step, error=Internal("device fault")))
    assert "fault" not in rig.scheduler.stats.preemptions
    assert (place_of(rig, "urgent"), place_of(rig, "moved")) == ("replica-0", "replica-1")
    run(rig, second)
    assert moved.tokens == expected_tokens([*range(5, 14), 77], 8)
    assert urgent.tokens == expected_tokens([8, 8, 8], 30)


def test_prefix_keys_are_recomputed_for_other_hash_blocks() -> None:
    """Requests of a lost replica get new prefix keys on a replica with larger chunks and blocks."""
    rig = make_rig()
    prompts = {name: [*range(20, 24), *range(first, first + 20)] for name, first in (("a", 40), ("b", 60))}
    for name, prompt in prompts.items():
        rig.submit(make_submission(prompt, request_id=name))
    rig.step()
    rig.engine.detach("replica-0", Loss.DIED)
    rig.shapes = make_shapes(chunk=8, block_size=8)
    rig.start()
    rig.run()
    for name, prompt in prompts.items():
        assert rig.sinks[name].tokens == expected_tokens(prompt, 8)
