"""One replica's scheduler, step by step, on a simulated device that checks every plan."""

import pytest

from protos.errors import Internal
from protos.steps import Decode, GroupKind, Prefill, SlotOutput, StepPlan, StepResult
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


def test_the_ratio_of_decode_steps_to_chunks_is_a_setting() -> None:
    """Three decode steps run between two chunks."""
    rig = make_rig(decode_steps_per_chunk=3)
    rig.submit(make_submission([5], request_id="a", max_tokens=30))
    rig.step()
    rig.submit(make_submission(range(3, 15), request_id="b", max_tokens=2))
    assert kinds([plan for _ in range(12) for plan in rig.step()]) == "dddpdddpdddp"


def test_decode_runs_at_the_smallest_bucket_that_holds_the_batch() -> None:
    """Three running requests run at bucket 4, and every shape is a compiled one."""
    rig = make_rig()
    for name in "abc":
        rig.submit(make_submission([ord(name) - 90], request_id=name, max_tokens=4))
    plans = rig.run()
    assert {
        plan.work.bucket for plan in plans if isinstance(plan.work, Decode) and len(plan.work.slots) == 3
    } == {4}
    assert rig.device.ran <= {("prefill", 1), ("decode", 1), ("decode", 2), ("decode", 4)}


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


def test_more_requests_than_slots_wait_and_all_get_their_tokens() -> None:
    """Ten requests share four slots."""
    rig = make_rig()
    prompts = {f"r{i}": [3 + i, 4 + i, 5] for i in range(10)}
    for name, prompt in prompts.items():
        rig.submit(make_submission(prompt, request_id=name, max_tokens=5))
    assert rig.step()
    assert (rig.engine.num_running, len(rig.engine.waiting)) == (4, 6)
    rig.run()
    for name, prompt in prompts.items():
        assert rig.sinks[name].tokens == expected_tokens(prompt, 5)


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


def test_a_second_request_with_the_same_prefix_prefills_only_the_rest() -> None:
    """12 of 14 prompt tokens are cached, and the output is the same as after a miss."""
    rig = make_rig()
    prompt = list(range(20, 34))
    rig.submit(make_submission(prompt, request_id="a"))
    rig.run()
    before = rig.device.prefilled
    sink = rig.submit(make_submission(prompt, request_id="b"))
    rig.run()
    assert rig.device.prefilled - before == 2
    assert sink.events[0].num_cached_tokens == 12
    assert sink.tokens == expected_tokens(prompt, 8)


def test_the_last_prompt_token_is_always_recomputed() -> None:
    """A fully cached prompt still runs its last chunk, for its logits."""
    rig = make_rig()
    prompt = list(range(20, 32))
    rig.submit(make_submission(prompt, request_id="a", max_tokens=1))
    rig.run()
    sink = rig.submit(make_submission(prompt, request_id="b", max_tokens=1))
    rig.run()
    assert sink.events[0].num_cached_tokens == 8


def test_hits_end_at_chunk_boundaries() -> None:
    """With chunks of 8 over blocks of 4, three cached blocks are a hit of two."""
    rig = make_rig(make_shapes(chunk=8, block_size=4))
    rig.submit(make_submission(range(20, 33), request_id="a", max_tokens=1))
    rig.run()
    sink = rig.submit(make_submission(range(20, 34), request_id="b", max_tokens=1))
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


def test_out_of_blocks_the_latest_request_is_preempted() -> None:
    """Memory holds about one and a half requests; both get exactly their tokens."""
    rig = make_rig(num_blocks=9)
    for name, first in (("a", 20), ("b", 50)):
        rig.submit(make_submission(range(first, first + 8), request_id=name, max_tokens=20))
    rig.run()
    for name, first in (("a", 20), ("b", 50)):
        assert rig.sinks[name].tokens == expected_tokens(range(first, first + 8), 20)
    # "a" came first and was never interrupted: it finished before "b".
    assert rig.engine.num_running == 0
    rig.scheduler.kv.check_integrity()


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


def test_an_abort_of_a_waiting_request_never_reaches_the_device() -> None:
    """The request ends at once."""
    rig = make_rig()
    sink = rig.submit(make_submission())
    assert rig.engine.abort("r")
    assert not rig.step()
    assert [event.finish_reason for event in sink.events] == [FinishReason.ABORT]


def test_a_fault_in_a_slot_fails_only_its_request() -> None:
    """The other rows of the step continue."""
    rig = make_rig()
    for name in "ab":
        rig.submit(make_submission([ord(name) - 90], request_id=name, max_tokens=6))
    while (
        not isinstance((plan := rig.scheduler.next_plan() or pytest.fail("no decode step")).work, Decode)
        or len(plan.work.slots) < 2
    ):
        rig.scheduler.update(rig.device.run(plan))
    good = rig.device.run(plan)
    first, second = plan.work.slots
    bad = SlotOutput(first, (), error=Internal("row went wrong"))
    rig.scheduler.update(StepResult(plan.step, outputs=(bad, SlotOutput(second, (good.token_ids[1],)))))
    rig.run()
    assert rig.sinks["a"].events[-1].error is not None
    assert rig.sinks["b"].tokens == expected_tokens([ord("b") - 90], 6)


def test_a_failed_step_frees_the_blocks_of_its_requests() -> None:
    """They wait with the tokens that they have, and the replica keeps serving."""
    rig = make_rig()
    sink = rig.submit(make_submission())
    rig.step()
    plan = rig.scheduler.next_plan()
    assert plan is not None
    rig.device.run(plan)
    rig.scheduler.update(StepResult(plan.step, error=Internal("device fault")))
    assert rig.scheduler.kv.usage == 0
    rig.run()
    assert sink.tokens == expected_tokens([5, 6, 7], 8)


@pytest.mark.parametrize("reached", [True, False])
def test_requests_admitted_by_a_failed_plan_restart(reached: bool) -> None:
    """The plan's step fails, so it is unknown whether the worker admitted them."""
    rig = make_rig()
    prompt = range(5, 14)
    sink = rig.submit(make_submission(prompt, n=4))
    while not rig.scheduler.stats.forks:
        rig.step()
    plan = rig.scheduler.next_plan()
    assert plan is not None
    assert len(plan.admit) == 3
    if reached:
        rig.device.run(plan)
    rig.scheduler.update(StepResult(plan.step, error=Internal("device fault")))
    assert rig.scheduler.stats.preemptions == {"fault": 4}
    rig.run()
    for sequence in range(4):
        assert sink.tokens_of(sequence) == expected_tokens(prompt, 8, sequence)
    rig.scheduler.kv.check_integrity()


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


def test_requests_of_a_lost_replica_continue_on_another() -> None:
    """Running, waiting and prefilling requests lose and repeat no token."""
    rig = make_rig()
    prompts = {f"r{i}": list(range(10 * i + 3, 10 * i + 12)) for i in range(6)}
    for name, prompt in prompts.items():
        rig.submit(make_submission(prompt, request_id=name, max_tokens=9))
    for _ in range(9):
        rig.step()
    rig.scheduler.next_plan()  # a step is in flight when the worker dies
    assert rig.replace_replica() == 4
    rig.run()
    for name, prompt in prompts.items():
        assert rig.sinks[name].tokens == expected_tokens(prompt, 9)


def test_two_groups_hit_only_what_both_have() -> None:
    """One pool evicted a block that the other still has, so the hit shrinks."""
    rig = make_rig(groups=(FULL, FULL))
    prompt = list(range(20, 34))
    rig.submit(make_submission(prompt, request_id="a"))
    rig.run()
    first, second = rig.scheduler.kv.groups
    key = list(second.pool.keys)[1]
    block = second.pool.lookup(key)
    assert block is not None
    second.pool.touch([block])
    second.pool._forget(block)
    second.pool.free([block])
    assert first.pool.lookup(key) is not None
    sink = rig.submit(make_submission(prompt, request_id="b"))
    rig.run()
    assert sink.events[0].num_cached_tokens == 4
    assert sink.tokens == expected_tokens(prompt, 8)


def test_streams_get_the_tokens_of_their_own_requests() -> None:
    """Two streams share a batch, row by row. A request that ends in mid-batch takes no token from another."""
    rig = make_rig(num_streams=2)
    lengths = {"a": 9, "b": 4, "c": 6, "d": 9}
    for index, (name, length) in enumerate(lengths.items()):
        rig.submit(make_submission([5 + index], request_id=name, max_tokens=length))
    rig.run()
    for index, (name, length) in enumerate(lengths.items()):
        assert rig.sinks[name].tokens == expected_tokens([5 + index], length)
