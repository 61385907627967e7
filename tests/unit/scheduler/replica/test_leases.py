"""Plans that allow several decode steps in a row: how many, and what cuts them short."""

import pytest

from protos.errors import Internal
from protos.steps import Decode, StepPlan, StepResult
from tests.support.scheduler.factories import Rig, expected_tokens, make_geometry, make_rig, make_submission

BLOCK = 8


def leasing() -> Rig:
    return make_rig(make_geometry(max_model_len=64, block_size=BLOCK, max_num_seqs=4), max_lease=32)


def leases(plans: list[StepPlan]) -> list[int]:
    return [plan.work.lease for plan in plans if isinstance(plan.work, Decode)]


def test_a_lease_ends_where_a_block_or_the_request_does() -> None:
    """One token of prompt: the first block has room for 7 more inputs, the second for 8, and the last step comes earlier."""
    rig = leasing()
    sink = rig.submit(make_submission([5], max_tokens=20))
    assert leases(rig.run()) == [7, 8, 4]
    assert sink.tokens == expected_tokens([5], 20)


def test_the_setting_is_the_most() -> None:
    rig = make_rig(make_geometry(max_model_len=64, block_size=BLOCK), max_lease=3)
    rig.submit(make_submission([5], max_tokens=8))
    assert leases(rig.run()) == [3, 3, 1]


def test_nothing_is_leased_while_a_prompt_waits_for_its_turn() -> None:
    rig = leasing()
    rig.submit(make_submission([5], request_id="a", max_tokens=30))
    rig.step()
    rig.submit(make_submission(range(3, 19), request_id="b", max_tokens=2))
    plans = [rig.step() for _ in range(7)]
    assert leases([plan for plan in plans if plan is not None])[:3] == [1, 1, 1]


def test_a_request_that_comes_cuts_a_lease_short() -> None:
    """The step that runs is the last one; the newcomer is admitted with the plan that says so, and loses nobody a token."""
    rig = leasing()
    first = rig.submit(make_submission([5], request_id="a", max_tokens=20))
    rig.step()
    calls = 0

    def meanwhile() -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            rig.submit(make_submission([6, 7], request_id="b", max_tokens=4))

    rig.meanwhile = meanwhile
    plan = rig.scheduler.step()
    assert plan is not None
    assert rig.answer(plan) == 3
    assert rig.scheduler.num_running == 2
    assert len(rig.device.slots) == 2
    rig.run()
    assert first.tokens == expected_tokens([5], 20)
    assert rig.sinks["b"].tokens == expected_tokens([6, 7], 4)


def test_a_stop_token_cuts_a_lease_short_and_frees_the_slot() -> None:
    tokens = expected_tokens([5], 20)
    stop = next(token for index, token in enumerate(tokens) if index >= 2 and token not in tokens[:index])
    rig = leasing()
    other = rig.submit(make_submission([6], request_id="other", max_tokens=20))
    sink = rig.submit(make_submission([5], request_id="stops", max_tokens=20, stop_token_ids=[stop]))
    rig.run()
    assert sink.tokens == tokens[: tokens.index(stop) + 1]
    assert other.tokens == expected_tokens([6], 20)
    assert rig.scheduler.num_running == 0


def test_each_leased_step_counts() -> None:
    rig = leasing()
    rig.submit(make_submission([5], max_tokens=20))
    rig.run()
    assert sum(bucket.steps for bucket in rig.scheduler.stats.buckets.values()) == 19
    assert rig.scheduler.stats.generated_tokens >= 19


def test_nothing_is_interrupted_without_a_reason() -> None:
    rig = leasing()
    rig.submit(make_submission([5], max_tokens=20))
    rig.step()
    assert rig.scheduler.interrupt() is None
    plan = rig.scheduler.step()
    assert plan is not None
    assert rig.scheduler.interrupt() is None
    assert rig.scheduler.has_pending


def test_a_worker_that_runs_more_than_it_may_is_found_out() -> None:
    rig = make_rig(make_geometry(max_model_len=64, block_size=BLOCK), max_lease=2)
    rig.submit(make_submission([5], max_tokens=20))
    rig.step()
    plan = rig.scheduler.step()
    assert plan is not None
    for _ in range(2):
        rig.scheduler.update(StepResult(plan.step, (7,), last=False))
    with pytest.raises(Internal, match="more steps than the 2"):
        rig.scheduler.update(StepResult(plan.step, (7,), last=False))


def test_a_lost_worker_costs_no_token_of_a_lease() -> None:
    rig = leasing()
    sink = rig.submit(make_submission([5], max_tokens=20))
    rig.step()
    plan = rig.scheduler.step()
    assert plan is not None
    rig.scheduler.update(StepResult(plan.step, rig.device.run(plan).token_ids, last=False))
    rig.replace_replica()
    rig.run()
    assert sink.tokens == expected_tokens([5], 20)
