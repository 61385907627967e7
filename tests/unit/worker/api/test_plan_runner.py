"""Plans, steps in a row and dead slots, without a model."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest

from protos.errors import Internal, InvalidArgument
from protos.steps import Admission, Decode, Growth, Pool, PoolShape, Prefill, SlotOutput, StepPlan, StepResult
from protos.triptych.v1 import common_pb2
from tests.support.sampling_params import sampling_params
from worker_svc.api import plan_runner
from worker_svc.api.plan_runner import PlanRunner
from worker_svc.pending_step import PendingStep

Place = tuple[int, int]
"""A plan's number, and the index of its step."""
NO_TOKEN = InvalidArgument("no token is left")


@dataclass
class StubWorker:
    """Answers a slot's n-th decode step with token 10 n + slot; notes what is launched and read, in order."""

    runs_ahead: bool = False
    staged: bool = False
    """Whether results come from another rank."""
    launch_errors: dict[Place, BaseException] = field(default_factory=dict)
    read_errors: dict[Place, BaseException] = field(default_factory=dict)
    outputs: dict[Place, list[SlotOutput]] = field(default_factory=dict)
    """The outputs of steps that the host has to know."""
    skipped: dict[Place, int] = field(default_factory=dict)
    """A slot that is not ready."""
    refuses: set[int] = field(default_factory=set)
    """Slots whose admissions are refused."""
    log: list[tuple[str, int, int]] = field(default_factory=list)
    """("launch" or "read", the plan's number, the step's index)."""
    launched: list[StepPlan] = field(default_factory=list)
    _counts: Counter[int] = field(default_factory=Counter)
    _indices: Counter[int] = field(default_factory=Counter)

    def launch(self, plan: StepPlan) -> PendingStep:
        place = plan.step, self._indices[plan.step]
        self._indices[plan.step] += 1
        self.log.append(("launch", *place))
        self.launched.append(plan)
        if (error := self.launch_errors.get(place)) is not None:
            raise error
        refused = [SlotOutput(one.slot, error=NO_TOKEN) for one in plan.admit if one.slot in self.refuses]
        work = plan.work
        if work is None or isinstance(work, Pool):
            return PendingStep(
                work, refused, [SlotOutput(slot, pooled=(1.0,)) for slot in work.slots] if work else ()
            )
        slots = [work.slot] if isinstance(work, Prefill) else [*work.slots]
        if (skipped := self.skipped.get(place)) is not None:
            slots.remove(skipped)
            assert isinstance(work, Decode)
            work = Decode(slots, work.bucket, work.steps)
        self._counts.update(slots)
        tokens = [10 * self._counts[slot] + slot for slot in slots]
        if place in self.outputs and not self.staged:
            return PendingStep(work, refused, self.outputs[place])

        def read() -> list[int]:
            self.log.append(("read", *place))
            if (error := self.read_errors.get(place)) is not None:
                raise error
            return tokens

        def read_result() -> StepResult:
            self.log.append(("read", *place))
            given = self.outputs.get(place, ())
            return StepResult(plan.step, () if given else tokens, given)

        if self.staged:
            return PendingStep(work, refused, read_result=read_result, runs_ahead=True)
        return PendingStep(work, refused, read_tokens=read, runs_ahead=self.runs_ahead)


@dataclass
class Stream:
    """A stream whose plans have all arrived before the first one runs, unless `arriving` has some."""

    worker: StubWorker
    plans: list[StepPlan]
    arriving: dict[int, StepPlan] = field(default_factory=dict)
    """Plans that arrive once so many results have been handed over."""
    ends_after: int = 1000
    """The stream ends once so many results have been handed over."""
    results: list[StepResult] = field(default_factory=list)
    progress: list[int] = field(default_factory=list)

    _deferred: list[Callable[[], object]] = field(default_factory=list)

    def run(self) -> list[StepResult]:
        runner = PlanRunner(self.worker.launch, self.is_interrupted, self, hand_over=self._take)
        for plan in self.plans:  # grows meanwhile
            runner.run(plan)
        self.settle()
        assert [result.step for result in self.results if result.last] == [plan.step for plan in self.plans]
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

    def is_interrupted(self, step: int) -> bool:
        ended = len(self.results) >= self.ends_after
        return ended or any(plan.step > step and plan.interrupts for plan in self.plans)

    @property
    def answers(self) -> list[tuple[int, int, bool]]:
        """Plan, steps and whether it is the plan's last, of each result."""
        return [(result.step, result.num_steps, result.last) for result in self.results]


def tokens_of(result: StepResult) -> list[int]:
    """Returns the tokens of a result; slots with other results than one token are an error here."""
    return [*result.token_ids] or [token for output in result.outputs for token in output.token_ids]


def decode(step: int = 3, *slots: int, steps: int = 4, per_result: int = 1, **fields: object) -> StepPlan:
    """Two slots, if no others are given, and some steps."""
    return StepPlan(step, Decode(slots or (1, 2), 2, steps, per_result), **fields)  # type: ignore[arg-type]


def admission(slot: int) -> Admission:
    return Admission(slot, (3, 4), 0, sampling_params(), {})


def logprob(slot: int, token: int) -> SlotOutput:
    return SlotOutput(slot, (token,), (common_pb2.TokenLogprobs(logprob=-1.0, rank=1),))


both = pytest.mark.parametrize("runs_ahead", [False, True])


@both
@pytest.mark.parametrize("staged", [False, True])
def test_each_step_reports_progress(runs_ahead: bool, staged: bool) -> None:
    """A plan may take longer than the stall timeout, so each of its steps counts as progress."""
    stream = Stream(StubWorker(runs_ahead, staged), [decode()])
    assert [list(result.token_ids) for result in stream.run()] == [[11, 12], [21, 22], [31, 32], [41, 42]]
    assert stream.answers == [(3, 1, False), (3, 1, False), (3, 1, False), (3, 1, True)]
    assert len(stream.progress) == 3


def test_the_next_step_is_launched_before_a_step_is_read() -> None:
    """A device that runs ahead always has a step while the host reads the one before, between plans, too."""
    worker = StubWorker(runs_ahead=True)
    Stream(worker, [decode(3, steps=2), decode(4, steps=3)]).run()
    assert worker.log == [
        ("launch", 3, 0), ("launch", 3, 1), ("launch", 4, 0), ("read", 3, 0), ("read", 3, 1), ("launch", 4, 1),
        ("read", 4, 0), ("launch", 4, 2), ("read", 4, 1), ("read", 4, 2),
    ]  # fmt: skip


def test_other_devices_run_one_step_after_the_other() -> None:
    """A step's tokens leave before the next step takes the device."""
    worker = StubWorker()
    Stream(worker, [decode(steps=2)]).run()
    assert worker.log == [("launch", 3, 0), ("read", 3, 0), ("launch", 3, 1), ("read", 3, 1)]


def test_a_step_of_a_pipeline_waits_for_the_one_before_in_its_plan_only() -> None:
    """Another plan's rows enter the first stage while these pass through the others."""
    worker = StubWorker(staged=True)
    Stream(worker, [decode(3, 1, steps=1), decode(4, 2, steps=1), decode(5, 1, steps=2)]).run()
    assert worker.log == [
        ("launch", 3, 0), ("launch", 4, 0), ("launch", 5, 0), ("read", 3, 0), ("read", 4, 0), ("read", 5, 0),
        ("launch", 5, 1), ("read", 5, 1),
    ]  # fmt: skip


@both
def test_several_steps_share_a_result(runs_ahead: bool) -> None:
    stream = Stream(StubWorker(runs_ahead), [decode(steps=5, per_result=2)])
    assert [list(result.token_ids) for result in stream.run()] == [
        [11, 12, 21, 22],
        [31, 32, 41, 42],
        [51, 52],
    ]
    assert stream.answers == [(3, 2, False), (3, 2, False), (3, 1, True)]


@both
def test_what_several_steps_have_is_said_before_outputs(runs_ahead: bool) -> None:
    worker = StubWorker(runs_ahead, outputs={(3, 2): [logprob(1, 7), logprob(2, 8)]})
    stream = Stream(worker, [decode(steps=5, per_result=4)])
    assert [tokens_of(result) for result in stream.run()] == [[11, 12, 21, 22], [7, 8], [41, 42, 51, 52]]
    assert stream.answers == [(3, 2, False), (3, 1, False), (3, 2, True)]


@both
def test_what_several_steps_have_is_said_before_a_failure(runs_ahead: bool) -> None:
    worker = StubWorker(runs_ahead, read_errors={(3, 2): Internal("the device failed")})
    stream = Stream(worker, [decode(steps=9, per_result=9)])
    first, failed = stream.run()
    assert tokens_of(first) == [11, 12, 21, 22]
    assert failed.error is not None
    assert stream.answers == [(3, 2, False), (3, 1, True)]


@both
def test_an_interrupted_plan_ends(runs_ahead: bool) -> None:
    """Once the plan has arrived, no further step is launched; launched ones are answered."""
    stream = Stream(StubWorker(runs_ahead), [decode(steps=9)], {1: StepPlan(4, interrupts=True)})
    stream.run()
    assert stream.answers == [(3, 1, False), (3, 1, True), (4, 0, True)]


def test_a_pipeline_ends_an_interrupted_plan_with_the_step_that_runs() -> None:
    """What arrives while the step passes through the stages counts."""
    worker = StubWorker(staged=True)
    stream = Stream(worker, [decode(2, 9, steps=1), decode(3, steps=9)], {1: StepPlan(4, interrupts=True)})
    stream.run()
    assert stream.answers == [(2, 1, True), (3, 1, True), (4, 0, True)]


@both
def test_a_plan_that_was_interrupted_before_it_begins_runs_one_step(runs_ahead: bool) -> None:
    worker = StubWorker(runs_ahead)
    growth = Growth(1, 0, (5,))
    chunk = StepPlan(4, Prefill(9, 0, 4, sample=True))
    stream = Stream(worker, [decode(3, steps=4, grow=(growth,)), chunk, decode(5, steps=2, interrupts=True)])
    stream.run()
    assert stream.answers == [(3, 1, True), (4, 1, True), (5, 1, False), (5, 1, True)]
    assert worker.launched[0].grow == [growth]


@both
def test_the_end_of_the_stream_ends_the_work_that_runs(runs_ahead: bool) -> None:
    """Nobody would read more; a plan that was sent runs a step, however early the end is noticed."""
    stream = Stream(StubWorker(runs_ahead), [decode(3, steps=9), decode(4, steps=9)], ends_after=1)
    stream.run()
    assert [(step, last) for step, _, last in stream.answers][-2:] == [(3, True), (4, True)]


@both
def test_a_refused_request_is_left_out_until_its_slot_is_released(runs_ahead: bool) -> None:
    """Plans that were sent before the scheduler knew fail nothing, and other rows run."""
    worker = StubWorker(runs_ahead, refuses={2})
    growths = Growth(1, 0, (5,)), Growth(2, 0, (6,))
    stream = Stream(
        worker,
        [
            decode(1, 1, steps=1, admit=[admission(2)]), StepPlan(2, Prefill(2, 0, 2, sample=True)),
            decode(3, steps=1, grow=growths), decode(4, steps=1, release=[2]),
        ],
    )  # fmt: skip
    first, chunk, mates, _ = stream.run()
    assert [(one.slot, one.error is None, *one.token_ids) for one in first.outputs] == [
        (2, False),
        (1, True, 11),
    ]
    assert (chunk.num_steps, list(chunk.outputs)) == (0, [])
    assert list(mates.outputs) == [SlotOutput(1, (21,))]
    assert worker.launched[2].grow == [growths[0]]
    assert worker.launched[3].work == Decode((1, 2), 2)


@both
@pytest.mark.parametrize("where", ["launch_errors", "read_errors"])
def test_the_slots_of_a_failed_step_are_dead(runs_ahead: bool, where: str) -> None:
    worker = StubWorker(runs_ahead)
    getattr(worker, where)[1, 0] = Internal("the device failed")
    admitting = [admission(3)]
    plans = [
        decode(1, 1, steps=1, admit=admitting, grow=[Growth(4, 0, (9,))]),
        decode(2, 1, 3, 4, steps=2), decode(3, 1, 2, 3, steps=1), decode(4, 1, 3, steps=1, release=[1]),
    ]  # fmt: skip
    failed, skipped, mates, revived = Stream(worker, plans).run()
    assert failed.error is not None
    assert (skipped.num_steps, skipped.error, list(skipped.outputs)) == (0, None, [])
    assert [one.slot for one in mates.outputs] == [2]
    assert [one.slot for one in revived.outputs] == [1]


def test_what_was_launched_before_a_failure_was_known_is_dropped() -> None:
    """Live rows keep their tokens, steps without any have none, and errors of dead slots are no news."""
    worker = StubWorker(
        runs_ahead=True,
        read_errors={(1, 0): Internal("the device failed"), (3, 0): Internal("so it did again")},
    )
    plans = [decode(1, 1, steps=1), decode(2, 1, steps=1), decode(3, 1, steps=1), decode(4, 1, 2, steps=1)]
    failed, dropped, swallowed, mates = Stream(worker, plans).run()
    assert failed.error is not None
    assert [(one.num_steps, one.error, tokens_of(one)) for one in (dropped, swallowed)] == [(0, None, [])] * 2
    assert list(mates.outputs) == [SlotOutput(2, (12,))]
    assert [what for what, *_ in worker.log] == ["launch"] * 4 + ["read"] * 4


def test_a_failure_does_not_reach_the_slots_next_request() -> None:
    """The plan that gives the slot away was launched before the failure was known."""
    worker = StubWorker(runs_ahead=True, read_errors={(1, 0): Internal("the device failed")})
    plans = [
        decode(1, 1, steps=1),
        decode(2, 1, steps=1, release=[1], admit=[admission(1)]),
        decode(3, 1, steps=1),
    ]
    failed, *others = Stream(worker, plans).run()
    assert failed.error is not None
    assert [list(other.token_ids) for other in others] == [[21], [31]]


def test_rows_that_die_while_a_plan_runs_do_not_end_it() -> None:
    """Its first steps were launched before their failure was known."""
    worker = StubWorker(runs_ahead=True, read_errors={(1, 0): Internal("the device failed")})
    stream = Stream(worker, [decode(1, 1, steps=1), decode(2, steps=4, per_result=4)])
    failed, *others = stream.run()
    assert failed.error is not None
    assert [list(other.outputs) for other in others] == [[SlotOutput(2, (10 * n + 2,))] for n in (1, 2, 3, 4)]


@both
@pytest.mark.parametrize(
    ("error", "message"),
    [
        (Internal("slot 1 is free"), "slot 1 is free"),
        (ValueError("broken\nin two lines"), "the step failed: ValueError: broken"),
    ],
)
def test_a_failed_step_ends_its_plan(runs_ahead: bool, error: Exception, message: str) -> None:
    first, failed = Stream(StubWorker(runs_ahead, launch_errors={(3, 1): error}), [decode()]).run()
    assert (first.last, list(first.token_ids)) == (False, [11, 12])
    assert failed.last
    assert failed.error is not None
    assert failed.error.message == message


def test_a_step_behind_a_failed_one_of_its_plan_is_read() -> None:
    """Another rank computes its result, and the next one that arrives is the next step's."""
    worker = StubWorker(runs_ahead=True, read_errors={(1, 0): Internal("the device failed")})
    stream = Stream(worker, [decode(1), decode(2, 3, steps=1)])
    stream.run()
    assert stream.answers == [(1, 1, True), (2, 1, True)]
    assert [place for what, *place in worker.log if what == "read"] == [[1, 0], [1, 1], [2, 0]]


@both
def test_a_plan_without_slots_that_fails_says_so(runs_ahead: bool) -> None:
    worker = StubWorker(runs_ahead, launch_errors={(3, 0): Internal("no such block")})
    (failed,) = Stream(worker, [StepPlan(3)]).run()
    assert (failed.error is not None, failed.num_steps) == (True, 0)


@both
@pytest.mark.parametrize("steps", [1, 4])
@pytest.mark.parametrize("staged", [False, True])
def test_a_slot_with_an_error_of_its_own_dies_and_ends_the_work(
    runs_ahead: bool, steps: int, staged: bool
) -> None:
    worker = StubWorker(
        runs_ahead, staged, outputs={(3, 0): [SlotOutput(2, error=NO_TOKEN), SlotOutput(1, (7,))]}
    )
    stream = Stream(worker, [decode(steps=steps), decode(4, steps=1)])
    first, mates = stream.run()
    assert [one.slot for one in first.outputs] == [2, 1]
    assert [one.slot for one in mates.outputs] == [1]


@both
@pytest.mark.parametrize("staged", [False, True])
def test_forced_tokens_end_the_work(runs_ahead: bool, staged: bool) -> None:
    worker = StubWorker(runs_ahead, staged, outputs={(3, 1): [SlotOutput(1, (7, 8)), SlotOutput(2, (9,))]})
    stream = Stream(worker, [decode()])
    stream.run()
    assert stream.answers == [(3, 1, False), (3, 1, True)]
    assert ("launch", 3, 2) not in worker.log


@both
def test_a_skipped_row_is_missing_and_ends_nothing(runs_ahead: bool) -> None:
    worker = StubWorker(runs_ahead, skipped={(3, 0): 1})
    stream = Stream(worker, [decode(steps=3, per_result=3)])
    assert [list(result.outputs) for result in stream.run()] == [
        [SlotOutput(2, (10 * n + 2,))] for n in (1, 2, 3)
    ]
    assert stream.answers == [(3, 1, False), (3, 1, False), (3, 1, True)]


@both
def test_log_probabilities_end_no_work(runs_ahead: bool) -> None:
    """They come as outputs with one token for each slot, which leaves it ready for the next step."""
    outputs = {(3, at): [logprob(1, 2 * at), logprob(2, 2 * at + 1)] for at in range(3)}
    stream = Stream(StubWorker(runs_ahead, outputs=outputs), [decode(steps=3)])
    assert [tokens_of(result) for result in stream.run()] == [[0, 1], [2, 3], [4, 5]]


def test_a_result_that_no_message_holds_is_the_error_of_its_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stream goes on, and the scheduler learns that the request asks for too much."""
    monkeypatch.setattr(plan_runner, "MAX_MESSAGE_BYTES", 1000)
    entries = [common_pb2.TokenLogprobs(logprob=-1.0, rank=1)] * 200
    worker = StubWorker(outputs={(3, 0): [SlotOutput(1, (5,), prompt_logprobs=entries)]})
    (failed,) = Stream(worker, [StepPlan(3, Prefill(1, 0, 4, sample=True))]).run()
    assert isinstance(failed.error, InvalidArgument)
    assert "ask for fewer log-probabilities" in failed.error.message


@both
def test_a_read_that_ends_the_thread_fails_its_step(runs_ahead: bool) -> None:
    """A library that calls sys.exit must not leave the step unanswered."""
    worker = StubWorker(runs_ahead, read_errors={(3, 0): SystemExit(3)})
    (failed,) = Stream(worker, [decode(steps=1)]).run()
    assert failed.error is not None
    assert "SystemExit: 3" in failed.error.message


def test_prompts_of_dead_slots_are_not_pooled() -> None:
    shape = PoolShape(8, 2)
    worker = StubWorker(launch_errors={(1, 0): Internal("the device failed")})
    pools: Sequence[Pool] = (Pool((1,), shape), Pool((1, 2), shape))
    failed, pooled = Stream(worker, [StepPlan(step, pool) for step, pool in enumerate(pools, 1)]).run()
    assert failed.error is not None
    assert [one.slot for one in pooled.outputs] == [2]
