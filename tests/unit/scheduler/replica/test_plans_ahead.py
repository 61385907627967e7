"""Plans that are sent before the last result of the plan before them."""

import pytest

from protos.steps import Decode, Prefill, StepPlan, StepResult
from tests.support.scheduler.factories import (
    EOS,
    Rig,
    expected_tokens,
    make_rig,
    make_shapes,
    make_submission,
)

CHUNK = 4


def ahead(**fields: object) -> Rig:
    shapes = make_shapes(max_model_len=64, chunk=CHUNK, block_size=8, max_num_seqs=4)
    return make_rig(shapes, lease_steps=8, **fields)  # type: ignore[arg-type]


def decoding(rig: Rig, *max_tokens: int) -> None:
    """Submits requests of one token each, and runs plan after plan until all of them decode."""
    for index, count in enumerate(max_tokens):
        rig.submit(make_submission([5 + index], request_id=f"r{index}", max_tokens=count))
    rig.engine.dispatch()
    while rig.scheduler.prefill_backlog:
        answer(rig, planned(rig.scheduler.next_plan()))


def planned(plan: StepPlan | None) -> StepPlan:
    assert plan is not None
    return plan


def answer(rig: Rig, plan: StepPlan) -> StepResult:
    """Runs a plan's first step and delivers its result as its last."""
    result = rig.device.run(plan)
    rig.scheduler.update(result)
    return result


def test_a_chunk_is_planned_while_a_decode_step_runs() -> None:
    """It needs no result of the step; the next decode step is planned while the chunk runs."""
    rig = ahead()
    decoding(rig, 20)
    rig.submit(make_submission(range(3, 3 + 3 * CHUNK), request_id="long", max_tokens=2))
    rig.engine.dispatch()
    scheduler = rig.scheduler
    running = planned(scheduler.next_plan())
    for _ in range(4):
        behind = planned(scheduler.plan_ahead())
        assert {type(running.work), type(behind.work)} == {Prefill, Decode}
        assert scheduler.plan_ahead() is None, "two plans are in flight at most"
        answer(rig, running)
        running = behind


def test_a_batch_goes_on_behind_a_chunk_although_one_of_it_has_ended() -> None:
    """The others' next step does not wait for the chunk, and its plan releases the slot."""
    rig = ahead()
    decoding(rig, 4, 20)
    rig.submit(make_submission(range(3, 3 + 6 * CHUNK), request_id="long", max_tokens=2))
    rig.engine.dispatch()
    scheduler = rig.scheduler
    plans = [planned(scheduler.next_plan())]
    for _ in range(10):
        plans.append(planned(scheduler.plan_ahead()))
        answer(rig, plans[-2])
    assert [list(plan.release) for plan in plans if plan.release] == [[0]]
    ended = next(index for index, plan in enumerate(plans) if plan.release)
    assert isinstance(plans[ended - 1].work, Prefill)


def test_a_batch_goes_on_with_a_request_that_has_joined_it() -> None:
    """The last chunk's request decodes in the step behind the one that was planned with its chunk."""
    rig = ahead()
    decoding(rig, 20)
    rig.submit(make_submission(range(3, 3 + CHUNK), request_id="new", max_tokens=9))
    rig.engine.dispatch()
    scheduler = rig.scheduler
    plans = [planned(scheduler.next_plan())]
    while len(plans) < 4:
        plans.append(planned(scheduler.plan_ahead()))
        answer(rig, plans[-2])
    rows = [len(plan.work.slots) if isinstance(plan.work, Decode) else "chunk" for plan in plans]
    assert rows in (["chunk", 1, 2, 2], [1, "chunk", 1, 2])
    assert plans[-1].continues


def test_a_request_that_ends_by_its_length_is_left_out() -> None:
    """The lease behind the request's last step has the other rows, and nothing waits for its result."""
    rig = ahead()
    decoding(rig, 4, 20)
    scheduler = rig.scheduler
    first = planned(scheduler.next_plan())
    assert isinstance(first.work, Decode)
    assert len(first.work.slots) == 2
    assert first.work.lease < 4
    behind = planned(scheduler.plan_ahead())
    assert isinstance(behind.work, Decode)
    assert behind.continues
    assert len(behind.work.slots) == 1
    assert behind.work.positions[0] == first.work.positions[1] + first.work.lease


@pytest.mark.parametrize("lag", [0, 1, 3])
@pytest.mark.parametrize("stop_at", [1, 4, 11])
def test_a_request_that_stops_by_itself_harms_no_other(lag: int, stop_at: int) -> None:
    """A stop token is unknown when the next plan is sent. Its slot's results are then ignored."""
    rig = ahead(lag=lag)
    tokens = [expected_tokens([5 + index, 6, 7], 30) for index in range(3)]
    sinks = [
        rig.submit(
            make_submission(
                [5 + index, 6, 7], request_id=f"r{index}", max_tokens=30,
                stop_token_ids=(tokens[0][stop_at],) if not index else (),
            )
        )
        for index in range(3)
    ]  # fmt: skip
    rig.run()
    assert sinks[0].tokens == tokens[0][: stop_at + 1]
    assert [sink.tokens for sink in sinks[1:]] == tokens[1:]
    assert EOS not in tokens[0]


def test_nothing_is_preempted_for_a_plan_ahead() -> None:
    """Without a free block the next plan waits for the result; then a request is preempted as usual."""
    rig = ahead(num_blocks=1 + 5)
    sinks = [
        rig.submit(make_submission([5 + index] * 3, request_id=f"r{index}", max_tokens=18))
        for index in (0, 1)
    ]
    rig.run()
    assert [sink.tokens for sink in sinks] == [expected_tokens([5 + index] * 3, 18) for index in (0, 1)]
    assert rig.scheduler.stats.preemptions["memory"] == 1


def test_the_chunks_of_a_prompt_follow_each_other_when_nothing_decodes() -> None:
    """Each is planned while the one before it runs, and runs only if that one has run."""
    rig = ahead()
    rig.submit(make_submission(range(3, 3 + 3 * CHUNK), request_id="long", max_tokens=2))
    rig.engine.dispatch()
    first = planned(rig.scheduler.next_plan())
    second = planned(rig.scheduler.plan_ahead())
    answer(rig, first)
    third = planned(rig.scheduler.plan_ahead())
    starts = [plan.work.start for plan in (first, second, third) if isinstance(plan.work, Prefill)]
    assert starts == [0, CHUNK, 2 * CHUNK]
    assert [plan.continues for plan in (first, second, third)] == [False, True, True]


def test_a_worker_that_cannot_take_plans_ahead_gets_none() -> None:
    """The default of a rig is a worker that does not announce it."""
    rig = make_rig(lease_steps=8)
    decoding(rig, 20)
    planned(rig.scheduler.next_plan())
    assert rig.scheduler.plan_ahead() is None
