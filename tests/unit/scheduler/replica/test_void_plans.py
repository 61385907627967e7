"""Plans whose work did not run or failed: they count for no chunk, no step and no tenant."""

import pytest

from protos.errors import Internal
from protos.steps import Decode, Prefill, SlotOutput, StepPlan, StepResult, slots_of
from tests.support.scheduler.factories import Rig, expected_tokens, make_rig, make_shapes, make_submission

CHUNK = 4
LEASE = 8
BROKEN = Internal("broken")


def ahead(decode_steps_per_chunk: int = 1) -> Rig:
    shapes = make_shapes(max_model_len=64, chunk=CHUNK, block_size=8, max_num_seqs=4)
    return make_rig(shapes, lease_steps=LEASE, decode_steps_per_chunk=decode_steps_per_chunk)


def planned(plan: StepPlan | None) -> StepPlan:
    assert plan is not None
    return plan


def decoding(rig: Rig, *names: str) -> StepPlan:
    """Submits requests of one token each; returns the first lease that all of them decode in."""
    for name in names:
        rig.submit(make_submission([5], request_id=name, max_tokens=40))
    rig.engine.dispatch()
    while not isinstance((plan := planned(rig.scheduler.step())).work, Decode) or plan.work.lease < LEASE:
        rig.scheduler.update(rig.device.run(plan))
    assert len(plan.work.slots) == len(names)
    return plan


def decode_steps(rig: Rig) -> int:
    return sum(bucket.steps for bucket in rig.scheduler.stats.buckets.values())


def test_chunks_count_when_they_have_run() -> None:
    """A chunk that failed and the void one behind it are no prefill steps."""
    rig = ahead()
    rig.submit(make_submission(range(3, 3 + 3 * CHUNK), max_tokens=2))
    rig.engine.dispatch()
    scheduler = rig.scheduler
    first, second = planned(scheduler.step()), planned(scheduler.plan_ahead())
    assert second.continues
    scheduler.update(StepResult(first.step, error=BROKEN))
    scheduler.update(StepResult(second.step, void=True))
    assert not scheduler.stats.prefills
    assert sum(scheduler.stats.chunk_tokens.counts) == 0
    rig.device.slots.clear()
    rig.run()
    run = scheduler.stats.prefills[CHUNK]
    assert (run.steps, run.rows) == (3, 3 * CHUNK)
    assert sum(scheduler.stats.chunk_tokens.counts) == 3


def test_a_void_renewal_brings_no_chunk_forward() -> None:
    """A row jumps ahead, so the lease ends after five steps; a sixth follows before the next chunk."""
    rig = ahead(decode_steps_per_chunk=6)
    lease, scheduler = decoding(rig, "jumps", "goes-on"), rig.scheduler
    before = decode_steps(rig)
    for _ in range(LEASE // 2):
        scheduler.update(StepResult(lease.step, (7, 7), last=False))
    renewal = planned(scheduler.plan_ahead())
    assert renewal.continues
    assert isinstance(lease.work, Decode)
    jumps, goes_on = lease.work.slots
    scheduler.update(
        StepResult(lease.step, outputs=(SlotOutput(jumps, (7, 8, 9)), SlotOutput(goes_on, (7,))))
    )
    scheduler.update(StepResult(renewal.step, void=True))
    plans = []
    for _ in range(2):
        plans.append(planned(scheduler.step()))
        scheduler.update(StepResult(plans[-1].step, (7,) if isinstance(plans[-1].work, Decode) else ()))
    assert [type(plan.work) for plan in plans] == [Decode, Prefill]
    assert decode_steps(rig) - before == LEASE // 2 + 2


def test_a_step_that_ends_a_lease_counts_towards_the_next_chunk() -> None:
    """Five steps have run when a plan without work ends the lease; a sixth follows before the next chunk."""
    rig = ahead(decode_steps_per_chunk=6)
    lease, scheduler = decoding(rig, "r"), rig.scheduler
    for _ in range(LEASE // 2):
        scheduler.update(StepResult(lease.step, (7,), last=False))
    rig.submit(make_submission([6, 7], request_id="new"))
    rig.engine.dispatch()
    ended_by = planned(scheduler.interrupt())
    assert ended_by.work is None
    scheduler.update(StepResult(lease.step, (7,)))
    scheduler.update(StepResult(ended_by.step))
    plans = []
    for _ in range(2):
        plans.append(planned(scheduler.step()))
        scheduler.update(StepResult(plans[-1].step, (7,)))
    assert [type(plan.work) for plan in plans] == [Decode, Prefill]


def test_a_decode_step_that_failed_counts_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither as a step nor against its tenant: batch and suspect alike."""
    rig = ahead()
    charged: list[int] = []
    lease, scheduler = decoding(rig, "r"), rig.scheduler
    monkeypatch.setattr(rig.engine.waiting.tenants, "charge", lambda _, tokens: charged.append(tokens))
    scheduler.update(StepResult(lease.step, error=BROKEN))
    assert (decode_steps(rig), charged) == (0, [])
    rig.engine.dispatch()
    while not isinstance((plan := planned(scheduler.step())).work, Decode):
        scheduler.update(StepResult(plan.step, (7,)))
    charged.clear()
    scheduler.update(StepResult(plan.step, error=BROKEN))
    assert (decode_steps(rig), charged) == (0, [])


def test_after_a_void_plan_nothing_is_planned_ahead_until_nothing_is_in_flight() -> None:
    """A plan that continues a void one is void, too, and would be followed by another one for ever."""
    rig = make_rig(make_shapes(max_model_len=64, chunk=CHUNK, block_size=8))
    scheduler = rig.scheduler
    rig.submit(make_submission([5], request_id="r", max_tokens=40))
    rig.engine.dispatch()
    while not isinstance((first := planned(scheduler.step())).work, Decode):
        scheduler.update(rig.device.run(first))
    second = planned(scheduler.plan_ahead())
    (slot,) = slots_of(first.work)
    scheduler.update(StepResult(first.step, outputs=(SlotOutput(slot, (7,)),)))
    third = planned(scheduler.plan_ahead())
    assert isinstance(second.work, Decode)
    assert second.continues
    assert third.continues
    scheduler.update(StepResult(second.step, void=True))
    assert scheduler.plan_ahead() is None
    scheduler.update(StepResult(third.step, void=True))
    afresh = planned(scheduler.step())
    assert isinstance(afresh.work, Decode)
    assert (afresh.continues, list(afresh.work.positions)) == (False, [second.work.positions[0]])
    assert planned(scheduler.plan_ahead()).continues


def test_planning_afresh_waits_for_what_is_in_flight() -> None:
    """Then the next plan follows from results alone, and the requests get all of their tokens."""
    prompt = range(3, 3 + 3 * CHUNK)
    for afresh in (False, True):
        rig = ahead()
        sink = rig.submit(make_submission(prompt, request_id="r", max_tokens=40))
        rig.engine.dispatch()
        first = planned(rig.scheduler.step())
        if afresh:
            rig.scheduler.plan_afresh()
        assert (rig.scheduler.plan_ahead() is None) == afresh
        if afresh:
            rig.scheduler.update(rig.device.run(first))
            rig.run()
            assert sink.tokens == expected_tokens(list(prompt), 40)
