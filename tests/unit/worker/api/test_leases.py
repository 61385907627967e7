"""Plans, leased steps and plans that continue others, without a model."""

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from protos.errors import Internal, InvalidArgument
from protos.steps import Admission, Decode, Growth, Prefill, SlotOutput, StepPlan, StepResult
from protos.triptych.v1 import common_pb2
from tests.support.sampling_params import sampling_params
from worker_svc.api import leases
from worker_svc.api.leases import PlanRunner
from worker_svc.pending_step import PendingStep


@dataclass
class StubWorker:
    """Answers each decode step with its positions; notes what is launched and read, in order."""

    runs_ahead: bool = False
    launch_fails_at: int = -1
    read_fails_at: int = -1
    forces_at: int = -1
    """The position at which slot 1 gets a second token."""
    reports: bool = False
    """Whether results come as outputs, with log-probabilities."""
    refusals: dict[int, list[SlotOutput]] = field(default_factory=dict)
    """The outputs of plans, by step, that the host had to know."""
    error: BaseException = field(default_factory=lambda: Internal("the device failed"))
    log: list[tuple[str, int]] = field(default_factory=list)
    """("launch" or "read", position of the first slot)."""
    grown: list[Growth] = field(default_factory=list)

    def launch(self, plan: StepPlan, *, leased: bool = False) -> PendingStep:
        assert not (leased and plan.grow)
        self.grown += plan.grow
        if plan.step in self.refusals:
            return PendingStep(self.refusals[plan.step])
        if not isinstance(plan.work, Decode):
            return PendingStep()
        positions = plan.work.positions
        self.log.append(("launch", positions[0]))
        if self.launch_fails_at in positions:
            raise self.error
        if self.forces_at in positions:
            return PendingStep([SlotOutput(1, (7, 8)), SlotOutput(2, (9,))])
        if self.reports:
            entry = common_pb2.TokenLogprobs(logprob=-1.0, rank=1)
            return PendingStep(
                [SlotOutput(at, (token,), (entry,)) for at, token in enumerate(positions, start=1)]
            )

        def read() -> list[int]:
            self.log.append(("read", positions[0]))
            if self.read_fails_at in positions:
                raise self.error
            return list(positions)

        return PendingStep(read_tokens=read, runs_ahead=self.runs_ahead)


@dataclass
class Stream:
    """A stream whose plans have all arrived before the first one runs, unless `arriving` has some."""

    worker: StubWorker
    plans: list[StepPlan]
    arriving: dict[int, StepPlan] = field(default_factory=dict)
    """Plans that arrive once so many results have been handed over."""
    results: list[StepResult] = field(default_factory=list)
    progress: list[int] = field(default_factory=list)

    _deferred: list[Callable[[], object]] = field(default_factory=list)

    def run(self) -> list[StepResult]:
        runner = PlanRunner(self.worker, self, self, hand_over=self._take)
        for plan in self.plans:  # grows meanwhile
            runner.run(plan)
        self.settle()
        return self.results

    def progressed(self) -> None:
        self.progress.append(len(self.results))

    def defer(self, function: Callable[[], object]) -> None:
        """Waits for the device as late as it may."""
        self._deferred.append(function)

    def settle(self) -> None:
        while self._deferred:
            self._deferred.pop(0)()

    def _take(self, plan: StepPlan, result: StepResult) -> None:
        assert plan.step == result.step
        self.results.append(result)
        if (newer := self.arriving.pop(len(self.results), None)) is not None:
            self.plans.append(newer)

    def is_superseded(self, step: int) -> bool:
        return any(plan.step > step and not plan.continues for plan in self.plans)

    @property
    def answers(self) -> list[tuple[int, int, bool]]:
        """Plan, index in its lease and whether it is the plan's last, of each result."""
        return [(result.step, result.lease_index, result.last) for result in self.results]


def leased(step: int = 3, position: int = 7, steps: int = 4, **fields: object) -> StepPlan:
    """Two slots, some steps."""
    return StepPlan(step, Decode((1, 2), (position, position + 2), 2, steps), **fields)  # type: ignore[arg-type]


both = pytest.mark.parametrize("runs_ahead", [False, True])


@both
def test_a_lease_reports_progress_after_each_step(runs_ahead: bool) -> None:
    """A lease may take longer than the stall timeout, so each of its steps counts as progress."""
    stream = Stream(StubWorker(runs_ahead), [leased()])
    results = stream.run()
    assert [list(result.token_ids) for result in results] == [[7, 9], [8, 10], [9, 11], [10, 12]]
    assert stream.answers == [(3, 0, False), (3, 1, False), (3, 2, False), (3, 3, True)]
    assert len(stream.progress) == 3


def test_the_next_step_is_launched_before_a_step_is_read() -> None:
    """A device that runs ahead always has a step while the host reads the one before."""
    worker = StubWorker(runs_ahead=True)
    Stream(worker, [leased(steps=3)]).run()
    assert worker.log == [
        ("launch", 7), ("launch", 8), ("read", 7), ("launch", 9), ("read", 8), ("read", 9),
    ]  # fmt: skip


def test_other_devices_run_one_step_after_the_other() -> None:
    """A step's tokens leave before the next step takes the device."""
    worker = StubWorker()
    Stream(worker, [leased(steps=2)]).run()
    assert worker.log == [("launch", 7), ("read", 7), ("launch", 8), ("read", 8)]


@both
def test_a_superseded_lease_ends(runs_ahead: bool) -> None:
    """Once another plan has arrived, no further step is launched; launched ones are answered."""
    stream = Stream(StubWorker(runs_ahead), [leased(steps=9)], {1: StepPlan(4)})
    stream.run()
    assert stream.answers == [(3, 0, False), (3, 1, True), (4, 0, True)]


@both
def test_a_continued_lease_goes_on_without_a_pause(runs_ahead: bool) -> None:
    """The plan that continues it is no reason to end it, and runs behind it."""
    worker = StubWorker(runs_ahead)
    growth = Growth(1, 0, (5,))
    stream = Stream(worker, [leased(steps=3)], {1: leased(4, 10, 2, continues=True, grow=(growth,))})
    results = stream.run()
    assert stream.answers == [(3, 0, False), (3, 1, False), (3, 2, True), (4, 0, False), (4, 1, True)]
    assert [result.token_ids[0] for result in results] == [7, 8, 9, 10, 11]
    assert worker.grown == [growth]
    if runs_ahead:
        assert worker.log.index(("launch", 10)) < worker.log.index(("read", 9))


@both
@pytest.mark.parametrize(
    "why", ["interrupted", "forced tokens", "failed launch", "failed read", "failed last read"]
)
def test_a_plan_that_continues_another_is_void_unless_that_ran_whole(runs_ahead: bool, why: str) -> None:
    """Its blocks are given all the same; a plan behind it runs."""
    worker = StubWorker(
        runs_ahead,
        forces_at=9 if why == "forced tokens" else -1,
        launch_fails_at=9 if why == "failed launch" else -1,
        read_fails_at={"failed read": 9, "failed last read": 10}.get(why, -1),
    )
    growth = Growth(1, 0, (5,))
    plans = [leased(), leased(4, 11, 2, continues=True, grow=(growth,))]
    behind = leased(5, 20, 1)
    stream = Stream(worker, [*plans, behind] if why == "interrupted" else plans)
    results = stream.run()
    assert [result.void for result in results if result.step == 4] == [True]
    assert results[-1].last
    assert worker.grown == [growth]
    assert (results[-1].step == 5) == (why == "interrupted")
    failures = [result for result in results if result.error is not None]
    assert len(failures) == ("failed" in why)
    assert all(failure.step == 3 and failure.last for failure in failures)


def test_a_chunk_with_log_probabilities_runs_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise every chunk behind it would be void, and so would every chunk behind that one."""
    outputs = PendingStep(
        [SlotOutput(1, (), prompt_logprobs=[common_pb2.TokenLogprobs(logprob=-1.0, rank=1)])]
    )
    worker = StubWorker()
    monkeypatch.setattr(worker, "launch", lambda *_, **__: outputs)
    chunks = [StepPlan(3 + at, Prefill(1, 4 * at, 4, sample=False), continues=at > 0) for at in range(3)]
    results = Stream(worker, chunks).run()
    assert [(result.void, len(result.outputs)) for result in results] == [(False, 1)] * 3


def test_a_void_step_that_was_launched_is_read() -> None:
    """Another rank computes its result, and the next one that arrives is the next step's."""
    worker = StubWorker(runs_ahead=True, read_fails_at=10)
    plans = [leased(1, 10, 1), leased(2, 11, 1, continues=True), leased(3, 20, 1)]
    results = Stream(worker, plans).run()
    assert [result.void for result in results] == [False, True, False]
    assert [position for what, position in worker.log if what == "read"] == [10, 11, 20]


@both
@pytest.mark.parametrize(
    ("error", "message"),
    [
        (Internal("slot 1 is free"), "slot 1 is free"),
        (ValueError("broken\nin two lines"), "the step failed: ValueError: broken"),
    ],
)
def test_a_failed_step_ends_its_plan(runs_ahead: bool, error: Exception, message: str) -> None:
    """The last result has a typed error of one line."""
    first, failed = Stream(StubWorker(runs_ahead, launch_fails_at=8, error=error), [leased()]).run()
    assert (first.last, list(first.token_ids)) == (False, [7, 9])
    assert (failed.step, failed.lease_index, failed.last) == (3, 1, True)
    assert failed.error is not None
    assert failed.error.message == message


def test_a_result_that_no_message_holds_is_the_error_of_its_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stream goes on, and the scheduler learns that the request asks for too much."""
    monkeypatch.setattr(leases, "MAX_MESSAGE_BYTES", 1000)
    entries = [common_pb2.TokenLogprobs(logprob=-1.0, rank=1)] * 200
    large = PendingStep([SlotOutput(1, (5,), prompt_logprobs=entries)])
    worker = StubWorker()
    monkeypatch.setattr(worker, "launch", lambda *_, **__: large)
    (failed,) = Stream(worker, [StepPlan(3, Prefill(1, 0, 4, sample=True))]).run()
    assert isinstance(failed.error, InvalidArgument)
    assert "ask for fewer log-probabilities" in failed.error.message


def test_a_plan_that_depends_on_nothing_is_launched_before_the_one_before_is_read() -> None:
    """A chunk's successor, for example: other requests decode, and the device goes on at once."""
    worker = StubWorker(runs_ahead=True)
    plans = [StepPlan(1, Decode((1,), (10,), 1)), StepPlan(2, Decode((2,), (20,), 1))]
    results = Stream(worker, plans).run()
    assert worker.log == [("launch", 10), ("launch", 20), ("read", 10), ("read", 20)]
    assert [(result.step, list(result.token_ids)) for result in results] == [(1, [10]), (2, [20])]


def test_a_plan_that_depends_on_nothing_outlives_the_one_before() -> None:
    """Its requests are others than those that failed."""
    worker = StubWorker(runs_ahead=True, read_fails_at=10)
    plans = [StepPlan(1, Decode((1,), (10,), 1)), StepPlan(2, Decode((2,), (20,), 1))]
    results = Stream(worker, plans).run()
    assert [(result.step, result.error is None) for result in results] == [(1, False), (2, True)]
    assert list(results[1].token_ids) == [20]


def test_a_void_plan_that_could_not_be_applied_says_so() -> None:
    """Its admissions may be lost, so the scheduler must not take it for applied."""
    worker = StubWorker(runs_ahead=True, read_fails_at=7, launch_fails_at=8)
    results = Stream(worker, [leased(steps=1), leased(4, position=8, steps=1, continues=True)]).run()
    assert [(result.step, result.error is not None, result.void) for result in results] == [
        (3, True, False),
        (4, True, False),
    ]


def test_a_void_plan_that_was_launched_tells_which_admissions_it_refused() -> None:
    """The scheduler must not believe that the refused request has the slot. The step's tokens are nothing."""
    worker = StubWorker(runs_ahead=True, read_fails_at=10)
    refusal = SlotOutput(2, (), error=InvalidArgument("the seed is not a number"))
    launch = worker.launch

    def refusing(plan: StepPlan, *, leased: bool = False) -> PendingStep:
        if plan.admit:
            return PendingStep([refusal, SlotOutput(1, (11,))])
        return launch(plan, leased=leased)

    worker.launch = refusing  # type: ignore[method-assign]
    admission = Admission(2, (3, 4), 0, sampling_params(), {})
    behind = StepPlan(2, Decode((1, 2), (11, 5), 2), admit=(admission,), continues=True)
    failed, void = Stream(worker, [StepPlan(1, Decode((1,), (10,), 1)), behind]).run()
    assert failed.error is not None
    assert void.void
    assert list(void.outputs) == [refusal]
    assert not void.token_ids


def test_the_result_of_a_lease_that_is_cut_short_precedes_its_void_renewal() -> None:
    """The last step may be unread when the renewal turns out to be void."""
    worker = StubWorker(runs_ahead=True)
    plans = [StepPlan(1, Decode((1,), (10,), 1, 4)), StepPlan(2, Decode((1,), (14,), 1, 4), continues=True)]
    stream = Stream(worker, plans, arriving={2: StepPlan(3)})
    results = stream.run()
    assert [(result.step, result.void, result.last) for result in results][-3:] == [
        (1, False, True), (2, True, True), (3, False, True),
    ]  # fmt: skip
    assert [list(result.token_ids) for result in results if result.step == 1] == [[10], [11], [12]]


@both
def test_log_probabilities_end_no_lease_and_void_no_plan(runs_ahead: bool) -> None:
    """They come as outputs with one token for each slot, which is where the next step begins."""
    worker = StubWorker(runs_ahead, reports=True)
    stream = Stream(worker, [leased(steps=3), leased(4, 10, 2, continues=True)])
    results = stream.run()
    assert stream.answers == [(3, 0, False), (3, 1, False), (3, 2, True), (4, 0, False), (4, 1, True)]
    assert [[output.token_ids[0] for output in result.outputs] for result in results] == [
        [7, 9], [8, 10], [9, 11], [10, 12], [11, 13],
    ]  # fmt: skip


@both
def test_a_refused_admission_does_not_void_the_next_chunk(runs_ahead: bool) -> None:
    """The chunk is another request's, and so is the one that continues it."""
    refusal = SlotOutput(2, error=InvalidArgument("no such grammar"))
    worker = StubWorker(runs_ahead)
    worker.refusals = {3: [refusal]}
    chunks = [StepPlan(3 + at, Prefill(1, 4 * at, 4, sample=False), continues=at > 0) for at in range(3)]
    results = Stream(worker, chunks).run()
    assert [(result.void, list(result.outputs)) for result in results] == [
        (False, [refusal]), (False, []), (False, []),
    ]  # fmt: skip


@both
@pytest.mark.parametrize("steps", [1, 4])
def test_an_error_of_one_slot_ends_the_lease_and_voids_only_what_expects_the_rest(
    runs_ahead: bool, steps: int
) -> None:
    """After the only step of a plan, the next one runs; after an earlier one, it expects other positions."""
    worker = StubWorker(runs_ahead)
    worker.refusals = {3: [SlotOutput(2, error=InvalidArgument("no token is left")), SlotOutput(1, (7,))]}
    stream = Stream(worker, [leased(steps=steps), leased(4, 7 + steps, 1, continues=True)])
    results = stream.run()
    assert stream.answers == [(3, 0, True), (4, 0, True)]
    assert [result.void for result in results] == [False, steps > 1]


@both
def test_a_lease_ends_where_a_slot_is_skipped(runs_ahead: bool) -> None:
    """A further step would run the slot, which the worker has refused and the scheduler still counts on."""
    worker = StubWorker(runs_ahead)
    worker.refusals = {3: [SlotOutput(1, (7,))]}
    stream = Stream(worker, [leased()])
    stream.run()
    assert stream.answers == [(3, 0, True)]


@both
def test_a_read_that_ends_the_thread_fails_its_step(runs_ahead: bool) -> None:
    """A library that calls sys.exit must not leave the step unanswered."""
    worker = StubWorker(runs_ahead, read_fails_at=7, error=SystemExit(3))
    (failed,) = Stream(worker, [leased(steps=1)]).run()
    assert failed.error is not None
    assert "SystemExit: 3" in failed.error.message
