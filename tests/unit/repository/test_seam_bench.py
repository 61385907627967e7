"""The windows and figures that the bench of the seam computes."""

import random
import time
from pathlib import Path

import pytest

from protos.errors import Internal, TriptychError
from protos.steps import Decode, Prefill, StepPlan
from protos.triptych.v1 import common_pb2, inference_pb2
from tests.bench.seam import BLOCK, Round, idle_share, mean_lease, median_gaps, prompts, summary
from tests.bench.support.measured_worker import TOKEN, NullEngine, NullWorker, RanStep, read_steps
from tests.bench.support.seam_client import BatchProgress, Window
from worker_svc.settings import Settings
from worker_svc.shapes.geometry import Geometry

LENGTH = common_pb2.FINISH_REASON_LENGTH
RUNNING = common_pb2.FINISH_REASON_UNSPECIFIED


def message(*rows: int, ends: tuple[int, ...] = ()) -> inference_pb2.ConnectResponse:
    """A message with a token for each row; the rows in `ends` end."""
    return inference_pb2.ConnectResponse(events=[
        inference_pb2.GenerateEvent(
            request_id=str(row), token_ids=[TOKEN], finish_reason=LENGTH if row in ends else RUNNING
        )
        for row in rows
    ])  # fmt: skip


def test_a_window_is_the_time_in_which_all_rows_decode() -> None:
    """It lasts from the last row's first token to the first row's last; lengths include prompts."""
    batch = BatchProgress([10, 20])
    batch.take(message(0), 1.0)
    batch.take(message(0), 2.0)
    batch.take(message(0, 1), 3.0)
    batch.take(message(0, 1), 4.0)
    batch.take(message(0, 1, ends=(0,)), 5.0)
    batch.take(message(1, ends=(1,)), 6.0)
    assert batch.running == 0
    assert batch.window() == Window(3.0, 5.0, (13, 21), 4)


def test_rows_that_never_decode_together_are_refused() -> None:
    """Without a common time there is nothing to compare."""
    batch = BatchProgress([10, 20])
    batch.take(message(0, ends=(0,)), 1.0)
    batch.take(message(1, ends=(1,)), 2.0)
    with pytest.raises(RuntimeError, match="raise max_tokens"):
        batch.window()


def test_a_failed_request_fails_the_bench() -> None:
    """The error is the request's."""
    event = inference_pb2.GenerateEvent(request_id="0", error=Internal("out of luck").to_proto())
    with pytest.raises(TriptychError, match="out of luck"):
        BatchProgress([10]).take(inference_pb2.ConnectResponse(events=[event]), 1.0)


STEPS = [
    RanStep(plan, rows, start, end)
    for plan, rows, start, end in (
        (1, 0, 0.0, 1.0), (2, 2, 1.0, 2.0), (2, 2, 3.0, 4.0), (2, 2, 3.5, 5.0), (3, 2, 6.0, 7.0), (4, 2, 9.0, 11.0),
    )
]  # fmt: skip


def test_the_idle_share_is_the_time_without_a_step() -> None:
    """Overlapping steps count once; steps count only inside the window."""
    assert idle_share(STEPS, Window(1.0, 10.0, (), 0)) == pytest.approx(4 / 9)
    assert idle_share(STEPS, Window(3.2, 4.8, (), 0)) == pytest.approx(0)


def test_the_mean_lease_is_decode_steps_per_plan() -> None:
    """Only decode steps that begin in the window count, and its last plan only if there is no other."""
    assert mean_lease(STEPS, Window(0.0, 10.0, (), 0)) == 2
    assert mean_lease(STEPS, Window(0.0, 3.2, (), 0)) == 2


def test_gaps_are_measured_inside_a_plan_and_between_plans() -> None:
    """Steps that overlap have no gap; a window without plans behind one another has none either."""
    assert median_gaps(STEPS, Window(0.0, 10.0, (), 0)) == pytest.approx((0.5, 1.5))
    assert median_gaps(STEPS, Window(0.0, 3.0, (), 0)) == (0, 0)


def test_a_ratio_compares_tokens_per_second() -> None:
    """40 tokens in 8 s through the services are half of 2 rows in steps of 0.2 s."""
    one = Round(2, Window(1.0, 9.0, (13, 21), 40), 0.2)
    assert one.ratio == pytest.approx(0.5)
    figures = summary([one], STEPS)
    assert (figures["served_tok_s"], figures["in_process_tok_s"], figures["ratio"]) == (5, 10, 0.5)


@pytest.mark.parametrize("batch", [8, 32, 128])
def test_blocks_fall_due_at_different_steps(batch: int) -> None:
    """Even if a decode step runs between two prompts, at most two rows need a block at the same step."""
    lengths = [len(prompt) for prompt in prompts(batch, random.Random(0))]
    for steps_between in (0, 1):
        due = [(length - steps_between * row) % BLOCK for row, length in enumerate(lengths)]
        assert max(due.count(step) for step in due) <= 2


def test_a_null_step_takes_its_time() -> None:
    """A step with work takes at least its length and answers each slot; a plan without work does not wait."""
    engine = NullEngine(0.2)
    started = time.monotonic()
    assert engine.launch(StepPlan(1, release=(0,))).read_tokens is None
    released = time.monotonic()
    work = Decode((0, 2), (5, 9), 4)
    outputs = engine.launch(StepPlan(2, work=work)).wait(work)
    decoded = time.monotonic()
    assert released - started < 0.2 <= decoded - released
    assert [(output.slot, output.token_ids) for output in outputs] == [(0, (TOKEN,)), (2, (TOKEN,))]
    chunk = Prefill(1, 0, 8, sample=False)
    assert engine.launch(StepPlan(3, work=chunk)).wait(chunk) == []


def test_a_measured_worker_writes_its_steps(tmp_path: Path) -> None:
    """Each step has its plan, its decode rows and its times."""
    file = tmp_path / "steps.jsonl"
    settings = Settings(model="null-model", device="cpu")
    worker = NullWorker(settings, file, step_s=0.0005)
    worker.prepare()
    worker.configure(Geometry(64, 2, 16, 16, (2,)), lambda *_: None)
    worker.execute(StepPlan(1, work=Prefill(0, 0, 8, sample=True)))
    worker.execute(StepPlan(2, work=Decode((0, 1), (8, 8), 2)))
    worker.close()
    steps = read_steps(file)
    assert [(step.plan, step.rows) for step in steps] == [(1, 0), (2, 2)]
    assert all(step.end - step.start >= 0.0005 for step in steps)
