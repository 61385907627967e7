"""An Execute stream: its plans go to the model thread as they arrive, and their results come back."""

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from typing import Final, Protocol

from protos.service.logs import get_logger
from protos.service.tracing import Attributes, Tracer
from protos.step_messages import plan_from_proto, result_to_proto
from protos.steps import Decode, Pool, Prefill, StepPlan, StepResult
from protos.triptych.v1 import worker_pb2
from protos.triptych.v1.worker_pb2 import WorkerReport
from worker_svc.api.model_thread import ModelThread
from worker_svc.api.plan_runner import PlanRunner
from worker_svc.api.watchdog import STEP, FailedSteps
from worker_svc.pending_step import PendingStep


@dataclass(slots=True)
class _Traced:
    """A slot with a sampled request."""

    traceparent: str
    """The parent of the request's spans."""
    num_steps: int = 0
    """Its decode steps."""
    busy_us: int = 0
    """Their duration, microseconds."""
    begun_ns: int = 0
    """Start of the first."""
    ended_ns: int = 0
    """End of the last."""


class StepTraces:
    """Writes a span for each prefill chunk, each pooling batch, and all decode steps of a request together.

    It runs on the event loop, from plans and results, without help of the model thread. Without sampled
    requests, a step costs a few comparisons.
    """

    def __init__(self, tracer: Tracer) -> None:
        """Starts without requests."""
        self._tracer = tracer
        self._slots: dict[int, _Traced] = {}
        # The last applied plan.
        self._applied = -1

    def note(self, plan: StepPlan, result: StepResult) -> None:
        """Notes a result, just after the end of its steps."""
        if plan.step != self._applied:
            self._applied = plan.step
            self._apply(plan)
        if self._slots and result.num_steps:
            self._note_work(plan, result)

    def close(self) -> None:
        """Writes the spans of the remaining requests: the stream has ended."""
        for slot in list(self._slots):
            self._leave(slot)

    def _apply(self, plan: StepPlan) -> None:
        """Notes the requests that leave or enter slots."""
        if self._slots:
            for slot in plan.release:
                self._leave(slot)
        for admission in plan.admit:
            if admission.traceparent:
                self._slots[admission.slot] = _Traced(admission.traceparent)

    def _note_work(self, plan: StepPlan, result: StepResult) -> None:
        end_ns = time.time_ns()
        start_ns = end_ns - result.execute_us * 1000
        match plan.work:
            case Prefill(slot, start, num_tokens):
                attributes = {"triptych.first_position": start, "triptych.tokens": num_tokens}
                self._write(slot, "prefill_step", start_ns, end_ns, attributes)
            case Pool(slots, shape):
                for slot in slots:
                    self._write(slot, "pool_step", start_ns, end_ns, {"triptych.shape": str(shape)})
            case Decode(slots):
                ran = [output.slot for output in result.outputs] or slots
                for slot in self._slots.keys() & set(ran):
                    traced = self._slots[slot]
                    traced.begun_ns = traced.begun_ns or start_ns
                    traced.num_steps, traced.ended_ns = traced.num_steps + result.num_steps, end_ns
                    traced.busy_us += result.execute_us

    def _write(self, slot: int, name: str, start_ns: int, end_ns: int, attributes: Attributes) -> None:
        if (traced := self._slots.get(slot)) is None:
            return
        span = self._tracer.begin(name, traced.traceparent, start_ns=start_ns)
        if span is not None:
            span.end(end_ns, attributes)

    def _leave(self, slot: int) -> None:
        traced = self._slots.get(slot)
        if traced is not None and traced.num_steps:
            attributes = {"triptych.steps": traced.num_steps, "triptych.busy_s": traced.busy_us * 1e-6}
            self._write(slot, "decode_steps", traced.begun_ns, traced.ended_ns, attributes)
        self._slots.pop(slot, None)


# Time between two reports.
_REPORT_S: Final = 1.0


class Steps(Protocol):
    """The worker's part of a stream: `execution.worker.Worker`."""

    def launch(self, plan: StepPlan) -> PendingStep:
        """Applies a plan and hands the first step of its work to the device."""
        ...

    def report(self) -> WorkerReport:
        """Returns the worker's counters. Safe on any thread."""
        ...


class PlanStream:
    """Reads plans ahead, so the model thread goes from plan to plan without the event loop."""

    def __init__(
        self,
        messages: AsyncIterator[worker_pb2.StepPlan],
        worker: Steps,
        thread: ModelThread,
        *,
        failed_steps: FailedSteps,
        step_limit_s: float,
        tracer: Tracer | None = None,
    ) -> None:
        """Starts reading. A step that takes longer than `step_limit_s` counts as hung; 0 for any time."""
        self._traces = StepTraces(tracer) if tracer is not None else None
        self._messages = messages
        self._thread = thread
        self._failed_steps = failed_steps
        self._step_limit_s = step_limit_s
        self._loop = asyncio.get_running_loop()
        self._results: asyncio.Queue[worker_pb2.StepResult | None] = asyncio.Queue()
        self._unanswered = 0
        # The latest interrupting plan.
        self._interrupting = -1
        self._ended = self._closed = False
        # Counters of reports begin with the stream.
        self._worker = worker
        # Whether a failure of reports was logged.
        self._reports_failed = False
        self._before = self._count() or WorkerReport()
        self._next_report_s = 0.0
        # The error that ended the stream, or a plan without a result (a fault in this program).
        self._error: BaseException | None = None
        self._runner = PlanRunner(worker.launch, self.is_interrupted, thread, hand_over=self._hand_over)
        self._reading = asyncio.ensure_future(self._read())

    async def results(self) -> AsyncIterator[worker_pb2.StepResult]:
        """Yields the results in order, until the stream has ended and all its plans are answered.

        Raises:
            Exception: any failure to read or answer a plan.
        """
        while self._unanswered or not self._ended:
            if (result := await self._results.get()) is not None:
                self._unanswered -= result.last
                yield result
            elif self._error is not None:
                raise self._error
        await self._reading

    def close(self) -> None:
        """Ends the stream: the running step is the last one."""
        self._ended = self._closed = True
        self._reading.cancel()
        if self._traces is not None:
            self._traces.close()

    def is_interrupted(self, step: int) -> bool:
        """Whether a newer plan interrupts plan `step`, or the stream has ended."""
        return self._ended or self._interrupting > step

    async def _read(self) -> None:
        try:
            async for message in self._messages:
                self._take(message)
        finally:
            self._ended = True
            self._results.put_nowait(None)

    def _take(self, message: worker_pb2.StepPlan) -> None:
        """Queues a plan on the model thread."""
        plan = plan_from_proto(message)
        for each in plan.admit:
            get_logger().debug(
                "admitted", request_id=each.request_id, slot=each.slot, tokens=len(each.token_ids),
                computed_tokens=each.num_computed_tokens,
            )  # fmt: skip
        self._unanswered += 1
        running = self._thread.submit(lambda: self._run(plan), what=STEP, limit_s=self._step_limit_s)
        running.add_done_callback(self._ran)
        # Only now: work may end early only if the interrupting plan is queued.
        if plan.interrupts:
            self._interrupting = plan.step

    def _run(self, plan: StepPlan) -> None:
        """Runs a plan on the model thread, unless its results are no longer read."""
        if not self._closed:
            self._runner.run(plan)

    def _ran(self, running: "asyncio.Future[None]") -> None:
        if not running.cancelled() and (error := running.exception()) is not None:
            self._error = error
            self._results.put_nowait(None)

    def _hand_over(self, plan: StepPlan, result: StepResult) -> None:
        """Passes a result to the event loop for its encoding. Safe on any thread."""
        self._loop.call_soon_threadsafe(self._deliver, plan, result)

    def _deliver(self, plan: StepPlan, result: StepResult) -> None:
        try:
            self._note(plan, result)
        except Exception as error:  # noqa: BLE001 - a fault in this program ends the stream, not its answers
            self._error = error
            self._results.put_nowait(None)

    def _note(self, plan: StepPlan, result: StepResult) -> None:
        # Counted before the scheduler can read the result.
        self._failed_steps.note(result)
        if self._traces is not None:
            self._traces.note(plan, result)
        if plan.work is not None and (now_s := time.monotonic()) >= self._next_report_s:
            self._next_report_s = now_s + _REPORT_S
            result = replace(result, report=self._report())
        self._results.put_nowait(result_to_proto(plan, result))

    def _count(self) -> WorkerReport | None:
        """Returns the worker's counters; None on a failure: steps go on without reports."""
        try:
            return self._worker.report()
        except Exception:  # noqa: BLE001 - devices raise anything
            if not self._reports_failed:
                get_logger().exception("report_failed")
            self._reports_failed = True
            return None

    def _report(self) -> WorkerReport | None:
        """Returns the counts since the start of the stream, and the memory in use now."""
        report, before = self._count(), self._before
        return report and WorkerReport(
            late_graphs=report.late_graphs - before.late_graphs,
            grammar_us=report.grammar_us - before.grammar_us,
            free_memory_bytes=report.free_memory_bytes,
            process_memory_bytes=report.process_memory_bytes,
            adapter_placements=report.adapter_placements - before.adapter_placements,
        )
