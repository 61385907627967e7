"""Steps that fail: requests run again, alone and elsewhere, and only one that fails everywhere fails."""

from dataclasses import replace

import pytest

from protos.errors import Internal, InvalidArgument
from protos.steps import Decode, StepPlan, StepResult
from scheduler_svc.requests.sampling import FinishReason
from tests.support.scheduler.factories import Rig, expected_tokens, make_rig, make_submission
from tests.support.scheduler.second_replica import add_replica, run
from tests.support.scheduler.simulated_device import Kind, Moment, reaches


def planned(rig: Rig) -> StepPlan:
    """Dispatches, and returns the next plan."""
    rig.engine.dispatch()
    plan = rig.scheduler.next_plan()
    assert plan is not None
    return plan


def submit_innocents(rig: Rig, count: int = 3) -> dict[str, list[int]]:
    """Submits requests; returns what they must receive."""
    prompts = {f"i{number}": [10 + number] * (3 + 4 * number) for number in range(count)}
    for name, prompt in prompts.items():
        rig.submit(make_submission(prompt, request_id=name))
    return {name: expected_tokens(prompt, 8) for name, prompt in prompts.items()}


def check_innocents(rig: Rig, innocents: dict[str, list[int]]) -> None:
    """Checks that each request got exactly its tokens."""
    for name, wanted in innocents.items():
        assert rig.sinks[name].tokens == wanted
        assert rig.sinks[name].events[-1].finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("lease", [1, 8])
@pytest.mark.parametrize(
    ("kind", "end"), [("admit", 0), ("chunk", 0), ("chunk", 7), ("decode", 0), ("decode", 14)]
)
def test_a_request_that_makes_steps_fail_fails_alone(kind: Kind, end: int, lease: int) -> None:
    """It fails with the device's error after max_step_failures; the others get all of their tokens."""
    rig = make_rig(lease_steps=lease)
    rig.fails = reaches(kind, "poison", end)
    innocents = submit_innocents(rig)
    for _ in range(4):
        rig.step()
    poison = rig.submit(make_submission([7] * 10, request_id="poison"))
    rig.run(300)
    assert isinstance(poison.events[-1].error, Internal)
    assert poison.events[-1].error.message == "the device failed at poison"
    assert rig.failers == ["poison"] * 4
    check_innocents(rig, innocents)


def test_a_step_that_fails_now_and_then_fails_nothing() -> None:
    """However many steps fail: only failures in a row count, and a step that works ends the row."""
    rig = make_rig()
    count = 0

    def flaky(_moment: Moment) -> bool:
        nonlocal count
        count += 1
        return count % 7 == 0

    rig.fails = flaky
    innocents = submit_innocents(rig)
    rig.run(1000)
    assert len(rig.failers) > 5
    check_innocents(rig, innocents)


def test_an_error_of_the_request_itself_fails_it_at_once() -> None:
    """An InvalidArgument for a step of one request is not tried again."""
    rig = make_rig()
    sink = rig.submit(make_submission())
    plan = rig.scheduler.next_plan()
    assert plan is not None
    rig.scheduler.update(StepResult(plan.step, error=InvalidArgument("too long")))
    assert isinstance(sink.events[-1].error, InvalidArgument)
    assert rig.scheduler.num_running == 0


def test_an_error_of_one_request_in_a_batch_fails_that_one_alone() -> None:
    """Which request it is shows when each runs alone."""
    rig = make_rig()
    innocents = submit_innocents(rig)
    bad = rig.submit(make_submission([7], request_id="bad"))
    while (plan := rig.scheduler.next_plan()) is not None:
        rig.engine.dispatch()
        if bad.tokens and plan.work is not None and not bad.events[-1].error:
            slots = getattr(plan.work, "slots", ())
            request = rig.engine.find("bad")
            if request is not None and request.slot in slots:
                rig.scheduler.update(StepResult(plan.step, error=InvalidArgument("too many")))
                continue
        rig.scheduler.update(rig.device.run(plan))
    assert isinstance(bad.events[-1].error, InvalidArgument)
    check_innocents(rig, innocents)


def test_a_broken_device_fails_no_request_while_another_replica_lives() -> None:
    """Each of its requests runs elsewhere next, even if it must wait there."""
    rig = make_rig()
    second = add_replica(rig)
    rig.fails = lambda _: True
    innocents = submit_innocents(rig, 12)
    run(rig, second)
    assert rig.failers
    assert len(set(rig.failers)) == len(rig.failers), "no request is tried there twice"
    check_innocents(rig, innocents)


def test_a_poison_request_is_tried_on_every_replica() -> None:
    """With max_step_failures 1 it fails after one step on each of two."""
    rig = make_rig(max_step_failures=1)
    second = add_replica(rig)
    second.device.fails = rig.fails = reaches("decode", "poison", 8)
    innocents = submit_innocents(rig, 4)
    poison = rig.submit(make_submission([7] * 6, request_id="poison"))
    run(rig, second)
    assert isinstance(poison.events[-1].error, Internal)
    assert (rig.failers.count("poison"), second.failed) == (1, 1)
    check_innocents(rig, innocents)


def test_a_plan_that_fails_keeps_the_tokens_of_its_earlier_steps() -> None:
    """The request continues behind them; none is lost or repeated."""
    rig = make_rig(lease_steps=8)
    sink = rig.submit(make_submission(max_tokens=20))
    while not rig.scheduler._decoding:
        rig.step()
    plan = rig.scheduler.next_plan()
    assert plan is not None
    rig.scheduler.update(replace(rig.device.run(plan), last=False))
    rig.scheduler.update(StepResult(plan.step, error=Internal("gone")))
    rig.run()
    assert sink.tokens == expected_tokens([5, 6, 7], 20)


@pytest.mark.parametrize("back", [False, True])
def test_a_fault_counts_once_against_a_request(back: bool) -> None:
    """Also if the plan behind the failed step fails with it, be the request back on the replica or not."""
    rig = make_rig(lease_steps=8)
    rig.submit(make_submission(max_tokens=30))
    while not isinstance((lease := planned(rig)).work, Decode):
        rig.scheduler.update(rig.device.run(lease))
    for _ in range(4):
        rig.scheduler.update(StepResult(lease.step, (7,), last=False))
    behind = rig.scheduler.next_plan()
    assert behind is not None
    rig.scheduler.update(StepResult(lease.step, error=Internal("the device failed")))
    if back:  # in another slot
        rig.submit(make_submission([9], request_id="urgent", priority=-1))
    rig.scheduler.update(StepResult(behind.step, error=Internal("the device failed")))
    request = rig.engine.find("r")
    assert request is not None
    assert (request.step_failures, request.slot) == (1, 1 if back else None)
