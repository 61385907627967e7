"""One replica's scheduler, step by step, on a simulated device that checks every plan."""

import pytest

from protos.errors import Internal
from protos.steps import Decode, GroupKind, Prefill, StepPlan, StepResult
from scheduler_svc.requests.sampling import FinishReason
from scheduler_svc.shapes.shape_config import KvGroup
from tests.support.scheduler.factories import (
    FULL,
    expected_tokens,
    make_rig,
    make_shapes,
    make_submission,
)


def kinds(plans: list[StepPlan]) -> str:
    """Returns P for a chunk, d for a decode step, - for neither."""
    return "".join({Prefill: "p", Decode: "d"}.get(type(plan.work), "-") for plan in plans)


def test_a_prompt_is_prefilled_in_chunks_and_then_decoded() -> None:
    """10 tokens run in chunks of 4; the last chunk gives the first token, each step one more."""
    rig = make_rig()
    sink = rig.submit(make_submission(range(10, 20), max_tokens=3))
    assert kinds(rig.run()) == "pppdd-"
    assert sink.tokens == expected_tokens(range(10, 20), 3)
    assert sink.events[-1].finish_reason is FinishReason.LENGTH


def test_chunks_and_decode_steps_take_turns() -> None:
    """While a long prompt is prefilled, a running request gets a token between two chunks."""
    rig = make_rig()
    rig.submit(make_submission([5], request_id="a", max_tokens=8))
    rig.step()
    rig.submit(make_submission(range(3, 19), request_id="b", max_tokens=2))
    assert kinds([plan for _ in range(7) for plan in rig.step()]) == "dpdpdpd"


@pytest.mark.parametrize(
    ("prompt_len", "expected"),
    [
        (1, [(1, 1)]),
        (3, [(3, 4)]),
        (4, [(4, 4)]),
        (8, [(8, 8)]),
        (9, [(8, 8), (1, 1)]),
        (21, [(8, 8), (8, 8), (5, 8)]),
    ],
)
def test_a_chunk_runs_in_the_smallest_bucket_that_holds_the_rest(
    prompt_len: int, expected: list[tuple[int, int]]
) -> None:
    """As long as none does, whole chunks run in the largest, so they lie at the same positions as ever."""
    rig = make_rig(make_shapes(chunk=8, block_size=8))
    rig.submit(make_submission(range(3, 3 + prompt_len), max_tokens=1))
    chunks = [plan.work for plan in rig.run() if isinstance(plan.work, Prefill)]
    assert [(chunk.num_tokens, chunk.bucket) for chunk in chunks] == expected


def test_a_stop_token_ends_the_sequence_and_is_part_of_it() -> None:
    """The event names the stop token."""
    rig = make_rig()
    stop = expected_tokens([5, 6, 7], 8)[3]
    sink = rig.submit(make_submission(stop_token_ids=[stop]))
    rig.run()
    assert sink.tokens == expected_tokens([5, 6, 7], 4)
    assert sink.events[-1].finish_reason is FinishReason.STOP
    assert sink.events[-1].stop_token_id == stop


def test_the_end_of_the_context_ends_the_sequence() -> None:
    """Without max_tokens, a request runs up to max_model_len and reports length."""
    rig = make_rig(make_shapes(max_model_len=12))
    sink = rig.submit(make_submission([5] * 9, max_tokens=None))
    rig.run()
    assert len(sink.tokens) == 3
    assert sink.events[-1].finish_reason is FinishReason.LENGTH


def test_the_last_prompt_token_is_always_recomputed() -> None:
    """A fully cached prompt still runs its last chunk, for its logits."""
    rig = make_rig()
    prompt = list(range(20, 32))
    rig.submit(make_submission(prompt, request_id="a", max_tokens=1))
    rig.run()
    sink = rig.submit(make_submission(prompt, request_id="b", max_tokens=1))
    rig.run()
    assert sink.events[0].num_cached_tokens == 8


def test_hits_end_anywhere_with_exact_chunks() -> None:
    """Also inside a block and a chunk, after generated tokens."""
    rig = make_rig(
        make_shapes(chunk=8, block_size=4), chunk_starts="exact", finest_hit=2, cache_generated=True
    )
    first = rig.submit(make_submission(range(20, 31), request_id="a", max_tokens=4))
    rig.run()
    prompt = [*range(20, 31), *first.tokens, 90]
    sink = rig.submit(make_submission(prompt, request_id="b", max_tokens=5))
    rig.run()
    # The last generated token was not computed.
    assert sink.events[0].num_cached_tokens == 14
    assert sink.tokens == expected_tokens(prompt, 5)


def test_generated_tokens_may_be_left_out() -> None:
    """A hit then ends where the prompt was prefilled."""
    rig = make_rig()
    sink = rig.submit(make_submission([5, 6, 7, 8], request_id="a", max_tokens=20))
    rig.run()
    follow_up = rig.submit(make_submission([5, 6, 7, 8, *sink.tokens], request_id="b"))
    rig.run()
    assert follow_up.events[0].num_cached_tokens == 4


def test_an_abort_while_the_step_runs_gives_no_more_tokens() -> None:
    """The outstanding result is ignored, and the next plan releases the slot."""
    rig = make_rig()
    sink = rig.submit(make_submission())
    rig.step()
    plan = rig.scheduler.next_plan()
    assert plan is not None
    assert rig.engine.abort("r")
    received = len(sink.tokens)
    rig.scheduler.update(rig.device.run(plan))
    assert len(sink.tokens) == received
    assert sink.events[-1].finish_reason is FinishReason.ABORT
    (released,) = rig.step()
    assert released.release == (0,)
    assert not rig.device.slots


@pytest.mark.parametrize("reached", [True, False])
def test_copies_of_a_failed_plan_are_not_used(reached: bool) -> None:
    """A window to keep is not found, and a request that was to resume from a copy computes its prompt."""
    rig = make_rig(make_shapes(block_size=8), groups=(FULL, KvGroup(GroupKind.IN_PLACE_WINDOW, 4)))
    rig.submit(make_submission(range(20, 33), request_id="a", max_tokens=1))
    rig.run()
    other = rig.submit(make_submission([3, 4, 5], request_id="other", max_tokens=1))
    resumed = rig.submit(make_submission([*range(20, 32), 40, 41], request_id="resumed"))
    plan = rig.scheduler.next_plan()
    assert plan is not None
    assert {copy.group_id for copy in plan.copies} == {0, 1}
    if reached:
        rig.device.run(plan)
    rig.scheduler.update(StepResult(plan.step, error=Internal("device fault")))
    rig.run()
    assert other.tokens == expected_tokens([3, 4, 5], 1)
    assert resumed.tokens == expected_tokens([*range(20, 32), 40, 41], 8)
    rig.scheduler.kv.check_integrity()


def test_a_result_for_another_step_is_refused() -> None:
    """Otherwise tokens would go to the wrong requests."""
    rig = make_rig()
    rig.submit(make_submission())
    rig.scheduler.next_plan()
    with pytest.raises(Internal, match="answered step 7, expected 1"):
        rig.scheduler.update(StepResult(7))


def test_a_missing_token_fails_the_request_instead_of_hanging_it() -> None:
    """Only the request of the missing row fails."""
    rig = make_rig()
    sink = rig.submit(make_submission())
    plan = rig.scheduler.next_plan()
    assert plan is not None
    rig.scheduler.update(StepResult(plan.step))
    assert sink.events[-1].error is not None
