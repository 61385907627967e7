"""Requests with n > 1: one prompt, several sequences, one client request."""

import itertools
from dataclasses import replace

import pytest

from protos.errors import InvalidArgument, Overloaded
from protos.steps import GroupKind, Prefill, SlotOutput, StepResult
from scheduler_svc.requests.admission import Resumed
from scheduler_svc.shapes.shape_config import KvGroup
from tests.support.sampling_params import token_logprobs
from tests.support.scheduler.factories import (
    FULL,
    ListSink,
    Rig,
    expected_tokens,
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


def test_one_sequence_asks_for_prompt_log_probabilities() -> None:
    """The one that computes the prompt."""
    rig = make_rig()
    rig.submit(make_submission(PROMPT, n=3, sampling=make_sampling(prompt_logprobs=1)))
    admitted = [admission for plan in rig.run() for admission in plan.admit]
    assert [one.sampling.HasField("prompt_logprobs") for one in admitted] == [True, False, False]


@pytest.mark.parametrize("in_column", [False, True])
@pytest.mark.parametrize("preempted_at", [None, 1, 2, 3])
def test_prompt_log_probabilities_are_sent_once(preempted_at: int | None, in_column: bool) -> None:
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
            column = tuple(result.token_ids) if in_column else ()
            tokens = () if in_column else tuple(result.token_ids)
            output = SlotOutput(work.slot, tokens, prompt_logprobs=chunk)
            result = StepResult(plan.step, column, (output,))
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
