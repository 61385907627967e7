"""Plans that continue a lease before it ends, and what makes them void."""

from protos.steps import Decode, StepPlan, StepResult
from tests.support.scheduler.factories import (
    Rig,
    expected_tokens,
    make_request,
    make_rig,
    make_shapes,
    make_submission,
)

BLOCK = 8


def renewing(num_blocks: int = 65, *, lag: int = 0, cache_generated: bool = False) -> Rig:
    """A replica that leases 8 steps."""
    shapes = make_shapes(max_model_len=64, block_size=BLOCK, chunk=BLOCK, max_num_seqs=4)
    return make_rig(
        shapes,
        num_blocks=num_blocks,
        lease_steps=8,
        plans_ahead=True,
        lag=lag,
        cache_generated=cache_generated,
    )


def answer(rig: Rig, plan: StepPlan, steps: int, *, last: bool = False) -> None:
    """Delivers tokens of a plan's next steps."""
    for index in range(steps):
        rig.scheduler.update(StepResult(plan.step, (7,), last=last and index + 1 == steps))


def lease_in_flight(rig: Rig) -> StepPlan:
    """Returns the first lease of a request."""
    rig.submit(make_submission([5], max_tokens=40))
    rig.engine.dispatch()
    chunk = rig.scheduler.next_plan()
    assert chunk is not None
    rig.scheduler.update(StepResult(chunk.step, (7,)))
    plan = rig.scheduler.next_plan()
    assert plan is not None
    assert isinstance(plan.work, Decode)
    assert plan.work.lease == 8
    return plan


def test_a_lease_is_renewed_when_half_of_it_is_left() -> None:
    """The renewal begins where the lease ends, and gives the blocks of its own steps."""
    rig = renewing()
    lease = lease_in_flight(rig)
    answer(rig, lease, 3)
    assert rig.scheduler.plan_ahead() is None
    answer(rig, lease, 1)
    renewal = rig.scheduler.plan_ahead()
    assert renewal is not None
    assert renewal.continues
    assert isinstance(renewal.work, Decode)
    assert (renewal.work.positions, renewal.work.lease) == ((9,), 8)
    assert [len(growth.block_ids) for growth in renewal.grow] == [1]
    assert rig.scheduler.plan_ahead() is None
    answer(rig, lease, 4, last=True)
    answer(rig, renewal, 5)
    assert rig.scheduler.plan_ahead() is not None


def test_leases_follow_each_other_without_another_plan() -> None:
    """All tokens of a long answer come from one lease and its renewals."""
    rig = renewing()
    sink = rig.submit(make_submission([5], max_tokens=40))
    plans = rig.run()
    assert [type(plan.work).__name__ for plan in plans] == ["Prefill", "Decode", "NoneType"]
    assert len(rig.renewals) == 4
    assert sink.tokens == expected_tokens([5], 40)
    assert sum(bucket.steps for bucket in rig.scheduler.stats.buckets.values()) == 39


def test_a_renewal_ends_where_the_request_does() -> None:
    """No step is allowed beyond a request's last token."""
    rig = renewing()
    rig.submit(make_submission([5], max_tokens=15))
    rig.run()
    assert [plan.work.lease for plan in rig.renewals if isinstance(plan.work, Decode)] == [6]


def test_no_lease_is_renewed_while_a_prompt_waits() -> None:
    """The plan that ends the lease comes instead."""
    rig = renewing()
    lease = lease_in_flight(rig)
    answer(rig, lease, 4)
    rig.submit(make_submission([6, 7], request_id="new"))
    rig.engine.dispatch()
    assert rig.scheduler.plan_ahead() is None
    assert rig.scheduler.interrupt() is not None


def test_a_new_request_ends_lease_and_renewal() -> None:
    """The interrupt is behind the renewal, which is void; no token is lost, and the blocks are used later."""
    rig = renewing()
    first = rig.submit(make_submission([5], request_id="a", max_tokens=40))
    rig.step()
    rig.submit_meanwhile(6, make_submission([6, 7], request_id="b", max_tokens=4))
    plan = rig.scheduler.next_plan()
    assert plan is not None
    assert rig.answer(plan) == 6
    assert [rig.renewals[0].step, rig.interrupts[0].step] == [plan.step + 1, plan.step + 2]
    rig.run()
    assert first.tokens == expected_tokens([5], 40)
    assert rig.sinks["b"].tokens == expected_tokens([6, 7], 4)
    assert rig.scheduler.kv.groups[0].pool.num_free == rig.scheduler.kv.groups[0].pool.num_blocks


def test_a_block_that_fills_during_a_renewed_lease_can_be_found() -> None:
    """A renewal makes the blocks findable that have been filled since."""
    rig = renewing(cache_generated=True)
    lease = lease_in_flight(rig)
    answer(rig, lease, 8, last=False)
    assert rig.scheduler.cached_tokens(make_request([5, *[7] * BLOCK])) == 0
    assert rig.scheduler.plan_ahead() is not None
    assert rig.scheduler.cached_tokens(make_request([5, *[7] * BLOCK])) == BLOCK


def test_a_renewal_preempts_nothing() -> None:
    """Without a free block, the lease ends, and its end makes room."""
    rig = renewing()
    lease = lease_in_flight(rig)
    pool = rig.scheduler.kv.groups[0].pool
    pool.allocate(pool.num_free)
    answer(rig, lease, 4)
    renewal = rig.scheduler.plan_ahead()
    assert renewal is not None
    assert isinstance(renewal.work, Decode)
    assert renewal.work.lease == 2 * BLOCK - 9
    answer(rig, lease, 4, last=True)
    answer(rig, renewal, 4)
    assert rig.scheduler.plan_ahead() is None
    assert not rig.scheduler.stats.preemptions
