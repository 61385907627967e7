"""Requests that wait too long: for their first slot, or for a token."""

import asyncio

import pytest

from protos.errors import TimedOut
from scheduler_svc.engine.request_timeouts import RequestTimeouts, Timeout
from scheduler_svc.replica.quarantine import Loss
from scheduler_svc.requests.admission import Resumed
from scheduler_svc.requests.request import Request
from tests.support.scheduler.factories import (
    ListSink,
    Rig,
    expected_tokens,
    make_rig,
    make_shapes,
    make_submission,
)

_PROMPT = [5, 6, 7]


def one_slot() -> Rig:
    return make_rig(make_shapes(max_num_seqs=1, buckets=(1,)))


def timeouts(rig: Rig, *, queue_s: float = 0.0, token_s: float = 0.0) -> RequestTimeouts:
    return RequestTimeouts(rig.engine, queue_s=queue_s, token_s=token_s, clock=lambda: rig.now)


def timed_out(sink: ListSink) -> bool:
    """Whether the request's last event is the error, which a client may answer with a retry."""
    error = sink.events[-1].error if sink.events else None
    if error is None:
        return False
    assert isinstance(error, TimedOut)
    assert error.retryable
    return True


def test_a_request_that_had_a_slot_is_out_of_the_queue_for_good() -> None:
    """It waits again after its worker is lost, and the bound on the queue does not hold for it."""
    rig = one_slot()
    limits = timeouts(rig, queue_s=10.0)
    sink = rig.submit(make_submission())
    rig.step()
    rig.now = 8.0
    rig.engine.detach("replica-0", Loss.LEFT)
    rig.now = 100.0
    limits.check()
    rig.start()
    rig.run()
    assert sink.tokens == expected_tokens(_PROMPT, 8)


@pytest.mark.parametrize(("received", "fails"), [(0, True), (3, False)])
def test_a_resumed_request_keeps_its_age(received: int, fails: bool) -> None:
    """The queue's bound counts the time under an earlier scheduler, but only until the answer has begun."""
    rig = one_slot()
    limits = timeouts(rig, queue_s=10.0)
    rig.submit(make_submission(request_id="running"))
    rig.step()
    answer = expected_tokens(_PROMPT, 8)
    sink = rig.submit(make_submission(request_id="resumed", age_s=9.0, resumed=answer[:received]))
    rig.now = 2.0
    limits.check()
    assert timed_out(sink) == fails
    rig.run()
    assert sink.tokens == ([] if fails else answer[received:])


def test_a_request_without_new_tokens_fails() -> None:
    """It waits for a worker again and again; the time counts from its last token."""
    rig = one_slot()
    limits = timeouts(rig, token_s=60.0)
    sink = rig.submit(make_submission(max_tokens=20))
    rig.step()
    limits.check()
    while len(sink.tokens) < 3:
        rig.step()
    rig.now = 50.0
    limits.check()
    for losses in range(3):
        rig.now += 19.0
        assert not timed_out(sink), losses
        rig.replace_replica(loss=Loss.LEFT)
        limits.check()
    rig.now += 19.0
    limits.check()
    assert timed_out(sink)
    assert "no token for more than 60 s" in str(sink.events[-1].error)
    rig.run()
    assert limits.num_failed == {Timeout.TOKEN: 1}
    assert rig.engine.find("r") is None


def test_each_token_starts_the_time_anew() -> None:
    """A slow request never fails."""
    rig = one_slot()
    limits = timeouts(rig, token_s=60.0)
    sink = rig.submit(make_submission(max_tokens=20))
    while rig.step():
        rig.now += 45.0
        limits.check()
    assert sink.tokens == expected_tokens(_PROMPT, 20)


def test_waiting_for_the_first_slot_is_not_silence() -> None:
    """Only the queue's bound holds for a request that has not begun."""
    rig = one_slot()
    limits = timeouts(rig, token_s=60.0)
    rig.submit(make_submission(request_id="running"))
    rig.step()
    sink = rig.submit(make_submission(request_id="waiting"))
    rig.now = 1000.0
    limits.check()
    assert not sink.events


def test_silence_counts_over_restarts_of_the_scheduler() -> None:
    """A client says how long its request has brought nothing when it submits it again."""
    rig = one_slot()
    limits = timeouts(rig, token_s=60.0)
    answer = expected_tokens(_PROMPT, 8)
    rig.submit(make_submission(request_id="running"))
    rig.step()
    sink = rig.submit(make_submission(request_id="resumed", age_s=70.0, silent_s=50.0, resumed=answer[:3]))
    limits.check()
    rig.now = 9.0
    limits.check()
    assert not timed_out(sink)
    rig.now = 11.0
    limits.check()
    assert timed_out(sink)


def test_the_sequences_of_a_request_wait_together() -> None:
    """A sequence that has no slot yet does not fail while another one brings tokens, whatever the bounds."""
    rig = one_slot()
    limits = timeouts(rig, queue_s=10.0, token_s=10.0)
    sink = rig.submit(make_submission(n=3, max_tokens=8))
    while rig.step():
        rig.now += 3.0
        limits.check()
    assert [sink.tokens_of(one) for one in range(3)] == [expected_tokens(_PROMPT, 8, one) for one in range(3)]


def test_a_request_whose_first_sequence_came_and_went_has_begun() -> None:
    """No check has seen it with a slot, and its other sequence has had none."""
    rig = one_slot()
    limits = timeouts(rig, queue_s=10.0)
    sink = rig.submit(make_submission(n=2, max_tokens=2))
    while not any(event.finish_reason for event in sink.events):
        rig.step()
    rig.now = 11.0
    limits.check()
    rig.run()
    assert [sink.tokens_of(one) for one in range(2)] == [expected_tokens(_PROMPT, 2, one) for one in range(2)]


def test_a_resumed_request_with_a_finished_sequence_has_begun() -> None:
    """The bound on the queue does not hold for the rest of it."""
    rig = one_slot()
    limits = timeouts(rig, queue_s=10.0)
    rig.submit(make_submission(request_id="running"))
    rig.step()
    resumed = (Resumed(0, finished=True),)
    sink = rig.submit(make_submission(request_id="resumed", n=2, age_s=20.0, resumed_sequences=resumed))
    limits.check()
    assert not sink.events


async def test_a_bug_does_not_end_the_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next check runs as ever."""
    rig = one_slot()
    checks, live = 0, rig.engine.live

    def flaky() -> list[Request]:
        nonlocal checks
        checks += 1
        if checks == 1:
            raise ValueError("a bug")
        return live()

    monkeypatch.setattr(rig.engine, "live", flaky)
    limits = RequestTimeouts(rig.engine, queue_s=0.1, token_s=0.0, clock=lambda: rig.now)
    rig.submit(make_submission(request_id="running"))
    rig.step()
    sink = rig.submit(make_submission())
    rig.now = 1.0
    task = asyncio.create_task(limits.run())
    async with asyncio.timeout(10):
        while not timed_out(sink):
            await asyncio.sleep(0.01)
    task.cancel()


async def test_a_freeze_of_the_scheduler_is_not_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first check after it only looks: results that have arrived meanwhile come first."""
    rig = one_slot()
    looked, live = asyncio.Event(), rig.engine.live

    def watched() -> list[Request]:
        looked.set()
        return live()

    monkeypatch.setattr(rig.engine, "live", watched)
    limits = RequestTimeouts(rig.engine, queue_s=0.0, token_s=0.1, clock=lambda: rig.now)
    sink = rig.submit(make_submission())
    rig.step()
    limits.check()
    rig.now = 30.0
    limits.check(only_look=True)
    assert not timed_out(sink)
    task = asyncio.create_task(limits.run())
    await asyncio.sleep(0)
    rig.now = 60.0
    looked.clear()
    await looked.wait()
    await asyncio.sleep(0)
    assert not timed_out(sink)
    while not timed_out(sink):
        await asyncio.sleep(0.01)
    task.cancel()
