"""Requests with n > 1: one prompt, several sequences, one client request."""

import itertools
from collections.abc import Iterator
from dataclasses import replace

import pytest

from protos.errors import Internal, InvalidArgument, Overloaded
from protos.steps import GroupKind, Prefill, SlotOutput, StepResult
from scheduler_svc.replica.shared_prefill import SharedPrefills
from scheduler_svc.replica.stats import SchedulerStats
from scheduler_svc.requests.admission import Resumed
from scheduler_svc.requests.request import Event, SequenceGroup
from scheduler_svc.requests.sampling import FinishReason
from scheduler_svc.shapes.shape_config import KvGroup
from tests.support.sampling_params import token_logprobs
from tests.support.scheduler.factories import (
    FULL,
    ListSink,
    Rig,
    expected_tokens,
    make_request,
    make_rig,
    make_sampling,
    make_shapes,
    make_submission,
)

PROMPT = tuple(range(20, 51))
IN_PLACE = KvGroup(GroupKind.IN_PLACE_WINDOW, 4)
PAGED = KvGroup(GroupKind.PAGED_WINDOW, 8)
GROUPS = [(FULL,), (PAGED,), (IN_PLACE,), (FULL, PAGED), (FULL, IN_PLACE)]


def assert_whole(sink: ListSink, n: int, max_tokens: int = 8, prompt: tuple[int, ...] = PROMPT) -> None:
    """Checks that every sequence has exactly its tokens and ended once."""
    for sequence in range(n):
        assert sink.tokens_of(sequence) == expected_tokens(prompt, max_tokens, sequence)
    ends = [event.sequence for event in sink.events if event.finish_reason]
    assert sorted(ends) == list(range(n))


def assert_clean(rig: Rig) -> None:
    rig.scheduler.kv.check_integrity()
    assert not rig.scheduler.num_running
    assert not rig.engine.num_waiting
    for group in rig.scheduler.kv.groups:
        assert group.pool.num_free == group.pool.num_blocks


@pytest.mark.parametrize("lease_steps", [1, 8])
@pytest.mark.parametrize("groups", GROUPS)
def test_without_copies_each_sequence_prefills_alone(groups: tuple[KvGroup, ...], lease_steps: int) -> None:
    """A worker that cannot copy blocks gets no plan with copies, and every sequence gets its tokens."""
    rig = make_rig(
        make_shapes(chunk=4, block_size=8), groups=groups, copies_blocks=False, lease_steps=lease_steps,
        most_plans=1000 if lease_steps > 1 else 1,
    )  # fmt: skip
    sinks = [rig.submit(make_submission(PROMPT, request_id=name, n=3)) for name in "ab"]
    plans = rig.run()
    for sink in sinks:
        assert_whole(sink, 3)
    assert not any(plan.copies for plan in plans)
    assert not rig.scheduler.stats.forks
    assert_clean(rig)


@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize("groups", GROUPS)
def test_a_prompt_is_prefilled_once(groups: tuple[KvGroup, ...], prefix_caching: bool) -> None:
    """Each sequence decodes the last token; the others are prefilled once, with or without a prefix cache."""
    rig = make_rig(groups=groups, prefix_caching=prefix_caching)
    sink = rig.submit(make_submission(PROMPT, n=4))
    rig.run()
    assert_whole(sink, 4)
    assert rig.device.prefilled == len(PROMPT) - 1
    assert rig.scheduler.stats.forks == 3
    assert_clean(rig)


def test_whole_blocks_are_shared_and_the_last_one_is_copied() -> None:
    """31 tokens in blocks of 4: all four sequences share seven blocks, and three copy the eighth."""
    rig = make_rig(prefix_caching=False)
    rig.submit(make_submission(PROMPT, n=4))
    while not rig.scheduler.stats.forks:
        rig.step()
    members = rig.engine._live.sequences_of("r")
    tables = [request.kv.tables[0].blocks for request in members]
    assert all(table[:7] == tables[0][:7] for table in tables)
    assert len({id(table[7]) for table in tables}) == 4
    pool = rig.scheduler.kv.groups[0].pool
    assert pool.num_blocks - pool.num_free == 7 + 4
    rig.step()
    assert rig.device.copied == 3


@pytest.mark.parametrize("length", [1, 2, 4, 5, 8, 9])
def test_prompts_of_any_length(length: int) -> None:
    """A single token, whole blocks, whole chunks, and one token more."""
    for groups in GROUPS:
        for prefix_caching in (True, False):
            rig = make_rig(groups=groups, prefix_caching=prefix_caching)
            prompt = PROMPT[:length]
            sink = rig.submit(make_submission(prompt, n=3, max_tokens=5))
            rig.run()
            assert_whole(sink, 3, 5, prompt)
            assert rig.device.prefilled == length - 1
            assert_clean(rig)


def test_more_sequences_than_slots() -> None:
    """Waiting sequences still fork from a running one; no part of the prompt is computed again."""
    rig = make_rig(make_shapes(max_num_seqs=2, buckets=(1, 2)), prefix_caching=False)
    sink = rig.submit(make_submission(PROMPT, n=7, max_tokens=6))
    rig.run()
    assert_whole(sink, 7, 6)
    # Both slots become free in the same step, so no sequence is left to fork from.
    assert rig.device.prefilled <= 4 * (len(PROMPT) - 1)
    assert_clean(rig)


def test_a_cached_prefix_serves_all_sequences() -> None:
    """The first one takes the hit, and the client sees it once."""
    rig = make_rig()
    rig.submit(make_submission(PROMPT, request_id="before", max_tokens=1))
    rig.run()
    before = rig.device.prefilled
    sink = rig.submit(make_submission(PROMPT, n=3))
    rig.run()
    assert_whole(sink, 3)
    assert rig.device.prefilled - before == 2
    (first,) = [event for event in sink.events if event.first]
    assert (first.num_prompt_tokens, first.num_cached_tokens) == (31, 28)
    assert sink.events[0] is first


def test_an_abort_ends_all_sequences() -> None:
    """It may come before the prompt is computed, while some wait for it, or while they decode."""
    for steps in range(12):
        rig = make_rig()
        sink = rig.submit(make_submission(PROMPT, n=6))
        for _ in range(steps):
            rig.step()
        assert rig.engine.abort("r")
        assert not rig.engine.abort("r")
        rig.run()
        assert [event.finish_reason for event in sink.events if event.finish_reason] == [
            FinishReason.ABORT
        ] * 6
        assert rig.engine.find("r") is None
        assert_clean(rig)


def test_one_sequence_can_be_aborted_alone() -> None:
    """The others continue; the request ends with the last of them."""
    rig = make_rig()
    sink = rig.submit(make_submission(PROMPT, n=3))
    for _ in range(10):
        rig.step()
    assert rig.engine.abort("r", 1)
    assert not rig.engine.abort("r", 1)
    assert not rig.engine.abort("r", 7)
    assert rig.engine.find("r") is not None
    rig.run()
    reasons = {event.sequence: event.finish_reason for event in sink.events if event.finish_reason}
    assert reasons == {0: FinishReason.LENGTH, 1: FinishReason.ABORT, 2: FinishReason.LENGTH}
    assert sink.tokens_of(2) == expected_tokens(PROMPT, 8, 2)
    assert_clean(rig)


def test_when_the_first_sequence_is_aborted_another_computes_the_prompt() -> None:
    """The others wait for the new one."""
    rig = make_rig()
    sink = rig.submit(make_submission(PROMPT, n=3))
    for _ in range(3):
        rig.step()
    assert rig.engine.abort("r", 0)
    rig.run()
    assert sink.tokens_of(1) == expected_tokens(PROMPT, 8, 1)
    assert sink.tokens_of(2) == expected_tokens(PROMPT, 8, 2)
    assert_clean(rig)


def test_a_sequence_joins_while_a_lease_is_in_flight() -> None:
    """A slot is released amid leased steps; the waiting sequence forks into it and has room in time."""
    forked = 0
    for moment in range(20):
        shapes = make_shapes(max_num_seqs=2, buckets=(1, 2))
        rig = make_rig(shapes, prefix_caching=False, lease_steps=9)
        sink = rig.submit(make_submission(PROMPT, n=3, max_tokens=24))
        steps = iter(range(1000))

        def leave(rig: Rig = rig, moment: int = moment, steps: Iterator[int] = steps) -> None:
            if next(steps) == moment:
                rig.engine.abort("r", 1)

        rig.meanwhile = leave
        rig.run()
        assert [sink.tokens_of(one) for one in (0, 2)] == [expected_tokens(PROMPT, 24, one) for one in (0, 2)]
        forked += rig.scheduler.stats.forks == 2
        assert_clean(rig)
    assert forked > 5


def test_one_failing_sequence_fails_the_request() -> None:
    """The client gets one error and nothing after it; other requests are not affected."""
    rig = make_rig()
    sink = rig.submit(make_submission(PROMPT, n=3))
    other = rig.submit(make_submission((60, 61, 62), request_id="other"))
    while rig.scheduler.stats.forks < 2 or not sink.tokens_of(1):
        rig.step()
    plan = rig.scheduler.next_plan()
    while plan is not None and isinstance(plan.work, Prefill):
        rig.scheduler.update(rig.device.run(plan))
        plan = rig.scheduler.next_plan()
    assert plan is not None
    slot = next(one.slot for one in rig.engine._live.sequences_of("r") if one.sequence == 1)
    assert slot is not None
    result = rig.device.run(plan)
    tokens = dict(zip(plan.work.slots, result.token_ids, strict=True))  # type: ignore[union-attr]
    outputs = tuple(
        SlotOutput(one, (), error=Internal("out of luck")) if one == slot else SlotOutput(one, (token,))
        for one, token in tokens.items()
    )
    rig.scheduler.update(StepResult(plan.step, outputs=outputs))
    assert rig.engine.find("r") is None
    rig.run()
    errors = [event for event in sink.events if event.error]
    assert errors == [sink.events[-1]]
    assert (errors[0].request_id, errors[0].sequence) == ("r", 1)
    assert other.tokens == expected_tokens((60, 61, 62), 8)
    assert_clean(rig)
    # The id is free again, even before the other sequences have ended.
    again = rig.submit(make_submission(PROMPT, n=3))
    rig.run()
    assert again.tokens_of(2)[-8:] == expected_tokens(PROMPT, 8, 2)


def test_sequences_survive_a_lost_replica() -> None:
    """At any moment: no token is lost, duplicated or changed."""
    for steps in range(16):
        rig = make_rig()
        sink = rig.submit(make_submission(PROMPT, n=4))
        for _ in range(steps):
            rig.step()
        rig.replace_replica()
        rig.run()
        assert_whole(sink, 4)
        assert_clean(rig)


def test_sequences_survive_preemption() -> None:
    """Memory holds two of three long sequences."""
    rig = make_rig(num_blocks=16, prefix_caching=False)
    sink = rig.submit(make_submission(PROMPT[:10], n=3, max_tokens=30))
    rig.run()
    assert_whole(sink, 3, 30, PROMPT[:10])
    assert rig.scheduler.stats.preemptions["memory"]
    assert_clean(rig)


def test_a_resumed_request_continues_each_sequence() -> None:
    """One sequence has ended, one continues behind its tokens, one starts from the prompt."""
    wanted = [expected_tokens(PROMPT, 8, sequence) for sequence in range(3)]
    rig = make_rig()
    resumed = (Resumed(1, tuple(wanted[1][:5])), Resumed(0, (), finished=True))
    sink = rig.submit(make_submission(PROMPT, n=3, resumed_sequences=resumed))
    rig.run()
    assert [sink.tokens_of(sequence) for sequence in range(3)] == [[], wanted[1][5:], wanted[2]]
    assert sorted(event.sequence for event in sink.events if event.finish_reason) == [1, 2]
    assert_clean(rig)


def test_a_resumed_request_may_exceed_the_sequence_limit() -> None:
    """It was accepted when there were more slots, or with fewer tokens."""
    rig = make_rig(make_shapes(max_num_seqs=1, buckets=(1,)), max_waiting_tokens=20 * len(PROMPT))
    with pytest.raises(InvalidArgument, match="n must be at most 16"):
        rig.submit(make_submission(PROMPT, n=20))
    resumed = (Resumed(3, tuple(expected_tokens(PROMPT, 8, 3)[:2])),)
    rig.submit(make_submission(PROMPT, n=20, resumed_sequences=resumed))
    rig.run()
    assert rig.sinks["r"].tokens_of(3) == expected_tokens(PROMPT, 8, 3)[2:]
    assert rig.sinks["r"].tokens_of(19) == expected_tokens(PROMPT, 8, 19)
    assert_clean(rig)


def test_sequence_ids_do_not_clash_with_client_ids() -> None:
    """A client id that looks like a sequence id is refused or kept apart."""
    rig = make_rig()
    rig.submit(make_submission(PROMPT, n=2))
    with pytest.raises(InvalidArgument, match="in use"):
        rig.submit(make_submission(PROMPT, request_id="r#1"))
    with pytest.raises(InvalidArgument, match="in use"):
        rig.submit(make_submission(PROMPT, n=2))
    assert not rig.engine.abort("r#1")
    assert rig.engine.find("r#1") is None
    rig.submit(make_submission(PROMPT, request_id="s#0"))
    with pytest.raises(InvalidArgument, match="in use"):
        rig.submit(make_submission(PROMPT, request_id="s", n=2))
    rig.run()
    assert_clean(rig)


def test_n_is_bounded_by_slots_queue_and_tokens() -> None:
    """The error names the allowed number; a full queue asks to retry."""
    rig = make_rig(make_shapes(max_num_seqs=2, buckets=(1, 2)))
    with pytest.raises(InvalidArgument, match="n must be at most 32 here, not 33"):
        rig.submit(make_submission(PROMPT, n=33))
    rig = make_rig(max_waiting=5)
    with pytest.raises(InvalidArgument, match="n must be at most 5 here"):
        rig.submit(make_submission(PROMPT, n=6))
    rig.submit(make_submission(PROMPT, request_id="a"))
    rig.submit(make_submission(PROMPT, request_id="b"))
    with pytest.raises(Overloaded):
        rig.submit(make_submission(PROMPT, n=5))
    rig = make_rig(max_waiting_tokens=100)
    with pytest.raises(
        InvalidArgument, match="4 sequences of 31 prompt tokens exceed the 100 tokens that may wait"
    ):
        rig.submit(make_submission(PROMPT, n=4))
    rig.submit(make_submission(PROMPT, n=3))


def test_prompt_log_probabilities_are_computed_by_one_sequence() -> None:
    """Only the sequence that computes the prompt is asked for them; they come before its tokens."""
    rig = make_rig()
    sink = rig.submit(make_submission(PROMPT, n=2, sampling=make_sampling(prompt_logprobs=1)))
    entries = tuple(token_logprobs(-1.0, 1, (5, -1.0)) for _ in PROMPT[1:])
    asked = []
    while True:
        rig.engine.dispatch()
        if (plan := rig.scheduler.next_plan()) is None:
            break
        asked += [(one.sequence, one.sampling.HasField("prompt_logprobs")) for one in plan.admit]
        result = rig.device.run(plan)
        work = plan.work
        if isinstance(work, Prefill) and work.start + work.num_tokens == len(PROMPT) - 1:
            result = StepResult(plan.step, outputs=(SlotOutput(work.slot, (), prompt_logprobs=entries),))
        rig.scheduler.update(result)
    assert [event.prompt_logprobs for event in sink.events if event.prompt_logprobs] == [entries]
    assert asked == [(0, True), (1, False)]
    assert sink.events[0] == Event(
        "r", first=True, num_prompt_tokens=31, prompt_logprobs=entries, queue_s=sink.events[0].queue_s,
        replica_id="replica-0",
    )  # fmt: skip
    assert_whole(sink, 2)


@pytest.mark.parametrize("preempted_at", [None, 1, 2, 3])
def test_prompt_log_probabilities_are_sent_once(preempted_at: int | None) -> None:
    """A preempted request computes them again, but the client gets each once, before the first token."""
    rig = make_rig(make_shapes(chunk=4, block_size=4))
    prompt = PROMPT[:9]
    sink = rig.submit(make_submission(prompt, sampling=make_sampling(prompt_logprobs=0), max_tokens=2))
    entries = tuple(token_logprobs(-1.0, position) for position in range(1, len(prompt)))
    chunks, preempts = 0, preempted_at is not None
    while True:
        rig.engine.dispatch()
        if (plan := rig.scheduler.next_plan()) is None:
            break
        result = rig.device.run(plan)
        if isinstance(work := plan.work, Prefill):
            chunks += 1
            chunk = entries[work.start : work.start + work.num_tokens]
            output = SlotOutput(work.slot, tuple(result.token_ids), prompt_logprobs=chunk)
            result = StepResult(plan.step, outputs=(output,))
        rig.scheduler.update(result)
        if chunks == preempted_at:
            preempted_at = None
            urgent = make_submission((7, 8), request_id="urgent", priority=-1, max_tokens=1)
            for number in range(rig.scheduler.shapes.max_num_seqs):
                rig.submit(replace(urgent, request_id=f"urgent {number}"))
    said = [event.prompt_logprobs for event in sink.events if event.prompt_logprobs]
    assert sum(rig.scheduler.stats.preemptions.values()) == preempts
    assert tuple(itertools.chain.from_iterable(said)) == entries
    assert all(event.prompt_logprobs for event in sink.events[: len(said)])
    assert not sink.events[0].token_ids
    assert sink.tokens == expected_tokens(prompt, 2)


def test_a_stop_token_before_min_tokens_does_not_end_a_sequence() -> None:
    """The worker does not sample it; if it comes nevertheless, it is an ordinary token."""
    whole = expected_tokens(PROMPT, 8)
    stop = whole[3]
    for least, length in ((0, 4), (4, 4), (5, 8), (8, 8)):
        rig = make_rig()
        sampling = make_sampling(stop_token_ids=[stop], min_tokens=least)
        sink = rig.submit(make_submission(PROMPT, sampling=sampling))
        rig.run()
        assert sink.tokens == whole[:length]
        wanted = FinishReason.STOP if length == 4 else FinishReason.LENGTH
        assert sink.events[-1].finish_reason is wanted
    rig = make_rig()
    with pytest.raises(InvalidArgument, match="min_tokens=9 is more than the 8 tokens"):
        rig.submit(make_submission(PROMPT, sampling=make_sampling(min_tokens=9)))


def test_a_request_that_waits_for_a_prompt_resumes_when_its_origin_stops() -> None:
    """Two sequences compute their prompt. The request that waits for the second resumes when it stops."""
    group = SequenceGroup("r", ListSink())
    first, second, waiter = (make_request(PROMPT) for _ in range(3))
    for one in (first, second, waiter):
        one.group = group
        group.members.append(one)
    kv = make_rig().scheduler.kv
    shared = SharedPrefills(kv.prefixes, kv.copies, SchedulerStats())
    for one in (first, second):
        shared.start(one)
    assert shared.prompt_computed(first) == []
    shared.defer_for_prompt(waiter, second)
    assert shared.stop(first) == []
    assert shared.stop(second) == [waiter]
    assert shared.num_waiting == 0
