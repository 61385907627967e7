"""Plans that allow several decode steps in a row: how many, and what ends them early."""

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
    """After one prompt token, the first block has room for 7 inputs, the second for 8."""
    rig = leasing()
    sink = rig.submit(make_submission([5], max_tokens=20))
    assert leases(rig.run()) == [7, 8, 4]
    assert sink.tokens == expected_tokens([5], 20)


def test_the_setting_limits_a_lease() -> None:
    """No plan leases more steps than the setting allows."""
    rig = make_rig(make_geometry(max_model_len=64, block_size=BLOCK), max_lease=3)
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


def test_a_new_request_ends_a_lease() -> None:
    """The running step is the last; the plan that ends the lease admits the request, and no token is lost."""
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


def test_a_stop_token_ends_a_lease_and_frees_the_slot() -> None:
    """The sequence ends with the stop token."""
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
    """Statistics count each step of a lease."""
    rig = leasing()
    rig.submit(make_submission([5], max_tokens=20))
    rig.run()
    assert sum(bucket.steps for bucket in rig.scheduler.stats.buckets.values()) == 19
    assert rig.scheduler.stats.generated_tokens >= 19


def test_a_lease_is_not_interrupted_without_a_reason() -> None:
    """Without new work there is no plan to send."""
    rig = leasing()
    rig.submit(make_submission([5], max_tokens=20))
    rig.step()
    assert rig.scheduler.interrupt() is None
    plan = rig.scheduler.step()
    assert plan is not None
    assert rig.scheduler.interrupt() is None
    assert rig.scheduler.has_pending


def test_more_results_than_leased_steps_are_an_error() -> None:
    """The replica refuses the extra result."""
    rig = make_rig(make_geometry(max_model_len=64, block_size=BLOCK), max_lease=2)
    rig.submit(make_submission([5], max_tokens=20))
    rig.step()
    plan = rig.scheduler.step()
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
    plan = rig.scheduler.step()
    assert plan is not None
    rig.scheduler.update(StepResult(plan.step, rig.device.run(plan).token_ids, last=False))
    rig.replace_replica()
    rig.run()
    assert sink.tokens == expected_tokens([5], 20)
