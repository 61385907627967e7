"""``triptych.v1.Worker``: each call parsed, handed to the model's thread, and answered."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

from protos.errors import Internal, SchemaMismatch, TriptychError, Unavailable, Unsupported, abort
from protos.logs import get_logger
from protos.step_messages import is_compact, plan_from_proto, result_to_proto
from protos.steps import Decode, StepPlan, StepResult
from protos.triptych.v1 import common_pb2, worker_pb2, worker_pb2_grpc
from protos.wire import SCHEMA_REVISION, Context, file_chunks
from worker_svc.api import convert
from worker_svc.api.model_thread import ModelThread
from worker_svc.execution.worker import Ready, Worker
from worker_svc.grammars.spec import spec_of
from worker_svc.model_files import loader
from worker_svc.plans.phases import Phase


class WorkerServicer(worker_pb2_grpc.WorkerServicer):
    """Serves one worker to one scheduler.

    A fault in a step is that step's answer; it ends neither the stream nor the process.
    """

    def __init__(
        self,
        worker: Worker,
        thread: ModelThread,
        *,
        prepared: asyncio.Future[None],
        worker_id: str,
        model: str,
        on_ready: Callable[[], Coroutine[Any, Any, None]],
    ) -> None:
        """Serves ``worker``.

        Args:
            worker: touched on ``thread`` alone, except for what :meth:`Worker.prepare` leaves behind.
            thread: the model's.
            prepared: done once the worker is prepared.
            worker_id: announced to the scheduler.
            model: the setting that named the model.
            on_ready: awaited once the worker is configured.
        """
        self._worker = worker
        self._thread = thread
        self._prepared = prepared
        self._worker_id = worker_id
        self._model = model
        self._on_ready = on_ready
        self._ready: Ready | None = None
        self._executing = False
        self._log = get_logger()

    async def Describe(
        self, request: worker_pb2.DescribeRequest, context: Context
    ) -> worker_pb2.DescribeResponse:
        """Answers once the model's configuration is read."""
        if request.schema_revision != SCHEMA_REVISION:
            await abort(
                context,
                SchemaMismatch(
                    f"the scheduler speaks schema revision {request.schema_revision}, this worker {SCHEMA_REVISION};"
                    " run the same release on both"
                ),
            )
        await asyncio.shield(self._prepared)
        return convert.description_to_proto(self._worker, worker_id=self._worker_id, model=self._model)

    async def Configure(
        self, request: worker_pb2.ConfigureRequest, context: Context
    ) -> AsyncIterator[worker_pb2.ConfigureEvent]:
        """Streams progress, then what the worker runs with."""
        geometry = convert.geometry_from_proto(request)
        await asyncio.shield(self._prepared)
        events: asyncio.Queue[worker_pb2.ConfigureEvent | None] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def progress(phase: Phase, done: int, total: int, message: str) -> None:
            loop.call_soon_threadsafe(
                events.put_nowait, convert.progress_to_proto(phase, done, total, message)
            )

        def work() -> Ready:
            # On the model's thread, behind whatever an earlier stream left there.
            if self._executing and not self._worker.is_configured_as(geometry):
                raise Unavailable("another configuration is being executed; end the Execute stream first")
            return self._worker.configure(geometry, progress)

        configuring = self._thread.submit(work)
        configuring.add_done_callback(lambda _: events.put_nowait(None))
        while (event := await events.get()) is not None:
            yield event
        try:
            self._ready = configuring.result()
        except Unavailable as error:
            await abort(context, error)  # what is being executed goes on
        except TriptychError as error:
            self._ready = None
            self._log.error("configuration_refused", reason=error.message)
            await abort(context, error)
        except Exception as error:  # noqa: BLE001 - whatever it is, the scheduler is told and may try again
            self._ready = None
            self._log.exception("configuration_failed")
            await abort(context, Internal(f"the worker failed to start: {_one_line(error)}"))
        await self._on_ready()
        yield convert.ready_to_proto(self._ready)

    async def GetModelFiles(
        self, request: worker_pb2.GetModelFilesRequest, context: Context
    ) -> AsyncIterator[common_pb2.FileChunk]:
        """Streams the tokenizer's files, piece by piece."""
        del request, context
        await asyncio.shield(self._prepared)
        for path in loader.tokenizer_files(self._worker.folder):
            for chunk in file_chunks(path.name, await asyncio.to_thread(path.read_bytes)):
                yield chunk

    async def CompileGrammar(
        self, request: worker_pb2.CompileGrammarRequest, context: Context
    ) -> worker_pb2.CompileGrammarResponse:
        """Answers once the grammar is compiled, on threads and in processes beside the model's."""
        await asyncio.shield(self._prepared)
        started = time.perf_counter()
        try:
            grammars = self._worker.grammars
            if grammars is None:
                raise Unsupported(
                    "structured_output is not supported for this model", param="structured_output"
                )
            memory = await grammars.prepare(spec_of(request.structured_output))
        except TriptychError as error:
            await abort(context, error)
        except Exception as error:  # noqa: BLE001 - a fault of one grammar is that call's answer
            self._log.exception("grammar_failed")
            await abort(context, Internal(f"compiling the grammar failed: {_one_line(error)}"))
        return worker_pb2.CompileGrammarResponse(memory_bytes=memory, compile_us=_elapsed_us(started))

    async def Execute(
        self, request_iterator: AsyncIterator[worker_pb2.StepPlan], context: Context
    ) -> AsyncIterator[worker_pb2.StepResult]:
        """Runs plans in order until either side ends the stream; then every slot is free."""
        if self._ready is None or self._executing:
            # Both pass: a lost scheduler's stream ends with its keepalive.
            why = "another Execute stream is open" if self._ready else "the worker is not configured yet"
            await abort(context, Unavailable(why, retry_after_ms=1000))
        self._executing = True
        plans = _Plans(request_iterator)
        results: asyncio.Queue[worker_pb2.StepResult] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def emit(result: worker_pb2.StepResult) -> None:
            loop.call_soon_threadsafe(results.put_nowait, result)

        try:
            while (plan := await plans.next()) is not None:
                newer = plans.newer_than(plan.step)
                self._thread.submit(lambda plan=plan, newer=newer: self._run(plan, newer, emit))  # type: ignore[misc]
                while not (result := await results.get()).last:
                    yield result
                yield result
        finally:
            self._executing = False
            plans.close()
            # Behind the step that may still run; a new stream's plans come behind this.
            self._thread.submit(self._worker.reset)

    def _run(
        self,
        message: worker_pb2.StepPlan,
        newer: Callable[[], bool],
        emit: Callable[[worker_pb2.StepResult], None],
    ) -> None:
        """One plan, on the model's thread: a step, or those that it leases until ``newer`` says that another plan is there."""
        index, started = 0, time.perf_counter()
        try:
            plan = plan_from_proto(message)
            while True:
                outputs = self._worker.execute(plan)
                work = plan.work
                on = isinstance(work, Decode) and index + 1 < work.lease and not newer()
                # Whoever has more to say than one token a slot is waited for.
                on = on and is_compact(plan, outputs)
                result = StepResult(
                    plan.step,
                    outputs=outputs,
                    last=not on,
                    lease_index=index,
                    execute_us=_elapsed_us(started),
                )
                emit(result_to_proto(plan, result))
                if not on:
                    return
                self._thread.progressed()
                assert isinstance(work, Decode)
                plan = StepPlan(plan.step, work=work.next())
                index, started = index + 1, time.perf_counter()
        except Exception as error:  # noqa: BLE001 - a fault of one step is that step's answer
            self._log.exception("step_failed", step=message.step)
            known = (
                error
                if isinstance(error, TriptychError)
                else Internal(f"the step failed: {_one_line(error)}")
            )
            failure = StepResult(
                message.step, error=known, lease_index=index, execute_us=_elapsed_us(started)
            )
            emit(result_to_proto(StepPlan(message.step), failure))


class _Plans:
    """The plans of one stream, read ahead, so that a lease ends when another plan comes."""

    def __init__(self, messages: AsyncIterator[worker_pb2.StepPlan]) -> None:
        self._messages = messages
        self._queue: asyncio.Queue[worker_pb2.StepPlan | None] = asyncio.Queue()
        self._latest = 0
        self._closed = False
        self._reading = asyncio.ensure_future(self._read())

    async def _read(self) -> None:
        try:
            async for message in self._messages:
                self._latest = max(self._latest, message.step)
                self._queue.put_nowait(message)
        finally:
            self._closed = True
            self._queue.put_nowait(None)

    async def next(self) -> worker_pb2.StepPlan | None:
        """The next plan, or ``None`` once the stream has ended."""
        return await self._queue.get()

    def newer_than(self, step: int) -> Callable[[], bool]:
        """Says, on any thread, whether a plan behind that one is there, or none will come."""
        return lambda: self._closed or self._latest > step

    def close(self) -> None:
        """Reads no more."""
        self._closed = True
        self._reading.cancel()


def _elapsed_us(started: float) -> int:
    return round((time.perf_counter() - started) * 1e6)


def _one_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
