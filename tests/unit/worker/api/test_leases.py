"""Plans and leased steps, without a model."""

import asyncio
from collections.abc import AsyncIterator
from typing import cast
from unittest.mock import Mock

import pytest

from protos.errors import Internal
from protos.steps import Decode, SlotOutput, StepPlan
from protos.triptych.v1 import common_pb2, worker_pb2
from worker_svc.api import leases
from worker_svc.api.leases import PlanStream, run_plan
from worker_svc.execution.worker import Worker


class StubWorker:
    """Answers each decode step with its positions; may fail at one position."""

    def __init__(self, fail_at: int = -1, error: Exception | None = None) -> None:
        self._fail_at = fail_at
        self._error = error

    def execute(self, plan: StepPlan) -> list[SlotOutput]:
        assert isinstance(plan.work, Decode)
        if self._error is not None and self._fail_at in plan.work.positions:
            raise self._error
        return [
            SlotOutput(slot, (position,))
            for slot, position in zip(plan.work.slots, plan.work.positions, strict=True)
        ]


def leased_plan() -> worker_pb2.StepPlan:
    """Two slots, four steps."""
    return worker_pb2.StepPlan(
        step=3, decode=worker_pb2.Decode(slots=[1, 2], positions=[7, 9], bucket=2, lease_steps=4)
    )


def test_a_lease_reports_progress_after_each_step() -> None:
    """A lease may take longer than the stall timeout, so each of its steps counts as progress."""
    results: list[worker_pb2.StepResult] = []
    progress: list[int] = []
    run_plan(
        cast("Worker", StubWorker()),
        leased_plan(),
        is_superseded=lambda: False,
        emit=results.append,
        on_progress=lambda: progress.append(len(results)),
    )
    assert [list(result.token_ids) for result in results] == [[7, 9], [8, 10], [9, 11], [10, 12]]
    assert [result.lease_index for result in results] == [0, 1, 2, 3]
    assert [result.last for result in results] == [False, False, False, True]
    assert progress == [1, 2, 3]


def test_a_superseded_lease_ends() -> None:
    """The running step is the last one once another plan has arrived."""
    results: list[worker_pb2.StepResult] = []
    run_plan(
        cast("Worker", StubWorker()),
        leased_plan(),
        is_superseded=lambda: len(results) == 1,
        emit=results.append,
        on_progress=lambda: None,
    )
    assert [(list(result.token_ids), result.last) for result in results] == [([7, 9], False), ([8, 10], True)]


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (Internal("slot 1 is free"), "slot 1 is free"),
        (ValueError("broken\nin two lines"), "the step failed: ValueError: broken"),
    ],
)
def test_a_failed_step_ends_its_plan(error: Exception, message: str) -> None:
    """The last result has a typed error of one line."""
    results: list[worker_pb2.StepResult] = []
    run_plan(
        cast("Worker", StubWorker(fail_at=8, error=error)),
        leased_plan(),
        is_superseded=lambda: False,
        emit=results.append,
        on_progress=lambda: None,
    )
    first, failed = results
    assert (first.last, list(first.token_ids)) == (False, [7, 9])
    assert (failed.step, failed.lease_index, failed.last) == (3, 1, True)
    assert failed.error.message == message


def test_a_result_that_no_message_holds_is_the_error_of_its_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stream goes on, and the scheduler learns that the request asks for too much."""
    monkeypatch.setattr(leases, "MAX_MESSAGE_BYTES", 1000)
    results: list[worker_pb2.StepResult] = []
    entries = [common_pb2.TokenLogprobs(logprob=-1.0, rank=1)] * 200
    worker = Mock(execute=lambda _plan: [SlotOutput(1, (5,), prompt_logprobs=entries)])
    run_plan(
        worker,
        worker_pb2.StepPlan(step=3, prefill=worker_pb2.Prefill(slot=1, num_tokens=4, sample=True)),
        is_superseded=lambda: False,
        emit=results.append,
        on_progress=lambda: None,
    )
    (failed,) = results
    assert failed.error.code == common_pb2.ERROR_CODE_INVALID_ARGUMENT
    assert "ask for fewer log-probabilities" in failed.error.message


async def test_a_stream_reads_ahead() -> None:
    """A plan is superseded once a later one has arrived or the stream has ended."""
    arrived = asyncio.Event()

    async def messages() -> AsyncIterator[worker_pb2.StepPlan]:
        yield worker_pb2.StepPlan(step=1)
        await arrived.wait()
        yield worker_pb2.StepPlan(step=2)

    plans = PlanStream(messages())
    first = await plans.next()
    assert first is not None
    assert not plans.is_superseded(first.step)
    arrived.set()
    assert (await plans.next()) == worker_pb2.StepPlan(step=2)
    assert plans.is_superseded(first.step)
    assert await plans.next() is None
    assert plans.is_superseded(2)
    plans.close()
