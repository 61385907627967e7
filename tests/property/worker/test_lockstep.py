"""Ranks in threads: whatever plans come and whenever leases end, all ranks launch the same steps in order."""

import queue
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import hypothesis.strategies as st
import pytest
from hypothesis import given

from protos.steps import Decode, StepPlan, StepResult
from tests.support.property_settings import scaled
from tests.support.ranks.fake_ranks import REFUSED_SLOT, FakeGroup, FakeSteps, Ranks
from worker_svc.api.leases import PlanRunner
from worker_svc.execution.lockstep import Follower, Leader

pytestmark = pytest.mark.property

SLOTS = range(4)


class Waiting:
    """The thread that waits for a device; see `ModelThread`."""

    def __init__(self) -> None:
        self._deferred: queue.Queue[Callable[[], object] | None] = queue.Queue()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def progressed(self) -> None:
        """Has nothing to report to."""

    def defer(self, function: Callable[[], object]) -> None:
        self._deferred.put(function)

    def settle(self) -> None:
        self._deferred.join()

    def close(self) -> None:
        self._deferred.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (function := self._deferred.get()) is not None:
            try:
                function()
            finally:
                self._deferred.task_done()


@dataclass
class Replica:
    """Rank 0 with a stream of plans, and the ranks that follow it."""

    ranks: Ranks
    leader: Leader
    steps: list[FakeSteps]
    runner: PlanRunner = field(init=False)
    thread: Waiting = field(default_factory=Waiting)
    reasons: list[str] = field(default_factory=list)
    """Why a rank gave up."""
    number: int = 0
    """Of the last plan."""
    positions: Counter[int] = field(default_factory=Counter)
    """The next position of each slot, as results tell it."""
    results: Counter[int] = field(default_factory=Counter)
    """Results of each plan."""
    answered: int = 0
    """The last plan that has its last result."""
    patience: int = 1000
    """A lease is interrupted once it has so many results."""
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _slots: dict[int, Sequence[int]] = field(default_factory=dict)

    def open_stream(self) -> None:
        """Begins a stream of plans."""
        self.runner = PlanRunner(self.leader, self, self.thread, hand_over=self._hand_over)

    def is_superseded(self, step: int) -> bool:
        return self.results[step] >= self.patience

    def run(self, **fields: Any) -> None:
        """Runs a plan on the thread that calls this."""
        self.number += 1
        plan = StepPlan(self.number, **fields)
        self._slots[self.number] = plan.work.slots if isinstance(plan.work, Decode) else ()
        self.runner.run(plan)

    def wait_for(self, step: int) -> None:
        """Waits until a plan has its last result."""
        with self._changed:
            assert self._changed.wait_for(lambda: self.answered >= step or bool(self.reasons), 20)

    def in_flight(self) -> set[int]:
        """Returns the slots of plans without a last result."""
        return {slot for step in range(self.answered + 1, self.number + 1) for slot in self._slots[step]}

    def _hand_over(self, plan: StepPlan, result: StepResult) -> None:
        with self._changed:
            assert self.answered < result.step == plan.step
            self.results[plan.step] += 1
            if result.token_ids:
                assert isinstance(plan.work, Decode)
                at = [position + result.lease_index for position in plan.work.positions]
                assert list(result.token_ids) == at, "the result of another step"
                self.positions.update(plan.work.slots)
            self.answered += result.last
            self._changed.notify_all()


@contextmanager
def replica(tensor: int, pipeline: int, *, runs_ahead: bool) -> Iterator[Replica]:
    """Runs ranks for the block; afterwards all have run what was announced, and none has given up."""
    ranks = Ranks(tensor, pipeline)
    reasons: list[str] = []
    steps = [FakeSteps(ranks, rank, runs_ahead=runs_ahead) for rank in range(tensor * pipeline)]
    groups = [cast("Any", FakeGroup(ranks, rank)) for rank in range(tensor * pipeline)]
    threads = []
    for rank in range(1, tensor * pipeline):
        follower = Follower(
            steps[rank], groups[rank], reasons.append, steps[rank].release, steps[rank].unload
        )
        threads.append(threading.Thread(target=follow, args=(follower,), daemon=True))
    running = Replica(ranks, Leader(steps[0], groups[0], reasons.append), steps, reasons=reasons)
    for thread in threads:
        thread.start()
    running.open_stream()
    yield running
    running.wait_for(running.number)
    running.thread.settle()
    assert reasons == []
    ranks.close()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    running.thread.close()


def follow(follower: Follower) -> None:
    """Runs announcements until there are no more."""
    waiting = Waiting()
    try:
        while (announcement := follower.wait()) is not None:
            if (rest := follower.run(announcement)) is not None:
                waiting.defer(rest)
    except RuntimeError:
        waiting.close()


@st.composite
def acts(draw: st.DrawFn) -> tuple[str, frozenset[int], int, int]:
    """Returns an act, the slots that it is about, the steps of a lease, and how many of them may run."""
    kinds = ["decode"] * 6 + ["continue"] * 2 + ["release", "refused", "reset", "configure", "unload"]
    slots = draw(st.frozensets(st.sampled_from(SLOTS), min_size=1))
    return draw(st.sampled_from(kinds)), slots, draw(st.integers(1, 5)), draw(st.integers(1, 6))


def act(running: Replica, kind: str, slots: Sequence[int], lease: int) -> None:
    """Does one act as a scheduler would: slots whose tokens it does not know take no step."""
    match kind:
        case "decode":
            if busy := running.in_flight().intersection(slots):
                running.wait_for(max(step for step, of in running._slots.items() if busy.intersection(of)))
            positions = [running.positions[slot] for slot in slots]
            running.run(work=Decode(slots, positions, len(slots), lease))
        case "release":
            running.run(release=slots)
            running.wait_for(running.number)
            for slot in slots:
                running.positions[slot] += 100
        case "refused":
            running.run(release=[REFUSED_SLOT])
        case "unload":
            running.leader.unload(lease)
            running.steps[0].unload(lease)
        case "reset" | "configure":
            # The stream ends, and results of its plans may still be on their way.
            (running.leader.reset if kind == "reset" else running.leader.begin)()
            if kind == "configure":
                running.steps[0].release()
            running.wait_for(running.number)
            running.open_stream()
            for slot in SLOTS:
                running.positions[slot] += 100


@given(
    st.sampled_from([(2, 1), (4, 1), (1, 2), (1, 3), (2, 2)]), st.booleans(), st.lists(acts(), max_size=25)
)
@scaled(60)
def test_every_rank_launches_every_step_once(
    layout: tuple[int, int], runs_ahead: bool, what: list[tuple[str, frozenset[int], int, int]]
) -> None:
    """Their collectives meet, results reach the steps that they belong to, and no rank has a step more."""
    tensor, pipeline = layout
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with replica(tensor, pipeline, runs_ahead=runs_ahead) as running:
            for kind, slots, lease, patience in what:
                running.patience = patience
                ordered = sorted(slots)
                if kind == "continue" and pipeline == 1:
                    lease_and_renew(running, ordered, lease)
                else:
                    act(
                        running,
                        "decode" if kind == "continue" else kind,
                        ordered,
                        lease if pipeline == 1 else 1,
                    )
    finally:
        sys.setswitchinterval(interval)
    running.ranks.compare()


def lease_and_renew(running: Replica, slots: Sequence[int], lease: int) -> None:
    """Runs a lease and the plan that goes on where it ends, which is void if the lease is cut short."""
    act(running, "decode", slots, lease)
    positions = [running.positions[slot] for slot in slots]
    whole = running.results[running.number] == lease
    if not whole:  # with a step that is not read yet, or cut short: nobody knows from here
        running.wait_for(running.number)
        positions = [running.positions[slot] for slot in slots]
        cut = lease - running.results[running.number]
        positions = [position + cut for position in positions]
    running.run(work=Decode(slots, positions, len(slots), 2), continues=True)


def test_a_lease_for_a_pipeline_is_refused_before_any_rank_hears_of_it() -> None:
    """The first stage cannot run a further step before it knows the token of this one."""
    with replica(1, 2, runs_ahead=False) as running:
        act(running, "decode", (0,), 3)
        act(running, "decode", (0,), 1)
    assert running.results == {1: 1, 2: 1}
    assert running.ranks.logs == [[(2, False, (0, 0))]] * 2
