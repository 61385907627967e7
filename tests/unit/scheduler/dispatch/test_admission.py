"""What the engine refuses, with which error and which words."""

from dataclasses import replace

import pytest

from protos.errors import (
    ContextExceeded,
    InvalidArgument,
    Overloaded,
    TriptychError,
    Unavailable,
    Unsupported,
)
from scheduler_svc.dispatch.engine import Engine
from scheduler_svc.policy.order import ArrivalOrder
from scheduler_svc.requests.admission import Submission
from scheduler_svc.requests.request import FinishReason
from tests.support.scheduler.factories import (
    ListSink,
    make_geometry,
    make_rig,
    make_sampling,
    make_submission,
)


@pytest.mark.parametrize(
    ("submission", "error", "message"),
    [
        (make_submission([97]), InvalidArgument, "token id 97; this model's ids end at 96"),
        (make_submission([5], resumed=[500]), InvalidArgument, "token id 500"),
        (make_submission([5] * 64), ContextExceeded, "the prompt has 64 tokens and the context holds 64"),
        (make_submission([5] * 60, max_tokens=5), ContextExceeded, "ask for at most 4"),
        (make_submission(max_tokens=2, resumed=[5, 6]), InvalidArgument, "all of max_tokens=2 were received"),
        (make_submission(min_p=0.5), Unsupported, "min_p is not supported"),
    ],
)
def test_a_request_that_cannot_be_served_is_refused(
    submission: Submission, error: type[TriptychError], message: str
) -> None:
    """At once, with a message that says what to change."""
    rig = make_rig()
    assert rig.engine.model is not None
    rig.engine.model = replace(rig.engine.model, sampling_fields=frozenset({"temperature"}))
    with pytest.raises(error, match=message):
        rig.submit(submission)
    assert rig.step() is None


def test_a_request_that_never_fits_the_memory_is_refused_with_the_numbers() -> None:
    """8 blocks of 4 tokens hold 32 tokens; the context would allow 64."""
    rig = make_rig(num_blocks=9)
    with pytest.raises(ContextExceeded, match="never fit this deployment's KV memory of 32 tokens"):
        rig.submit(make_submission([5] * 30, max_tokens=10))


def test_without_max_tokens_a_request_is_cut_to_what_the_memory_holds() -> None:
    """The client asked for nothing in particular, so it gets what there is."""
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


def test_the_queue_is_bounded_by_requests() -> None:
    """Running requests do not count."""
    rig = make_rig(make_geometry(max_num_seqs=1, buckets=(1,)), max_waiting=2)
    rig.submit(make_submission(request_id="running"))
    rig.step()
    for name in "ab":
        rig.submit(make_submission(request_id=name))
    with pytest.raises(Overloaded, match="2 requests with 6 tokens are waiting") as caught:
        rig.submit(make_submission(request_id="c"))
    assert caught.value.retry_after_ms > 0


def test_the_queue_is_bounded_by_tokens_but_one_request_always_gets_in() -> None:
    """A long prompt into an empty queue is not refused for its length alone."""
    rig = make_rig(make_geometry(max_num_seqs=1, buckets=(1,)), max_waiting_tokens=10)
    rig.submit(make_submission(request_id="running"))
    rig.submit(make_submission([5] * 20, request_id="long"))
    with pytest.raises(Overloaded):
        rig.submit(make_submission(request_id="short"))


def test_before_the_first_replica_requests_are_told_to_come_back() -> None:
    """Unavailable, with a time."""
    engine = Engine(max_waiting=1, max_waiting_tokens=1, clock=lambda: 0.0, order=ArrivalOrder())
    with pytest.raises(Unavailable, match="no worker is ready yet"):
        engine.submit(make_submission(), ListSink())


def test_waiting_requests_can_be_failed_together() -> None:
    """When no worker comes back, each client gets the reason."""
    rig = make_rig()
    rig.engine.detach("replica-0")
    sinks = [rig.submit(make_submission(request_id=name)) for name in "ab"]
    assert rig.engine.suspend(Unavailable("gone")) == 2
    assert all(sink.events[-1].error is not None for sink in sinks)
    assert rig.step() is None


async def test_drained_waits_for_the_last_request() -> None:
    """True as soon as nothing is live, False when time is up."""
    rig = make_rig()
    assert await rig.engine.drained(0)
    rig.submit(make_submission())
    assert not await rig.engine.drained(0.01)
    rig.run()
    assert await rig.engine.drained(0)


def test_a_request_that_fits_no_remaining_replica_ends_with_the_numbers() -> None:
    """After a large replica was lost, a request made for it must not block the queue of a smaller one."""
    rig = make_rig(num_blocks=17)
    large = rig.submit(make_submission([5] * 50, request_id="large", max_tokens=10))
    small = rig.submit(make_submission(request_id="small"))
    rig.step()
    rig.replace_replica(num_blocks=9)
    rig.run()
    error = large.events[-1].error
    assert isinstance(error, ContextExceeded)
    assert "needs 60 tokens of KV memory and the remaining workers hold 32" in error.message
    assert small.events[-1].finish_reason is FinishReason.LENGTH


def test_new_requests_are_measured_against_the_largest_replica() -> None:
    """What fits one of them is accepted."""
    rig = make_rig(num_blocks=9)
    with pytest.raises(ContextExceeded):
        rig.submit(make_submission([5] * 40, max_tokens=10))
    rig.replace_replica(num_blocks=17)
    rig.submit(make_submission([5] * 40, max_tokens=10))


def test_what_was_accepted_once_is_not_refused_for_want_of_a_larger_replica() -> None:
    """The rest of a resumed request waits for one, whether its client named a length or not; nobody else is kept waiting."""
    geometry = make_geometry(max_model_len=64)
    for max_tokens, received in ((None, 30), (None, 22), (40, 3)):
        rig = make_rig(geometry, num_blocks=9)
        with pytest.raises(Unavailable, match="32 tokens that the workers that are left hold"):
            rig.submit(make_submission(range(3, 13), max_tokens=max_tokens, resumed=[5] * received))
        sampling = make_sampling(min_tokens=23)
        with pytest.raises(Unavailable):
            rig.submit(make_submission(range(3, 13), max_tokens=None, resumed=[5], sampling=sampling))
        plain = rig.submit(make_submission(request_id="plain"))
        rig.run()
        assert plain.events[-1].finish_reason is FinishReason.LENGTH


def test_least_lengths_beyond_the_memory_are_refused() -> None:
    """A request that could never reach its least length is not begun."""
    rig = make_rig(make_geometry(max_model_len=64), num_blocks=9)
    with pytest.raises(ContextExceeded, match="min_tokens=23 never fit"):
        rig.submit(make_submission(range(3, 13), max_tokens=None, sampling=make_sampling(min_tokens=23)))
    rig.submit(make_submission(range(3, 13), max_tokens=None, sampling=make_sampling(min_tokens=22)))
