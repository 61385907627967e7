"""The gRPC service `triptych.v1.Worker`: parses each call, runs it on the model thread and answers."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, NoReturn, TypeVar

from protos.errors import (
    ConfigurationRefused,
    Context,
    SchemaMismatch,
    TriptychError,
    Unavailable,
    Unsupported,
    abort,
)
from protos.service.grpc_options import SCHEMA_REVISION, file_chunks
from protos.service.logs import get_logger
from protos.service.tracing import Tracer
from protos.triptych.v1 import common_pb2, worker_pb2, worker_pb2_grpc
from worker_svc.api import convert
from worker_svc.api.model_thread import ModelThread
from worker_svc.api.plan_runner import as_triptych_error, elapsed_us
from worker_svc.api.plan_stream import PlanStream
from worker_svc.api.watchdog import STEP, FailedSteps
from worker_svc.execution.lockstep import Follower
from worker_svc.execution.worker import Ready, Worker
from worker_svc.grammars.spec import spec_of
from worker_svc.lora.checkpoint import is_named_like
from worker_svc.lora.store import HostAdapter
from worker_svc.model_files import loader
from worker_svc.phases import Phase, PhaseProgress
from worker_svc.shapes import Shapes

R = TypeVar("R")

# Far more than a scheduler's loads under way: each source on a hanging disk keeps a thread.
_MOST_THREADS = 64
# A scheduler asks all ranks at the same time. A rank with the same sizes as before may have answered before
# rank 0 dropped them, and is not asked again.
_ASKED_WITHIN_S = 60.0


class AdapterThreads:
    """Reads adapters from slow disks and hubs without holding up other calls.

    No thread can be stopped: when a call ends at its deadline, its thread reads on. Until then, further reads
    of the same source are refused, so retries take no more threads.
    """

    def __init__(self) -> None:
        """Starts without threads."""
        self._pool = ThreadPoolExecutor(_MOST_THREADS, thread_name_prefix="adapters")
        # Sources with reads that outlive their calls.
        self._abandoned: list[tuple[str, Future[Any]]] = []

    async def run(self, name: str, source: str, read: Callable[[], R]) -> R:
        """Runs `read` on a thread and returns its result. A cancelled call abandons its read.

        Raises:
            Unavailable: while an abandoned read of the source goes on.
            Exception: any error of `read`.
        """
        self._abandoned = [each for each in self._abandoned if not each[1].done()]
        if any(source == each for each, _ in self._abandoned):
            raise Unavailable(
                f"adapter {name}: an earlier read of {source} hangs; retry once its disk or hub answers",
                retry_after_ms=5000,
            )
        reading = self._pool.submit(read)
        try:
            return await asyncio.wrap_future(reading)
        except asyncio.CancelledError:
            if not reading.cancel():
                self._abandoned.append((source, reading))
            raise

    def close(self) -> None:
        """Lets the threads end, without waiting for them."""
        self._pool.shutdown(wait=False, cancel_futures=True)


class _FollowerThread:
    """Hands announced steps to the model thread as they arrive, on a rank other than 0."""

    def __init__(self, follower: Follower, thread: ModelThread, step_limit_s: float) -> None:
        """Starts waiting for announcements. Requires a running event loop."""
        self._follower = follower
        self._thread = thread
        self._loop = asyncio.get_running_loop()
        self._begun = asyncio.Event()
        self.step_limit_s = step_limit_s
        """Seconds until a step counts as hung; 0 for any time."""
        threading.Thread(target=self._run, name="rank-plans", daemon=True).start()

    async def may_begin(self) -> None:
        """Waits until rank 0 is a configuration ahead of this rank."""
        while True:
            self._begun.clear()
            if self._follower.may_begin:
                return
            await self._begun.wait()

    def _run(self) -> None:
        while True:
            try:
                announcement = self._follower.wait()
            except RuntimeError:
                return  # the follower has reported it
            self._thread.post(partial(self._launch, announcement), what=STEP, limit_s=self.step_limit_s)

    def _launch(self, announcement: bytes) -> None:
        try:
            rest = self._follower.run(announcement)
        except Exception:  # noqa: BLE001 - the follower has reported it, and the process ends
            get_logger().exception("step_failed")
            return
        if rest is not None:
            self._thread.defer(rest)
        if self._follower.may_begin:
            self._loop.call_soon_threadsafe(self._may_begin)

    def _may_begin(self) -> None:
        self._begun.set()
        self._loop.call_later(_ASKED_WITHIN_S, self._follower.end_if_unasked, self._follower.num_begun)


class _NotBegunError(Exception):
    """Rank 0 must begin the configuration first."""


class WorkerServicer(worker_pb2_grpc.WorkerServicer):
    """Serves a worker to a scheduler. A failed step ends neither the stream nor the process."""

    refusal: ConfigurationRefused | None
    """The worker's refusal of the last configuration. The scheduler may get a shorter text."""

    def __init__(
        self,
        worker: Worker,
        thread: ModelThread,
        *,
        prepared: asyncio.Future[None],
        worker_id: str,
        model: str,
        on_configured: Callable[[bool], Coroutine[Any, Any, None]],
        failed_steps: FailedSteps,
        step_limit_s: Callable[[float], float] = lambda _: 0.0,
        configure_limit_s: float = 0.0,
        first_step_timeout_s: float = 0.0,
        tracer: Tracer | None = None,
    ) -> None:
        """Serves `worker`.

        Args:
            worker: used on `thread` only, except for the attributes set by `Worker.prepare`.
            thread: the model thread.
            prepared: done once the worker is prepared.
            worker_id: identifies this process to the scheduler.
            model: the `--model` setting.
            on_configured: awaited with whether the worker is configured, at each change.
            failed_steps: counts the steps' results.
            step_limit_s: from the scheduler's step timeout, seconds until a step counts as hung; 0 for any
                time.
            configure_limit_s: seconds without progress until a configuration counts as hung.
            first_step_timeout_s: seconds for a step that first makes its graph; 0 if none does.
            tracer: writes the spans of sampled requests; `None` for no spans.
        """
        self._tracer = tracer
        self._worker = worker
        self._thread = thread
        self._prepared = prepared
        self._worker_id = worker_id
        self._model = model
        self._on_configured = on_configured
        self._failed_steps = failed_steps
        self._limit_steps = step_limit_s
        self._step_limit_s = step_limit_s(0.0)
        self._first_step_timeout_s = first_step_timeout_s
        self._configure_limit_s = configure_limit_s
        self.refusal = None
        self._ready: Ready | None = None
        self._executing = False
        self._follower_thread: _FollowerThread | None = None
        self._adapter_threads = AdapterThreads()
        # Sources of adapters whose configuration names another base model.
        self._warned_of: set[str] = set()
        self._log = get_logger()

    def close(self) -> None:
        """Exports the last spans, and lets running reads of adapters end without waiting for them."""
        self._adapter_threads.close()
        if self._tracer is not None:
            self._tracer.close()

    async def Describe(
        self, request: worker_pb2.DescribeRequest, context: Context
    ) -> worker_pb2.DescribeResponse:
        """Describes the worker, once the model's configuration is known."""
        if request.schema_revision != SCHEMA_REVISION:
            await abort(
                context,
                SchemaMismatch(
                    f"the scheduler has schema revision {request.schema_revision},"
                    f" this worker {SCHEMA_REVISION}; run the same release on both"
                ),
            )
        await asyncio.shield(self._prepared)
        return convert.description_to_proto(self._worker, worker_id=self._worker_id, model=self._model)

    async def Configure(
        self, request: worker_pb2.ConfigureRequest, context: Context
    ) -> AsyncIterator[worker_pb2.ConfigureEvent]:
        """Streams progress, then the resulting configuration."""
        self.refusal = None
        shapes = convert.shapes_from_proto(request)
        await asyncio.shield(self._prepared)
        events: asyncio.Queue[worker_pb2.ConfigureEvent | None] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def progress(phase: Phase, done: int, total: int, message: str) -> None:
            event = convert.progress_to_proto(phase, done, total, message)
            self._thread.progressed()
            loop.call_soon_threadsafe(events.put_nowait, event)

        ready = None
        while ready is None:
            configuring = self._thread.submit(
                lambda: self._configure(shapes, request.group_epoch, progress, loop),
                what="configuration (--configure-hang-timeout-s)",
                limit_s=self._configure_limit_s,
            )
            configuring.add_done_callback(lambda _: events.put_nowait(None))
            while (event := await events.get()) is not None:
                yield event
            follower_thread = self._follow()
            try:
                ready = configuring.result()
            except _NotBegunError:
                assert follower_thread is not None
                await follower_thread.may_begin()
            except Exception as error:  # noqa: BLE001 - the scheduler gets any error and may try again
                await self._refuse_configuration(error, context)
        self._step_limit_s = self._limit_steps(request.step_timeout_s)
        self._follow()
        await self._set_ready(ready)
        yield convert.ready_to_proto(ready, self._first_step_timeout_s)

    def _configure(
        self, shapes: Shapes, epoch: str, progress: PhaseProgress, loop: asyncio.AbstractEventLoop
    ) -> Ready:
        """Configures the worker. Runs on the model thread, after the steps of earlier streams.

        Raises:
            _NotBegunError: if rank 0 must begin first. Nothing has changed.
        """
        if not self._worker.is_configured_as(shapes):
            if self._executing:
                raise Unavailable(
                    "the worker executes another configuration; end its Execute stream first",
                    retry_after_ms=500,
                )
            self._worker.join(epoch)
            follower = self._worker.follower
            # Decided on the thread of announcements, so that none comes in between.
            if follower is not None and not follower.may_begin:
                raise _NotBegunError
            # Before the end of the call: a scheduler may hang up sooner.
            asyncio.run_coroutine_threadsafe(self._set_ready(None), loop)
        return self._worker.configure(shapes, progress, epoch=epoch)

    def _follow(self) -> _FollowerThread | None:
        """Starts to run announcements of rank 0, on another rank with a group."""
        if (follower := self._worker.follower) is None:
            return None
        if self._follower_thread is None:
            self._follower_thread = _FollowerThread(follower, self._thread, self._step_limit_s)
        self._follower_thread.step_limit_s = self._step_limit_s
        return self._follower_thread

    async def _set_ready(self, ready: Ready | None) -> None:
        """Notes whether the worker can execute; `None` if it cannot."""
        self._ready = ready
        await self._on_configured(ready is not None)

    async def _refuse_configuration(self, error: Exception, context: Context) -> NoReturn:
        if isinstance(error, Unavailable):
            await abort(context, error)  # the running configuration stays
        await self._set_ready(None)
        if isinstance(error, ConfigurationRefused):
            self.refusal = error
        if isinstance(error, TriptychError):
            self._log.error("configuration_refused", reason=error.message)
        else:
            self._log.error("configuration_failed", exc_info=error)
        await abort(context, as_triptych_error(error, "the worker failed to start"), to_service=True)

    async def GetModelFiles(
        self, request: worker_pb2.GetModelFilesRequest, context: Context
    ) -> AsyncIterator[common_pb2.FileChunk]:
        """Streams the tokenizer's files in chunks."""
        del request, context
        await asyncio.shield(self._prepared)
        for path in loader.tokenizer_files(self._worker.folder):
            for chunk in file_chunks(path.name, await asyncio.to_thread(path.read_bytes)):
                yield chunk

    async def CompileGrammar(
        self, request: worker_pb2.CompileGrammarRequest, context: Context
    ) -> worker_pb2.CompileGrammarResponse:
        """Compiles a grammar on its own threads and processes, while steps run."""
        await asyncio.shield(self._prepared)
        started = time.perf_counter()
        try:
            grammars = self._worker.grammars
            if grammars is None:
                raise Unsupported(
                    "structured_output is not supported for this model", param="structured_output"
                )
            memory = await grammars.prepare(spec_of(request.structured_output))
        except Exception as error:  # noqa: BLE001 - any error fails this grammar only
            if not isinstance(error, TriptychError):
                self._log.exception("grammar_failed")
            await abort(context, as_triptych_error(error, "compiling the grammar failed"))
        return worker_pb2.CompileGrammarResponse(memory_bytes=memory, compile_us=elapsed_us(started))

    async def LoadAdapter(
        self, request: worker_pb2.LoadAdapterRequest, context: Context
    ) -> worker_pb2.LoadAdapterResponse:
        """Reads an adapter on a thread of its own, while steps run."""
        await asyncio.shield(self._prepared)
        adapter_id = request.adapter_id
        try:
            # Between steps, because all ranks forget an adapter at the same place among their plans.
            displaced = await self._thread.submit(
                lambda: self._worker.reserve_adapter(adapter_id, request.needed_ids),
                what="making room for an adapter", limit_s=self._step_limit_s,
            )  # fmt: skip
            assert self._worker.adapters is not None
            load = partial(
                self._worker.adapters.load, adapter_id, request.name, request.source, request.revision
            )
            loaded = await self._adapter_threads.run(request.name, request.source, load)
        except Exception as error:  # noqa: BLE001 - any error fails this adapter only
            if not isinstance(error, TriptychError):
                self._log.exception("adapter_failed", adapter=request.name)
            await abort(
                context, as_triptych_error(error, f"loading adapter {request.name} failed"), to_service=True
            )
        self._log.info(
            "adapter_loaded", adapter=request.name, adapter_id=adapter_id, rank=loaded.rank,
            bytes=loaded.num_bytes, revision=loaded.revision,
        )  # fmt: skip
        if self._worker.layout.leads:
            self._warn_of_base(loaded)
        return worker_pb2.LoadAdapterResponse(
            rank=loaded.rank,
            digest=loaded.digest,
            memory_bytes=loaded.num_bytes,
            revision=loaded.revision,
            displaced_ids=displaced,
        )

    def _warn_of_base(self, adapter: HostAdapter) -> None:
        """Warns once of an adapter whose base model has another name than the served model."""
        served = (self._model, loader.display_name(self._model))
        if is_named_like(adapter.base_model, served) or adapter.source in self._warned_of:
            return
        self._warned_of.add(adapter.source)
        self._log.warning(
            "adapter_of_another_base", adapter=adapter.name, source=adapter.source,
            base_model=adapter.base_model, model=self._model,
            advice="the names differ; check that the adapter was trained on the weights that are served",
        )  # fmt: skip

    async def UnloadAdapter(
        self, request: worker_pb2.UnloadAdapterRequest, context: Context
    ) -> worker_pb2.UnloadAdapterResponse:
        """Frees an adapter's memory on the host; on several ranks, after the plans before on each."""
        await asyncio.shield(self._prepared)
        if not self._worker.layout.leads:
            await abort(context, Unsupported(f"this is {self._worker.layout}; rank 0 unloads adapters"))
        await self._thread.submit(
            lambda: self._worker.unload_adapter(request.adapter_id),
            what="unloading an adapter", limit_s=self._step_limit_s,
        )  # fmt: skip
        return worker_pb2.UnloadAdapterResponse()

    async def Execute(
        self, request_iterator: AsyncIterator[worker_pb2.StepPlan], context: Context
    ) -> AsyncIterator[worker_pb2.StepResult]:
        """Runs plans in order until either side ends the stream, then frees every slot."""
        if not self._worker.layout.leads:
            await abort(context, Unsupported(f"this is {self._worker.layout}; rank 0 executes plans"))
        if self._ready is None or self._executing:
            # Both states are temporary: keepalive ends the stream of a lost scheduler.
            why = "another Execute stream is open" if self._ready else "the worker is not configured yet"
            await abort(context, Unavailable(why, retry_after_ms=1000))
        self._executing = True
        plans = PlanStream(
            request_iterator,
            self._worker,
            self._thread,
            failed_steps=self._failed_steps,
            step_limit_s=self._step_limit_s,
            tracer=self._tracer,
        )
        try:
            async for result in plans.results():
                yield result
        except Exception as error:  # noqa: BLE001 - its text may be too long for a status
            await abort(context, as_triptych_error(error, "the stream failed"))
        finally:
            self._executing = False
            plans.close()
            # Queued after a step that may still run, and before the plans of a new stream.
            self._thread.submit(self._worker.reset, what="reset", limit_s=self._step_limit_s)
