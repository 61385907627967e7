"""Ranks in threads: whatever plans come and whenever work ends, all ranks launch the same steps in order."""

import itertools
import sys
import threading
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import hypothesis.strategies as st
import pytest
from hypothesis import given

from protos.steps import Decode, Prefill, SlotOutput, StepPlan, StepResult, Work, slots_of
from tests.support.property_settings import scaled
from tests.support.ranks.fake_ranks import REFUSED_SLOT, FakeGroup, FakeSteps, Ranks, Waiting, follow
from worker_svc.api.plan_runner import PlanRunner
from worker_svc.execution.lockstep import Follower, Leader

pytestmark = pytest.mark.property

SLOTS = range(4)


@dataclass
class Replica:
    """Rank 0 with a stream of plans, and the ranks that follow it.

    What slots are is known from the results, which come in order: a slot that got a forced token is not
    ready until a chunk has run, and a slot of a refused plan is dead until it is released.
    """

    ranks: Ranks
    leader: Leader
    steps: list[FakeSteps]
    runner: PlanRunner = field(init=False)
    thread: Waiting = field(default_factory=Waiting)
    reasons: list[str] = field(default_factory=list)
    """Why a rank gave up."""
    number: int = 0
    """Of the last plan."""
    tokens: defaultdict[int, int] = field(default_factory=lambda: defaultdict(lambda: 1))
    """The next token of each slot."""
    forced: set[int] = field(default_factory=set)
    dead: set[int] = field(default_factory=set)
    results: Counter[int] = field(default_factory=Counter)
    """Results of each plan."""
    answered: int = 0
    """The last plan that has its last result."""
    patience: int = 1000
    """A plan is interrupted once it has so many results."""
    _changed: threading.Condition = field(default_factory=threading.Condition)

    def open_stream(self) -> None:
        """Begins a stream of plans."""
        self.forget(SLOTS)
        self.runner = PlanRunner(
            self.leader.launch, self.is_interrupted, self.thread, hand_over=self._hand_over
        )

    def is_interrupted(self, step: int) -> bool:
        return self.results[step] >= self.patience

    def run(self, **fields: Any) -> None:
        """Runs a plan on the thread that calls this."""
        self.number += 1
        self.runner.run(StepPlan(self.number, **fields))

    def wait(self) -> None:
        """Waits until all plans have their last results."""
        with self._changed:
            assert self._changed.wait_for(lambda: self.answered >= self.number or bool(self.reasons), 20)

    def forget(self, slots: Iterable[int]) -> None:
        """Notes that slots are free. All plans are answered."""
        for slot in slots:
            self.tokens.pop(slot, None)
        self.forced.difference_update(slots)
        self.dead.difference_update(slots)

    def _hand_over(self, plan: StepPlan, result: StepResult) -> None:
        with self._changed:
            assert self.answered < result.step == plan.step
            self.results[plan.step] += 1
            slots = slots_of(plan.work)
            if result.error is not None:
                self.dead.update(slots)
            elif result.num_steps:
                self._take(plan.work, slots, result)
            elif self.patience:
                assert self.dead.union(self.forced).issuperset(slots), "live rows that are ready"
            self.answered += result.last
            self._changed.notify_all()

    def _take(self, work: Work | None, slots: Sequence[int], result: StepResult) -> None:
        if isinstance(work, Prefill):
            self.forced.difference_update(slots)
        rows = [slot for slot in slots if slot not in self.dead | self.forced]
        pairs = zip(itertools.cycle(slots), result.token_ids)
        given = [SlotOutput(slot, (token,)) for slot, token in pairs] or result.outputs
        assert [output.slot for output in given] == rows * result.num_steps, "rows that ran"
        for output in given:
            assert output.token_ids[0] == self.tokens[output.slot], "the result of another step"
            self.tokens[output.slot] += len(output.token_ids)
            if len(output.token_ids) > 1:
                self.forced.add(output.slot)


@contextmanager
def replica(tensor: int, pipeline: int, *, runs_ahead: bool, forcing: int = 3) -> Iterator[Replica]:
    """Runs ranks for the block; afterwards all have run what was announced, and none has given up."""
    ranks, world = Ranks(tensor, pipeline), range(tensor * pipeline)
    reasons: list[str] = []
    steps = [FakeSteps(ranks, rank, runs_ahead=runs_ahead, forcing=forcing) for rank in world]
    groups = [cast("Any", FakeGroup(ranks, rank)) for rank in world]
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
    running.wait()
    running.thread.settle()
    assert reasons == []
    ranks.close()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    running.thread.close()


@st.composite
def acts(draw: st.DrawFn) -> tuple[str, frozenset[int], int, int]:
    """Returns an act, the slots that it is about, the steps of a plan, and how many results it may have."""
    kinds = ["decode"] * 8 + ["chunk"] * 3 + ["release", "refused", "reset", "configure", "unload"]
    slots = draw(st.frozensets(st.sampled_from(SLOTS), min_size=1))
    return draw(st.sampled_from(kinds)), slots, draw(st.integers(1, 5)), draw(st.integers(0, 6))


def act(running: Replica, kind: str, slots: Sequence[int], steps: int) -> None:
    """Does one act as a scheduler would: it decodes rows again and again, whatever becomes of them."""
    match kind:
        case "decode":
            running.run(work=Decode(slots, len(slots), steps, steps_per_result=1 + steps // 2))
        case "chunk":
            running.wait()
            for slot in running.forced.difference(running.dead):
                running.run(work=Prefill(slot, 0, 1, sample=True))
        case "release":
            running.run(release=slots)
            running.wait()
            running.forget(slots)
        case "refused":
            running.run(release=[REFUSED_SLOT], work=Decode(slots, len(slots)))
        case "unload":
            running.leader.unload(steps)
            running.steps[0].unload(steps)
        case "reset" | "configure":
            # The stream ends, and results of its plans may still be on their way.
            (running.leader.reset if kind == "reset" else running.leader.begin)()
            if kind == "configure":
                running.steps[0].release()
            running.wait()
            running.open_stream()


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
            for kind, slots, steps, patience in what:
                running.patience = patience
                act(running, kind, sorted(slots), steps)
    finally:
        sys.setswitchinterval(interval)
    running.ranks.compare()


@pytest.mark.parametrize("stages", [2, 3])
def test_a_pipeline_decodes_rows_again_and_again(stages: int) -> None:
    """Plans of the same rows are sent while their steps pass through the stages, also several steps."""
    with replica(1, stages, runs_ahead=True, forcing=0) as running:
        for steps in (1, 1, 2):
            running.run(work=Decode((0, 1), 2, steps, steps_per_result=steps))
            running.run(work=Decode((2,), 1, steps, steps_per_result=steps))
    assert [running.tokens[slot] for slot in range(3)] == [5, 5, 5]
    assert all(len(log) == 8 for log in running.ranks.logs)
    running.ranks.compare()
