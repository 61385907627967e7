"""Requests that the engine refuses, with the error and its text."""

import contextlib
import itertools
from collections.abc import Sequence
from dataclasses import replace

import pytest

from protos.errors import (
    ContextExceeded,
    Internal,
    InvalidArgument,
    Overloaded,
    TriptychError,
    Unavailable,
    Unsupported,
)
from scheduler_svc.engine.placement import Placer
from scheduler_svc.replica.quarantine import Loss
from scheduler_svc.requests.admission import ModelLimits, Submission
from scheduler_svc.requests.request import Request
from scheduler_svc.requests.sampling import FinishReason
from tests.support.scheduler.factories import (
    EOS,
    Rig,
    expected_tokens,
    make_rig,
    make_sampling,
    make_shapes,
    make_submission,
)
from tests.support.scheduler.second_replica import add_replica, run


@pytest.mark.parametrize(
    ("submission", "error", "message"),
    [
        (make_submission([97]), InvalidArgument, "token id 97; this model's ids end at 96"),
        (make_submission([5], resumed=[500]), InvalidArgument, "token id 500"),
        (
            make_submission([5] * 64),
            ContextExceeded,
            "maximum context length is 64 tokens, but the prompt has 64",
        ),
        (make_submission([5] * 60, max_tokens=5), ContextExceeded, "ask for at most 4"),
        (make_submission(min_p=0.5), Unsupported, "min_p is not supported"),
    ],
)
def test_a_request_that_cannot_be_served_is_refused(
    submission: Submission, error: type[TriptychError], message: str
) -> None:
    """It is refused at submission, with a message that says what to change."""
    rig = make_rig()
    assert isinstance(rig.engine.model, ModelLimits)
    rig.engine.model = replace(rig.engine.model, sampling_fields=frozenset({"temperature"}))
    with pytest.raises(error, match=message):
        rig.submit(submission)
    assert not rig.step()


def test_a_request_that_never_fits_the_memory_is_refused_with_the_numbers() -> None:
    """A request that fits the context but not the KV memory is refused with the size of the memory."""
    rig = make_rig(num_blocks=9)
    with pytest.raises(ContextExceeded, match="maximum context length is 32 tokens a request"):
        rig.submit(make_submission([5] * 30, max_tokens=10))


def test_without_max_tokens_a_request_runs_as_long_as_memory_allows() -> None:
    """Its length is limited to the KV memory."""
    rig = make_rig(num_blocks=9)
    sink = rig.submit(make_submission([5] * 30, max_tokens=None))
    rig.run()
    assert len(sink.tokens) == 2
    assert sink.events[-1].finish_reason is FinishReason.LENGTH


def test_ids_are_unique_among_live_requests_only() -> None:
    """A finished request's id may be used again."""
    rig = make_rig()
    rig.submit(make_submission())
    with pytest.raises(InvalidArgument, match="in use"):
        rig.submit(make_submission())
    rig.run()
    rig.submit(make_submission())


_numbers = itertools.count()


def _flood(rig: Rig, tenant: str, count: int, prompt: Sequence[int] = (5, 6, 7)) -> int:
    """Submits requests of a tenant; returns how many are accepted."""
    accepted = 0
    for _ in range(count):
        with contextlib.suppress(Overloaded):
            rig.submit(make_submission(prompt, request_id=f"{tenant}-{next(_numbers)}", tenant=tenant))
            accepted += 1
    return accepted


def test_a_flood_of_one_tenant_refuses_no_request_of_another() -> None:
    """It fills the queue, as it may alone; half as much again is shared by all tenants that wait."""
    rig = make_rig(make_shapes(max_num_seqs=4), max_waiting=1024)
    assert _flood(rig, "a", 1100) == 1024 + 3  # a fourth would have no turn soon
    assert _flood(rig, "b", 1) == 1
    assert _flood(rig, "a", 1) == 0
    assert _flood(rig, "b2", 1100) == 1024 // 2 // 3


def test_a_flood_of_long_prompts_refuses_no_request_of_another() -> None:
    """The bound on tokens has the same reserve."""
    rig = make_rig(make_shapes(max_num_seqs=1, buckets=(1,)), max_waiting_tokens=400)
    assert _flood(rig, "a", 50, [5] * 20) == 400 // 20 + 1
    assert _flood(rig, "b", 50) == 400 // 2 // 2 // 3


def test_many_tenants_together_have_half_as_much_again() -> None:
    """Whoever may name tenants cannot fill memory with them."""
    rig = make_rig(make_shapes(max_num_seqs=1, buckets=(1,)), max_waiting=10)
    assert sum(_flood(rig, f"tenant-{number}", 10) for number in range(100)) == 1 + 10 + 5


def test_requests_that_wait_for_a_prefix_count_with_their_tokens() -> None:
    """The queue is bounded though their replica holds them, and counts nothing once they have ended."""
    rig = make_rig(make_shapes(max_num_seqs=16), max_waiting_tokens=4 * 33)
    prompt = [5] * 32
    rig.submit(make_submission([*prompt, 6], request_id="first"))
    for number in range(4):
        rig.submit(make_submission([*prompt, 7 + number], request_id=f"same-{number}", tenant="b"))
    assert rig.engine.load().num_deferred == 4
    assert rig.engine.load().num_waiting_tokens == 4 * 33
    with pytest.raises(Overloaded):
        rig.submit(make_submission(prompt, request_id="one more", tenant="b"))
    rig.engine.abort("same-3")
    assert rig.engine.load().num_waiting_tokens == 3 * 33
    rig.run()
    assert (rig.engine.num_waiting, rig.engine.load().num_waiting_tokens) == (0, 0)


def test_a_request_that_fits_no_remaining_replica_waits_for_a_large_one() -> None:
    """After the large replica is lost, its request does not block the smaller one."""
    rig = make_rig(num_blocks=17)
    large = rig.submit(make_submission([5] * 50, request_id="large", max_tokens=10))
    small = rig.submit(make_submission(request_id="small", max_tokens=20))
    while not large.events:
        rig.step()
    assert rig.engine.find("small") is not None
    rig.replace_replica(num_blocks=9, loss=Loss.LEFT)
    rig.run()
    assert small.events[-1].finish_reason is FinishReason.LENGTH
    second = add_replica(rig, num_blocks=17)
    run(rig, second)
    assert large.tokens == expected_tokens([5] * 50, 10)


def test_a_request_that_fits_no_remaining_replica_fails_after_a_while() -> None:
    """The error is retryable, and the smaller replica's requests run meanwhile."""
    rig = make_rig(num_blocks=17)
    large = rig.submit(make_submission([5] * 50, request_id="large", max_tokens=10))
    small = rig.submit(make_submission(request_id="small"))
    rig.step()
    rig.replace_replica(num_blocks=9)
    rig.run()
    assert rig.engine.fail_oversized() == 1
    error = large.events[-1].error
    assert isinstance(error, Unavailable)
    assert "needs 60 tokens of KV memory and the remaining workers hold 32" in error.message
    assert small.events[-1].finish_reason is FinishReason.LENGTH


def test_a_request_that_cannot_be_placed_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bug in placing one request costs neither its replicas nor the requests behind it."""
    rig = make_rig()
    places = Placer.settle

    def fails_for_one(placer: Placer, request: Request) -> bool:
        if request.request_id == "bad":
            raise KeyError("a bug")
        return places(placer, request)

    monkeypatch.setattr(Placer, "settle", fails_for_one)
    bad = rig.submit(make_submission(request_id="bad"))
    good = rig.submit(make_submission(request_id="good"))
    rig.run()
    assert isinstance(bad.events[-1].error, Internal)
    assert good.tokens == expected_tokens([5, 6, 7], 8)
    assert rig.engine.find("bad") is None


def test_new_requests_are_measured_against_the_largest_replica() -> None:
    """A request that fits the largest replica is accepted."""
    rig = make_rig(num_blocks=9)
    with pytest.raises(ContextExceeded):
        rig.submit(make_submission([5] * 40, max_tokens=10))
    rig.replace_replica(num_blocks=17)
    rig.submit(make_submission([5] * 40, max_tokens=10))


def test_a_resumed_request_is_retryable_while_no_replica_is_large_enough() -> None:
    """It gets a retryable error instead of a refusal, and other requests run."""
    shapes = make_shapes(max_model_len=64)
    for max_tokens, received in ((None, 30), (None, 22), (40, 3)):
        rig = make_rig(shapes, num_blocks=9)
        with pytest.raises(Unavailable, match="32 tokens that the remaining workers hold"):
            rig.submit(make_submission(range(3, 13), max_tokens=max_tokens, resumed=[5] * received))
        sampling = make_sampling(min_tokens=23)
        with pytest.raises(Unavailable):
            rig.submit(make_submission(range(3, 13), max_tokens=None, resumed=[5], sampling=sampling))
        plain = rig.submit(make_submission(request_id="plain"))
        rig.run()
        assert plain.events[-1].finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize(("max_tokens", "last"), [(None, EOS), (40, EOS), (40, 5)])
def test_a_resumed_request_that_has_ended_needs_no_memory(max_tokens: int | None, last: int) -> None:
    """It gets its last event although no replica that is left could run it."""
    rig = make_rig(make_shapes(max_model_len=64), num_blocks=9)
    sink = rig.submit(make_submission(range(3, 13), max_tokens=max_tokens, resumed=[*[5] * 39, last]))
    assert [event.finish_reason for event in sink.events] == [
        FinishReason.STOP if last == EOS else FinishReason.LENGTH
    ]


def test_min_tokens_beyond_the_memory_is_refused() -> None:
    """A request that cannot reach its min_tokens is refused at submission."""
    rig = make_rig(make_shapes(max_model_len=64), num_blocks=9)
    with pytest.raises(ContextExceeded, match="and min_tokens=23; ask for less"):
        rig.submit(make_submission(range(3, 13), max_tokens=None, sampling=make_sampling(min_tokens=23)))
    rig.submit(make_submission(range(3, 13), max_tokens=None, sampling=make_sampling(min_tokens=22)))
