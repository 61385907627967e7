"""Plans of several steps, several of them in flight: what each allows, and what ends it."""

from collections.abc import Sequence

import pytest

from protos.errors import Internal
from protos.steps import Decode, GroupKind, Prefill, SlotOutput, StepPlan, StepResult
from scheduler_svc.shapes.shape_config import KvGroup
from tests.support.scheduler.factories import (
    FULL,
    Rig,
    expected_tokens,
    make_request,
    make_rig,
    make_shapes,
    make_submission,
)

CHUNK = BLOCK = 8
STEPS = 8
BROKEN = Internal("broken")


def replica(lease_steps: int = STEPS, **fields: object) -> Rig:
    shapes = make_shapes(max_model_len=64, block_size=BLOCK, chunk=CHUNK, max_num_seqs=4)
    return make_rig(shapes, lease_steps=lease_steps, **fields)  # type: ignore[arg-type]


def planned(rig: Rig) -> StepPlan:
    plan = rig.scheduler.next_plan()
    assert plan is not None
    return plan


def answer(rig: Rig, plan: StepPlan, steps: int = 1, *, last: bool = True) -> None:
    """Runs some steps of a plan and delivers their results, the last of them as the plan's last one."""
    for index in range(steps):
        result = rig.device.run(StepPlan(plan.step, plan.work) if index else plan)
        token_ids, outputs = result.token_ids, result.outputs
        done = last and index + 1 == steps
        rig.scheduler.update(StepResult(plan.step, token_ids, outputs, last=done, num_steps=result.num_steps))


def decoding(rig: Rig, *max_tokens: int, prompt_len: int = 1) -> None:
    """Submits requests, and runs plan after plan until all of them decode."""
    for index, count in enumerate(max_tokens):
        rig.submit(make_submission([5 + index] * prompt_len, request_id=f"r{index}", max_tokens=count))
    while len(rig.scheduler._decoding) < len(max_tokens) or rig.engine.num_waiting:
        answer(rig, planned(rig))
        rig.engine.dispatch()


def steps_of(plans: Sequence[StepPlan]) -> list[int]:
    return [plan.work.steps for plan in plans if isinstance(plan.work, Decode)]


def rows_of(plan: StepPlan) -> int:
    assert isinstance(plan.work, Decode)
    return len(plan.work.slots)


def num_steps_run(rig: Rig) -> int:
    return sum(bucket.steps for bucket in rig.scheduler.stats.buckets.values())


# ---- how many steps a plan allows ----


def test_a_plan_ends_where_a_request_does() -> None:
    """One prompt token and 19 inputs need three blocks, which the plan reserves for all of its steps."""
    rig = replica(32)
    sink = rig.submit(make_submission([5], max_tokens=20))
    plans = rig.run()
    assert steps_of(plans) == [19]
    assert sum(len(growth.block_ids) for plan in plans for growth in plan.grow) == 2
    assert sink.tokens == expected_tokens([5], 20)


def test_a_setting_limits_the_steps_of_a_plan() -> None:
    """No plan allows more."""
    rig = replica(3)
    rig.submit(make_submission([5], max_tokens=8))
    assert steps_of(rig.run()) == [3, 3, 1]


def test_a_plan_ends_where_no_block_is_free() -> None:
    """Blocks are reserved ahead only while there are free ones: no request is preempted for it."""
    rig = replica(32, num_blocks=1 + 5)
    sinks = [
        rig.submit(make_submission([5 + index], request_id=str(index), max_tokens=18)) for index in (0, 1)
    ]
    plans = rig.run()
    # Six blocks are needed in the end. With five, one request waits at the end.
    assert max(steps_of(plans)) == BLOCK - 1
    assert [sink.tokens for sink in sinks] == [expected_tokens([5 + index], 18) for index in (0, 1)]
    assert rig.scheduler.stats.preemptions == {"memory": 1}


def test_a_released_slot_does_not_grow() -> None:
    """The first row takes the last block, and the second, more urgent one preempts it in the same plan."""
    rig = replica(1, num_blocks=1 + 3, prefix_caching=False)
    first = rig.submit(make_submission([5] * 4, request_id="first", max_tokens=12, priority=1))
    rig.step()
    # A token longer, because the first decodes one more: both need a block at the same step.
    second = rig.submit(make_submission([6] * 5, request_id="second", max_tokens=8, priority=0))
    plans = rig.run()
    assert rig.scheduler.stats.preemptions == {"memory": 1}
    assert not any(growth.slot in plan.release for plan in plans for growth in plan.grow)
    assert first.tokens == expected_tokens([5] * 4, 12)
    assert second.tokens == expected_tokens([6] * 5, 8)


def test_rows_that_need_blocks_at_different_steps_share_long_plans() -> None:
    """A mean plan is nearly as long as the setting allows, however many rows there are."""
    block, longest, num_rows = 128, 32, 32
    shapes = make_shapes(
        max_model_len=2048, block_size=block, chunk=block, max_num_seqs=num_rows, buckets=(num_rows,)
    )
    rig = make_rig(shapes, num_blocks=1 + num_rows * 16, lease_steps=longest)
    for row in range(num_rows):
        prompt = [3 + (row * 31 + position * 7) % 90 for position in range(1 + row * block // num_rows)]
        rig.submit(make_submission(prompt, request_id=str(row), max_tokens=1000))
    while rig.scheduler.prefill_backlog or rig.scheduler.num_running < num_rows:
        rig.step()
    plans = []
    for _ in range(20):
        plans.append(planned(rig))
        work = plans[-1].work
        assert isinstance(work, Decode)
        tokens = (7,) * num_rows * work.steps
        rig.scheduler.update(StepResult(plans[-1].step, tokens, num_steps=work.steps))
    assert sum(steps_of(plans)) / len(plans) > 31


def test_the_steps_between_two_chunks_are_not_interrupted() -> None:
    """The second chunk is sent after them, so as many run as the setting says."""
    rig = replica(decode_steps_per_chunk=3)
    decoding(rig, 40)
    rig.submit(make_submission(range(3, 3 + 3 * CHUNK), request_id="b", max_tokens=2))
    sent = [planned(rig)]
    while rig.scheduler.prefill_backlog:
        while (plan := rig.scheduler.next_plan()) is not None:
            sent.append(plan)
        plan = sent.pop(0)
        steps = plan.work.steps if isinstance(plan.work, Decode) else 1
        answer(rig, plan, steps)
        chunks = [later for later in sent if isinstance(later.work, Prefill)]
        assert not any(chunk.interrupts for chunk in chunks)
    assert rig.scheduler.stats.chunk_tokens.counts


def test_chunks_follow_one_another_where_no_row_can_decode() -> None:
    """Requests of a single token never decode, so no step is due between their chunks."""
    rig = replica()
    for index in range(3):
        rig.submit(make_submission([5 + index] * 4, request_id=f"r{index}", max_tokens=1))
    assert [isinstance(planned(rig).work, Prefill) for _ in range(2)] == [True, True]


# ---- several plans in flight ----


def test_the_next_plan_begins_where_the_one_before_ends() -> None:
    """It waits on the worker, and brings the blocks of its own steps; a third one would be too many."""
    rig = replica()
    decoding(rig, 40)
    first, second = planned(rig), planned(rig)
    assert steps_of([first, second]) == [STEPS, STEPS]
    assert rig.scheduler.next_plan() is None
    assert [len(growth.block_ids) for plan in (first, second) for growth in plan.grow] == [1, 1]
    answer(rig, first, STEPS)
    answer(rig, second, STEPS)
    rig.run()
    assert rig.sinks["r0"].tokens == expected_tokens([5], 40)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_as_many_plans_are_in_flight_as_the_worker_takes(depth: int) -> None:
    """With one, each waits for the result of the one before."""
    rig = replica(depth=depth)
    decoding(rig, 40)
    for _ in range(depth):
        planned(rig)
    assert rig.scheduler.next_plan() is None


def test_a_drained_replica_sends_nothing_until_all_plans_are_answered() -> None:
    rig = replica(lease_steps=1, depth=3)
    decoding(rig, 40)
    plans = [planned(rig), planned(rig)]
    rig.scheduler.drain()
    for plan in plans:
        assert rig.scheduler.next_plan() is None
        answer(rig, plan)
    rig.run()
    assert rig.sinks["r0"].tokens == expected_tokens([5], 40)


def test_a_request_that_ends_by_its_length_is_left_out() -> None:
    """The plan behind its last step has the other rows, and nothing waits for its result."""
    rig = replica()
    decoding(rig, 5, 20)
    first, second = planned(rig), planned(rig)
    assert [rows_of(first), rows_of(second)] == [2, 1]
    assert isinstance(first.work, Decode)
    assert first.work.steps < 4
    answer(rig, first, first.work.steps)
    answer(rig, second, STEPS)
    assert rig.run()[0].release == (0,)


def test_the_chunks_of_a_prompt_follow_one_another() -> None:
    """Each is sent while the one before it runs; the first decode steps are sent after the last one."""
    rig = replica()
    sink = rig.submit(make_submission(range(3, 3 + 3 * CHUNK), max_tokens=5))
    plans = [planned(rig)]
    while len(plans) < 4:
        plans.append(planned(rig))
        answer(rig, plans[-2])
    assert [plan.work.start for plan in plans if isinstance(plan.work, Prefill)] == [0, CHUNK, 2 * CHUNK]
    assert steps_of(plans) == [4]
    answer(rig, plans[-1], 4)
    assert sink.tokens == expected_tokens(range(3, 3 + 3 * CHUNK), 5)


def test_a_chunk_and_a_decode_step_are_in_flight_together() -> None:
    """Neither needs the other's result."""
    rig = replica()
    decoding(rig, 40)
    rig.submit(make_submission(range(3, 3 + 4 * CHUNK), request_id="long", max_tokens=2))
    running = planned(rig)
    for _ in range(4):
        behind = planned(rig)
        assert {type(running.work), type(behind.work)} == {Prefill, Decode}
        answer(rig, running)
        running = behind


# ---- ends before the last step ----


def test_a_chunk_interrupts_decode_steps() -> None:
    """A new request's first chunk follows the running step at once, and decode steps follow the chunk."""
    rig = replica()
    decoding(rig, 30)
    running, behind = planned(rig), planned(rig)
    rig.submit(make_submission(range(3, 3 + 2 * CHUNK), request_id="new", max_tokens=4))
    chunk = planned(rig)
    assert isinstance(chunk.work, Prefill)
    assert chunk.interrupts
    assert [one.request_id for one in chunk.admit] == ["new"]
    assert rig.scheduler.next_plan() is None, "one interruption is enough"
    for plan in (running, behind):
        answer(rig, plan)
    following = planned(rig)
    assert steps_of([following]) == [1]
    assert not following.interrupts
    answer(rig, chunk)
    answer(rig, following)
    rig.run()
    assert rig.sinks["r0"].tokens == expected_tokens([5], 30)
    assert rig.sinks["new"].tokens == expected_tokens(range(3, 3 + 2 * CHUNK), 4)


def test_steps_that_nobody_needs_are_ended() -> None:
    """The only request is aborted while eight steps are allowed."""
    rig = replica(depth=2)
    decoding(rig, 40)
    planned(rig)
    rig.engine.abort("r0")
    end = planned(rig)
    assert (end.work, end.interrupts, end.release) == (None, True, (0,))


def test_steps_are_single_while_a_request_waits_for_a_prefix() -> None:
    """It can run as soon as the prefix is computed, although more steps may follow each chunk."""
    rig = replica(decode_steps_per_chunk=4)
    decoding(rig, 50)
    prompt = range(3, 3 + 4 * CHUNK)
    rig.submit(make_submission(prompt, request_id="first", max_tokens=2))
    rig.submit(make_submission(prompt, request_id="same", max_tokens=2))
    assert rig.engine.load().num_deferred == 1
    steps: list[int] = []
    while rig.engine.load().num_deferred:
        plan = planned(rig)
        steps += steps_of([plan])
        answer(rig, plan)
        rig.engine.dispatch()
    assert steps
    assert set(steps) == {1}


def test_a_joining_row_interrupts_decode_steps() -> None:
    """A window that slides in place must be kept before its request decodes; others go on meanwhile."""
    rig = replica(groups=(FULL, KvGroup(GroupKind.IN_PLACE_WINDOW, 4)))
    decoding(rig, 30)
    running = planned(rig)
    rig.submit(make_submission([9] * 3, request_id="new", max_tokens=12))
    chunk = planned(rig)
    answer(rig, running)
    alone = planned(rig)
    assert (rows_of(alone), steps_of([alone]), alone.interrupts) == (1, [STEPS], False)
    answer(rig, chunk)
    both = planned(rig)
    assert (rows_of(both), both.interrupts) == (2, True)
    assert rig.scheduler.next_plan() is None
    answer(rig, alone)
    assert isinstance(both.work, Decode)
    answer(rig, both, both.work.steps)
    rig.run()
    assert rig.sinks["r0"].tokens == expected_tokens([5], 30)
    assert rig.sinks["new"].tokens == expected_tokens([9] * 3, 12)


def test_decode_steps_are_not_interrupted_without_a_reason() -> None:
    """A request that has no turn yet, or no slot, is none."""
    rig = replica(decode_steps_per_chunk=30)
    decoding(rig, 40)
    planned(rig)
    planned(rig)
    assert rig.scheduler.next_plan() is None
    rig.submit(make_submission([6, 7], request_id="new"))
    assert rig.scheduler.next_plan() is None


def test_steps_that_did_not_run_bring_no_chunk_forward() -> None:
    """Six steps come before a chunk. A plan ends after five, as a row jumps ahead, so one more is needed."""
    rig = replica(decode_steps_per_chunk=6)
    decoding(rig, 40, 40)
    rig.scheduler._turns.take_back(rig.scheduler._turns._decodes)
    before = num_steps_run(rig)
    plan = planned(rig)
    for _ in range(4):
        rig.scheduler.update(StepResult(plan.step, (7, 7), last=False))
    jumps, goes_on = plan.work.slots if isinstance(plan.work, Decode) else ()
    outputs = (SlotOutput(jumps, (7, 8, 9)), SlotOutput(goes_on, (7,)))
    rig.scheduler.update(StepResult(plan.step, outputs=outputs))
    following = [planned(rig), planned(rig)]
    assert steps_of(following[:1]) == [1]
    assert isinstance(following[1].work, Prefill)
    assert num_steps_run(rig) - before == 5


def test_more_results_than_steps_are_an_error() -> None:
    """The replica refuses the extra result."""
    rig = replica(2)
    decoding(rig, 20)
    plan = planned(rig)
    rig.scheduler.update(StepResult(plan.step, (7, 8), last=False, num_steps=2))
    with pytest.raises(Internal, match="more steps than the 2"):
        rig.scheduler.update(StepResult(plan.step, (7,)))


def test_a_result_of_several_steps_needs_all_of_their_tokens() -> None:
    """Otherwise tokens would go to the wrong requests."""
    rig = replica(4)
    decoding(rig, 20, 20)
    with pytest.raises(Internal, match=r"2 steps of plan .* gave 3 tokens for 2 rows"):
        rig.scheduler.update(StepResult(planned(rig).step, (7, 8, 9), num_steps=2))


def test_a_block_that_fills_can_be_found_before_its_request_ends() -> None:
    """The plan that needs the next block makes the blocks findable that have been filled since."""
    rig = replica(cache_generated=True)
    decoding(rig, 40)
    first, _ = planned(rig), planned(rig)
    known = [5, *expected_tokens([5], 40)][:BLOCK]
    answer(rig, first, STEPS)
    planned(rig)
    assert rig.scheduler.cached_tokens(make_request([*known, 9])) == BLOCK


# ---- failures ----


def test_after_a_failure_nothing_is_sent_until_all_is_answered() -> None:
    """The plan behind skips the slots of the failed one; the next one follows from results alone."""
    rig = replica()
    decoding(rig, 20, 20)
    first, second = planned(rig), planned(rig)
    rig.scheduler.update(StepResult(first.step, error=BROKEN))
    rig.engine.dispatch()
    assert rig.scheduler.next_plan() is None
    rig.scheduler.update(StepResult(second.step, num_steps=0))
    assert rig.scheduler.next_plan() is not None


def test_work_that_failed_or_was_skipped_counts_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither as a chunk or a step, nor against its tenant."""
    rig = replica()
    stats, charged = rig.scheduler.stats, list[int]()
    monkeypatch.setattr(rig.engine.waiting.tenants, "charge", lambda _, tokens: charged.append(tokens))
    rig.submit(make_submission(range(3, 3 + 3 * CHUNK), max_tokens=2))
    charged.clear()
    first, second = planned(rig), planned(rig)
    rig.scheduler.update(StepResult(first.step, error=BROKEN))
    rig.scheduler.update(StepResult(second.step, num_steps=0))
    assert sum(stats.chunk_tokens.counts) == 0
    rig.device.slots.clear()
    rig.engine.dispatch()
    while not isinstance((plan := planned(rig)).work, Decode):
        answer(rig, plan)
    charged.clear()
    rig.scheduler.update(StepResult(plan.step, error=BROKEN))
    assert sum(stats.chunk_tokens.counts) == 3
    assert (num_steps_run(rig), charged) == (0, [])


def test_a_suspect_has_one_plan_in_flight() -> None:
    """What is answered then clears or accuses it alone."""
    rig = replica()
    decoding(rig, 20, 20)
    rig.scheduler.update(StepResult(planned(rig).step, error=BROKEN))
    rig.engine.dispatch()
    while rig.scheduler._slots.has_suspects or rig.engine.num_waiting:
        plan = planned(rig)
        suspect = next(iter(rig.scheduler._plans)).requests[0].suspect
        assert not suspect or rig.scheduler.next_plan() is None
        answer(rig, plan)
        rig.engine.dispatch()
    rig.run()
    assert [rig.sinks[f"r{index}"].tokens for index in (0, 1)] == [
        expected_tokens([5 + index], 20) for index in (0, 1)
    ]


# ---- admission and memory ----


def test_a_request_is_admitted_by_the_first_plan_with_work_for_it() -> None:
    """One that is aborted before costs the worker nothing."""
    rig = replica()
    for index in range(3):
        rig.submit(make_submission([5 + index] * 4, request_id=f"r{index}"))
    rig.engine.abort("r1")
    plans = rig.run()
    admitted = [[one.request_id for one in plan.admit] for plan in plans if plan.admit]
    assert admitted == [["r0"], ["r2"]]
    assert all(isinstance(plan.work, Prefill) for plan in plans if plan.admit)


def test_a_slot_is_given_when_its_work_is_near() -> None:
    """Two chunks may be ahead of a request; until then the order of the queue counts."""
    rig = replica()
    for index in range(4):
        rig.submit(make_submission([5 + index] * (2 * CHUNK), request_id=f"r{index}"))
    assert (rig.scheduler.num_running, rig.engine.num_waiting) == (2, 2)
    rig.submit(make_submission([9] * 3, request_id="urgent", priority=-1))
    assert rig.engine.num_waiting == 2
    plans = rig.run()
    assert next(one.request_id for plan in plans for one in plan.admit) == "urgent"


def test_memory_is_taken_for_a_chunk_at_a_time() -> None:
    """A request that is admitted has room for all of its prompt, but takes the blocks as they are needed."""
    rig = replica(num_blocks=1 + 9)
    pool = rig.scheduler.kv.groups[0].pool
    rig.submit(make_submission([5] * (4 * CHUNK), request_id="first", max_tokens=4))
    answer(rig, planned(rig))
    assert pool.num_blocks - pool.num_free == 1
    rig.submit(make_submission([6] * (4 * CHUNK), request_id="second", max_tokens=4))
    assert rig.engine.num_waiting == 1, "four more blocks are promised, and five of eight do not remain"
    rig.submit(make_submission([7], request_id="third", max_tokens=4, priority=-1))
    assert rig.scheduler.num_running == 2
    rig.run()
    assert not rig.scheduler.stats.preemptions
    assert rig.sinks["second"].tokens == expected_tokens([6] * (4 * CHUNK), 4)
