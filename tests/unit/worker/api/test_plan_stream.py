"""An Execute stream: plans that arrive, results that leave, and spans of its steps."""

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest
from structlog.testing import capture_logs

from protos.step_messages import plan_to_proto
from protos.steps import Admission, Decode, Prefill, SlotOutput, StepPlan, StepResult
from protos.triptych.v1 import common_pb2, worker_pb2
from protos.triptych.v1.worker_pb2 import WorkerReport
from tests.support.tracing.fake_tracer import FakeTracer
from worker_svc.api import plan_stream
from worker_svc.api.model_thread import ModelThread
from worker_svc.api.plan_stream import PlanStream, StepTraces
from worker_svc.api.watchdog import FailedSteps
from worker_svc.pending_step import PendingStep


class Echo:
    """Decodes token 7."""

    def __init__(self, *, runs_ahead: bool = False) -> None:
        self.runs_ahead = runs_ahead
        self.num_late = 2

    def report(self) -> WorkerReport:
        return WorkerReport(late_graphs=self.num_late, process_memory_bytes=7)

    def launch(self, plan: StepPlan) -> PendingStep:
        if plan.work is None:
            return PendingStep()
        return PendingStep(plan.work, read_tokens=lambda: [7], runs_ahead=self.runs_ahead)


def decode(step: int) -> worker_pb2.StepPlan:
    return plan_to_proto(StepPlan(step, Decode((1,), 1, 4)))


StreamOf = Callable[[AsyncIterator[worker_pb2.StepPlan], Echo], PlanStream]


@pytest.fixture
async def stream_of() -> AsyncIterator[StreamOf]:
    """Opens streams of plans on a thread of their own."""
    thread, streams = ModelThread(), list[PlanStream]()

    def make(incoming: AsyncIterator[worker_pb2.StepPlan], worker: Echo) -> PlanStream:
        failed = FailedSteps(0, lambda _: None)
        streams.append(PlanStream(incoming, worker, thread, failed_steps=failed, step_limit_s=0.0))
        return streams[-1]

    yield make
    for stream in streams:
        stream.close()
    await thread.close(wait_s=5.0)


async def plans(
    *messages: worker_pb2.StepPlan, error: Exception | None = None, ends: bool = True
) -> AsyncIterator[worker_pb2.StepPlan]:
    """Yields plans, then fails, ends, or stays open."""
    for message in messages:
        yield message
    if error is not None:
        raise error
    if not ends:
        await asyncio.Event().wait()


@pytest.mark.parametrize("runs_ahead", [False, True])
async def test_a_stream_reads_ahead(stream_of: StreamOf, runs_ahead: bool) -> None:
    """A later plan ends work if it interrupts it; the end of the stream ends what runs."""
    messages: asyncio.Queue[worker_pb2.StepPlan | None] = asyncio.Queue()

    async def incoming() -> AsyncIterator[worker_pb2.StepPlan]:
        while (message := await messages.get()) is not None:
            yield message

    stream = stream_of(incoming(), Echo(runs_ahead=runs_ahead))
    results = stream.results()
    messages.put_nowait(decode(1))
    first = await anext(results)
    assert (first.last, first.report) == (False, worker_pb2.WorkerReport(process_memory_bytes=7))
    later = [await anext(results) for _ in range(3)]
    assert [(result.last, result.HasField("report")) for result in later] == [
        (False, False), (False, False), (True, False),
    ]  # fmt: skip
    messages.put_nowait(decode(2))
    assert [(await anext(results)).num_steps for _ in range(4)] == [1] * 4
    assert not stream.is_interrupted(1)
    messages.put_nowait(worker_pb2.StepPlan(step=3, interrupts=True))
    assert (await anext(results)).step == 3
    assert stream.is_interrupted(2)
    messages.put_nowait(None)
    assert [result async for result in results] == []
    assert stream.is_interrupted(3)


async def test_a_report_counts_from_the_beginning_of_its_stream(stream_of: StreamOf) -> None:
    worker = Echo()
    stream = stream_of(plans(worker_pb2.StepPlan(step=0), decode(1)), worker)
    worker.num_late = 5
    reports = [result.report async for result in stream.results() if result.HasField("report")]
    assert [report.late_graphs for report in reports] == [3]


async def test_a_report_that_fails_costs_no_result(
    stream_of: StreamOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The counters of an earlier report stay as they are, and the log has the reason once."""
    monkeypatch.setattr(plan_stream, "_REPORT_S", 0.0)

    def fail() -> WorkerReport:
        raise RuntimeError("the device says nothing")

    worker = Echo()
    worker.num_late = 5
    with capture_logs() as logs:
        stream = stream_of(plans(*map(decode, range(3))), worker)
        monkeypatch.setattr(worker, "report", fail)
        results = [result async for result in stream.results()]
    assert [result.HasField("report") for result in results] == [False] * len(results)
    assert {result.step for result in results} == {0, 1, 2}
    assert [log["event"] for log in logs] == ["report_failed"]


class Crash(Echo):
    """Has a fault that no step's error covers."""

    def launch(self, plan: StepPlan) -> PendingStep:
        raise SystemExit("a fault")


async def test_a_plan_that_is_not_answered_ends_the_stream(stream_of: StreamOf) -> None:
    stream = stream_of(plans(decode(1), ends=False), Crash())
    with pytest.raises(SystemExit, match="a fault"):
        await anext(stream.results())


async def test_a_plan_that_cannot_be_read_ends_the_stream(stream_of: StreamOf) -> None:
    results = stream_of(plans(plan_to_proto(StepPlan(1)), error=ValueError("no plan")), Echo()).results()
    assert (await anext(results)).step == 1
    with pytest.raises(ValueError, match="no plan"):
        await anext(results)


async def test_a_result_that_cannot_be_encoded_ends_the_stream(stream_of: StreamOf) -> None:
    worker = Echo()
    worker.launch = lambda plan: PendingStep(plan.work, read_tokens=lambda: [1 << 40])  # type: ignore[method-assign]
    stream = stream_of(plans(decode(1), ends=False), worker)
    with pytest.raises(ValueError, match="range"):
        async with asyncio.timeout(5):
            await anext(stream.results())


def admission(slot: int, traceparent: str) -> Admission:
    return Admission(slot, (3, 4), 0, common_pb2.SamplingParams(), {}, traceparent=traceparent)


def test_only_sampled_requests_have_spans() -> None:
    """Skipped work has none either. The end of a stream writes what is left."""
    tracer = FakeTracer()
    traces = StepTraces(tracer)
    traces.note(StepPlan(1, Prefill(0, 0, 2, sample=True), admit=(admission(0, ""),)), StepResult(1))
    traces.note(
        StepPlan(2, Prefill(1, 0, 2, sample=True), admit=(admission(1, "p"),)), StepResult(2, execute_us=7000)
    )
    decoding = StepPlan(3, Decode((0, 1), 2, 9))
    traces.note(decoding, StepResult(3, (5, 6, 7, 8), num_steps=2, execute_us=2000))
    traces.note(decoding, StepResult(3, outputs=[SlotOutput(1, (5,))], execute_us=1000))
    traces.note(decoding, StepResult(3, outputs=[SlotOutput(0, (5,))], execute_us=1000))
    traces.note(StepPlan(4, Decode((0, 1), 2)), StepResult(4, num_steps=0))
    traces.note(StepPlan(5), StepResult(5, num_steps=0))
    assert [span.name for span in tracer.spans] == ["prefill_step"]
    assert tracer.spans[0].end_ns - tracer.spans[0].start_ns == 7_000_000
    traces.close()
    decoded = tracer.spans[1]
    assert (decoded.name, decoded.traceparent) == ("decode_steps", "p")
    assert decoded.attributes == {"triptych.steps": 3, "triptych.busy_s": 0.003}


def test_a_slot_belongs_to_its_last_request() -> None:
    """A slot that is released and given away in one plan has two requests, each with its own steps."""
    tracer = FakeTracer()
    traces = StepTraces(tracer)
    traces.note(StepPlan(1, Decode((1,), 1), admit=(admission(1, "a"),)), StepResult(1, (5,)))
    traces.note(StepPlan(2, Decode((1,), 1), release=(1,), admit=(admission(1, "b"),)), StepResult(2, (5,)))
    traces.note(StepPlan(3, release=(1,)), StepResult(3, num_steps=0))
    assert [(span.name, span.traceparent) for span in tracer.spans] == [
        ("decode_steps", "a"),
        ("decode_steps", "b"),
    ]
