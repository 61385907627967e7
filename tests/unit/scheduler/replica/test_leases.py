"""Plans that allow several decode steps in a row: how many, and what ends them early."""

import pytest

from protos.errors import Internal
from protos.steps import Decode, Prefill, StepPlan, StepResult
from tests.support.scheduler.factories import (
    Rig,
    expected_tokens,
    make_request,
    make_rig,
    make_shapes,
    make_submission,
)

BLOCK = 8


def leasing() -> Rig:
    return make_rig(make_shapes(max_model_len=64, block_size=BLOCK, max_num_seqs=4), lease_steps=32)


def prompt_of(row: int, length: int) -> list[int]:
    return [3 + (row * 31 + position * 7) % 90 for position in range(length)]


def leases(plans: list[StepPlan]) -> list[int]:
    return [plan.work.lease for plan in plans if isinstance(plan.work, Decode)]


def test_a_lease_ends_where_the_request_does() -> None:
    """One prompt token and 19 inputs need three blocks; all are reserved with the first decode step."""
    rig = leasing()
    sink = rig.submit(make_submission([5], max_tokens=20))
    plans = rig.run()
    assert leases(plans) == [19]
    assert sum(len(growth.block_ids) for plan in plans for growth in plan.grow) == 2
    assert sink.tokens == expected_tokens([5], 20)


def test_a_lease_ends_where_no_block_is_free_for_a_request() -> None:
    """Blocks are reserved ahead only while there are free ones: no request is preempted for it."""
    rig = make_rig(
        make_shapes(max_model_len=64, block_size=BLOCK, max_num_seqs=4), num_blocks=1 + 5, lease_steps=32
    )
    sinks = [
        rig.submit(make_submission([5 + index], request_id=str(index), max_tokens=18)) for index in (0, 1)
    ]
    plans = rig.run()
    # Six blocks are needed in the end. With five, both requests share what is free, and one waits at the end.
    assert max(leases(plans)) > BLOCK
    assert [sink.tokens for sink in sinks] == [expected_tokens([5 + index], 18) for index in (0, 1)]
    assert rig.scheduler.stats.preemptions["memory"] == 1


@pytest.mark.parametrize("num_rows", [8, 32, 64, 128])
def test_rows_that_need_blocks_at_different_steps_share_long_leases(num_rows: int) -> None:
    """The mean lease is nearly as long as the setting allows, however many rows there are."""
    block, longest, steps = 128, 32, 640
    rig = make_rig(
        make_shapes(
            max_model_len=2048, block_size=block, chunk=block, max_num_seqs=num_rows, buckets=(num_rows,)
        ),
        num_blocks=1 + num_rows * 16, lease_steps=longest,
    )  # fmt: skip
    for row in range(num_rows):
        rig.submit(
            make_submission(prompt_of(row, 1 + row * block // num_rows), request_id=str(row), max_tokens=1000)
        )
    while rig.scheduler.prefill_backlog or rig.scheduler.num_running < num_rows:
        rig.step()
    plans = [rig.scheduler.next_plan()]
    decoded = 0
    while decoded < steps:
        plan = plans[-1]
        assert plan is not None
        assert isinstance(plan.work, Decode)
        for index in range(plan.work.lease):
            last = index + 1 == plan.work.lease
            rig.scheduler.update(StepResult(plan.step, (7,) * num_rows, last=last))
        decoded += plan.work.lease
        plans.append(rig.scheduler.next_plan())
    assert decoded / (len(plans) - 1) > 31


def test_a_block_that_fills_during_a_lease_can_be_found() -> None:
    """A lease that ran past the block's last token ends; another request then hits the block."""
    rig = make_rig(
        make_shapes(max_model_len=64, block_size=BLOCK, chunk=BLOCK, max_num_seqs=4),
        cache_generated=True, lease_steps=12,
    )  # fmt: skip
    rig.submit(make_submission([5], request_id="runs", max_tokens=40))
    for _ in range(4):
        rig.step()
    known = [5, *expected_tokens([5], 40)][: 3 * BLOCK]
    assert rig.scheduler.cached_tokens(make_request([*known, 9])) == 3 * BLOCK


def test_the_setting_limits_a_lease() -> None:
    """No plan leases more steps than the setting allows."""
    rig = make_rig(make_shapes(max_model_len=64, block_size=BLOCK), lease_steps=3)
    rig.submit(make_submission([5], max_tokens=8))
    assert leases(rig.run()) == [3, 3, 1]


def test_nothing_is_leased_while_a_prompt_waits_for_its_turn() -> None:
    """Decode steps and chunks take turns."""
    rig = leasing()
    rig.submit(make_submission([5], request_id="a", max_tokens=30))
    rig.step()
    rig.submit(make_submission(range(3, 19), request_id="b", max_tokens=2))
    plans = [rig.step() for _ in range(7)]
    assert leases([plan for plan in plans if plan is not None])[:3] == [1, 1, 1]


def test_the_plan_that_ends_a_lease_carries_the_chunk() -> None:
    """A new request's first chunk follows the running step at once, and a decode step follows the chunk."""
    rig = leasing()
    rig.submit(make_submission([5], request_id="a", max_tokens=30))
    rig.step()
    lease = rig.scheduler.next_plan()
    assert lease is not None
    rig.submit(make_submission(range(3, 15), request_id="b", max_tokens=4))
    ended_by = rig.scheduler.interrupt()
    assert ended_by is not None
    assert isinstance(ended_by.work, Prefill)
    assert ended_by.work.num_tokens == rig.shapes.chunk
    assert rig.scheduler.interrupt() is None
    rig.scheduler.update(rig.device.run(lease))
    rig.scheduler.update(rig.device.run(ended_by))
    assert [type(plan.work) for plan in (rig.step(), rig.step()) if plan is not None] == [Decode, Prefill]
    rig.run()
    assert rig.sinks["a"].tokens == expected_tokens([5], 30)
    assert rig.sinks["b"].tokens == expected_tokens(range(3, 15), 4)


def test_decode_steps_between_chunks_are_counted_across_a_lease() -> None:
    """With two decode steps for each chunk, a lease that has run one step is ended without a chunk."""
    rig = make_rig(make_shapes(max_model_len=64, block_size=BLOCK), lease_steps=32, decode_steps_per_chunk=2)
    rig.submit(make_submission([5], request_id="a", max_tokens=30))
    rig.step()
    lease = rig.scheduler.next_plan()
    assert lease is not None
    rig.submit(make_submission(range(3, 15), request_id="b", max_tokens=4))
    ended_by = rig.scheduler.interrupt()
    assert ended_by is not None
    assert ended_by.work is None
    rig.scheduler.update(rig.device.run(lease))
    rig.scheduler.update(rig.device.run(ended_by))
    plans = [rig.step() for _ in range(2)]
    assert [type(plan.work) for plan in plans if plan is not None] == [Decode, Prefill]


def test_a_lease_is_not_interrupted_without_a_reason() -> None:
    """Without new work there is no plan to send."""
    rig = leasing()
    rig.submit(make_submission([5], max_tokens=20))
    rig.step()
    assert rig.scheduler.interrupt() is None
    plan = rig.scheduler.next_plan()
    assert plan is not None
    assert rig.scheduler.interrupt() is None
    assert rig.scheduler.has_pending


def test_more_results_than_leased_steps_are_an_error() -> None:
    """The replica refuses the extra result."""
    rig = make_rig(make_shapes(max_model_len=64, block_size=BLOCK), lease_steps=2)
    rig.submit(make_submission([5], max_tokens=20))
    rig.step()
    plan = rig.scheduler.next_plan()
    assert plan is not None
    for _ in range(2):
        rig.scheduler.update(StepResult(plan.step, (7,), last=False))
    with pytest.raises(Internal, match="more steps than the 2"):
        rig.scheduler.update(StepResult(plan.step, (7,), last=False))


def test_a_lost_worker_loses_no_token_of_a_lease() -> None:
    """The requests continue on another replica with the tokens they have."""
    rig = leasing()
    sink = rig.submit(make_submission([5], max_tokens=20))
    rig.step()
    plan = rig.scheduler.next_plan()
    assert plan is not None
    rig.scheduler.update(StepResult(plan.step, rig.device.run(plan).token_ids, last=False))
    rig.replace_replica()
    rig.run()
    assert sink.tokens == expected_tokens([5], 20)
