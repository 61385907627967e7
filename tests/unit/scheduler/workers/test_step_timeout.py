"""How long a step may take, learned from earlier steps of its kind."""

import asyncio
import time
from dataclasses import replace

import pytest
import uvloop

from protos.steps import Admission, Decode, Pool, PoolShape, Prefill, StepPlan, Work
from protos.triptych.v1 import common_pb2
from scheduler_svc.workers import step_timeout
from scheduler_svc.workers.step_timeout import Deadline, StepTimeouts

LONGEST_S = 120.0
DECODE = Decode((0, 1), bucket=2)


def learned(seconds: float, work: Work = DECODE, longest_s: float = LONGEST_S) -> StepTimeouts:
    """Returns timeouts after ten steps over 150 tokens that took `seconds` each."""
    timeouts = StepTimeouts(longest_s)
    for _ in range(10):
        timeouts.of(StepPlan(1, work, context_tokens=150)).observe(seconds)
    return timeouts


@pytest.mark.parametrize(
    ("usual_s", "timeout_s"),
    [(0.001, 5.0), (0.25, 5.0), (0.3, 6.0), (1.0, 20.0), (7.0, LONGEST_S)],
)
def test_a_step_may_take_a_multiple_of_its_usual_time(usual_s: float, timeout_s: float) -> None:
    """The timeout is 20 times the usual time, at least 5 s and at most the configured time."""
    assert learned(usual_s).of(StepPlan(1, DECODE, context_tokens=150)).timeout_s == pytest.approx(timeout_s)


def test_a_short_configured_time_holds_for_all_steps() -> None:
    """A configured time below 5 s is the limit of known steps, too."""
    assert learned(0.001, longest_s=2.0).of(StepPlan(1, DECODE, context_tokens=150)).timeout_s == 2.0


@pytest.mark.parametrize(
    "work",
    [
        Decode((0, 1), bucket=4),
        Prefill(0, 0, 4, sample=False),
        Pool((0,), PoolShape(4, 1)),
        None,
    ],
)
def test_other_kinds_of_steps_are_unknown(work: Work | None) -> None:
    """Another bucket or other work has the configured time: a graph may be compiled."""
    assert learned(0.001).of(StepPlan(1, work)).timeout_s == LONGEST_S


def test_chunks_differ_in_context_and_sampling() -> None:
    """Chunks far into a prompt, and those that sample, are kinds of their own."""
    timeouts = learned(0.001, Prefill(0, 50, 100, sample=False))
    chunk = Prefill(3, 40, 100, sample=False)
    assert timeouts.of(StepPlan(1, chunk, context_tokens=140)).timeout_s == 5.0
    assert timeouts.of(StepPlan(1, replace(chunk, sample=True), context_tokens=140)).timeout_s == LONGEST_S
    assert timeouts.of(StepPlan(1, chunk, context_tokens=4096)).timeout_s == 5.0


def test_an_unknown_kind_has_the_timeout_of_the_slowest_known_one_of_its_graph() -> None:
    """More context than known counts in proportion, because each row may take that much longer."""
    timeouts = learned(0.4)
    for _ in range(10):
        timeouts.of(StepPlan(1, DECODE, context_tokens=20)).observe(0.1)
    timeout_s = {
        tokens: timeouts.of(StepPlan(1, DECODE, context_tokens=tokens)).timeout_s
        for tokens in (2, 40, 300, 1000, 60_000)
    }
    assert timeout_s == pytest.approx({2: 8.0, 40: 8.0, 300: 16.0, 1000: 32.0, 60_000: LONGEST_S})


def test_a_new_sampling_parameter_has_the_timeout_of_the_slowest_known_kind() -> None:
    """Where steps make graphs, a kernel may be compiled for it, so it has the worker's time."""

    def admitting(slot: int, sampling: common_pb2.SamplingParams) -> StepPlan:
        admission = Admission(slot, (5, 6), 0, sampling, {})
        return StepPlan(1, Prefill(slot, 0, 2, sample=False), admit=(admission,))

    for first_s, new_s in ((0.0, 8.0), (3600.0, 3600.0)):
        timeouts = StepTimeouts(LONGEST_S, first_s)
        timeouts.of(admitting(0, common_pb2.SamplingParams(temperature=1)))
        for _ in range(10):
            timeouts.of(StepPlan(2, DECODE)).observe(0.4)
        timeouts.of(admitting(1, common_pb2.SamplingParams(temperature=0.5)))
        assert timeouts.of(StepPlan(3, DECODE)).timeout_s == 8.0
        timeouts.of(admitting(1, common_pb2.SamplingParams(temperature=0.5, top_p=0.9)))
        assert timeouts.of(StepPlan(4, DECODE)).timeout_s == new_s


def test_a_compilation_is_not_the_usual_time() -> None:
    """A first step that compiled leaves no trace, and the timeout waits for several steps."""
    usual = StepTimeouts(LONGEST_S).of(StepPlan(1, DECODE))
    for seconds in (60.0, 0.01, 0.01):
        usual.observe(seconds)
        assert usual.timeout_s == LONGEST_S
    usual.observe(0.01)
    assert usual.timeout_s == 5.0


def test_a_step_that_makes_its_graph_has_the_time_that_its_worker_says() -> None:
    """Later steps of its kind have the usual timeout."""
    usual = StepTimeouts(LONGEST_S, first_s=3600.0).of(StepPlan(1, DECODE))
    assert usual.timeout_s == 3600.0
    for _ in range(10):
        usual.observe(10.0)
    assert usual.timeout_s == LONGEST_S


async def test_a_deadline_follows_the_last_one_set() -> None:
    """A deadline that moves forward or backward is overdue at its last time, once."""
    overdue: asyncio.Queue[float] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    deadline = Deadline(lambda: overdue.put_nowait(loop.time()))
    deadline.set(100)
    deadline.set(0.01)
    set_s = loop.time()
    deadline.set(0.05)
    assert await overdue.get() - set_s >= 0.045
    deadline.close()
    assert overdue.empty()


async def test_an_answered_deadline_is_never_overdue() -> None:
    """The time of an answer is returned, and the timer that is left does nothing."""
    overdue: list[int] = []
    deadline = Deadline(lambda: overdue.append(1))
    deadline.set(0.3)
    await asyncio.sleep(0.01)
    assert 0.009 < deadline.answered() < 10
    await asyncio.sleep(0.35)
    assert not overdue
    deadline.close()


async def test_time_in_which_the_scheduler_stood_still_does_not_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After a freeze of this process a step has its whole timeout again."""
    monkeypatch.setattr(step_timeout, "_STOOD_STILL_S", 0.1)
    overdue: asyncio.Queue[float] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    deadline = Deadline(lambda: overdue.put_nowait(loop.time()))
    deadline.set(0.2)
    time.sleep(0.5)  # noqa: ASYNC251 - freezes the loop
    thawed_s = loop.time()
    assert await overdue.get() - thawed_s >= 0.15
    deadline.close()


def test_a_deadline_may_be_nearer_than_the_clock_of_uvloop_can_tell() -> None:
    """A timer that moved by less than half a millisecond runs at once there, and has no time of its own."""

    async def wait() -> None:
        overdue = asyncio.Event()
        deadline = Deadline(overdue.set)
        deadline.set(0.0001)
        deadline.set(0.0002)
        async with asyncio.timeout(10):
            await overdue.wait()
        deadline.close()

    uvloop.run(wait())
