"""One worker, driven: dial back, describe, configure, then one step after the other until it is lost or leaves."""

import asyncio
import contextlib
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import grpc.aio

from protos.errors import Internal, Overloaded, SchemaMismatch, TriptychError, Unavailable, from_rpc_error
from protos.logs import get_logger
from protos.triptych.v1 import worker_pb2, worker_pb2_grpc
from protos.wire import SCHEMA_REVISION, open_channel
from scheduler_svc.convert.plans import (
    configure_pool_to_proto,
    configure_to_proto,
    groups_from_proto,
    limits_from_proto,
    plan_to_proto,
    result_from_proto,
)
from scheduler_svc.convert.sampling import grammar_to_proto
from scheduler_svc.dispatch.placement import AttachedReplica
from scheduler_svc.pooling.engine import PoolReplica
from scheduler_svc.pooling.scheduler import PoolScheduler
from scheduler_svc.replica.scheduler import ReplicaScheduler
from scheduler_svc.replica.step_plan import StepPlan, StepResult
from scheduler_svc.requests.sampling import Grammar
from scheduler_svc.workers.deployment import Deployment
from scheduler_svc.workers.model_files import receive_files

# Makes a configured worker's scheduler, of its blocks per group and its tokenizer files.
_Add = Callable[[tuple[int, ...], dict[str, bytes]], ReplicaScheduler | PoolScheduler]

_Call = grpc.aio.StreamStreamCall[worker_pb2.StepPlan, worker_pb2.StepResult]

# Describe needs the worker's process up and its model's configuration read; weights come later.
DESCRIBE_TIMEOUT_S = 60.0

# Configure tells its progress; one phase (loading a large model from a slow disk) may be silent for long, but not for ever.
CONFIGURE_SILENCE_S = 1800.0
MODEL_FILES_TIMEOUT_S = 120.0

# Compiling takes seconds at most; the rest is waiting for others' grammars.
COMPILE_GRAMMAR_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class WorkerAddress:
    """Where a worker listens and who it is."""

    replica_id: str
    worker_id: str
    target: str


class Replica:
    """Drives one worker from its registration to its end.

    Attributes:
        ready: set once the worker receives steps.
    """

    def __init__(self, address: WorkerAddress, deployment: Deployment, *, step_timeout_s: float) -> None:
        """Prepares to dial ``address``.

        Args:
            address: the worker.
            deployment: what it will be part of.
            step_timeout_s: a step that takes longer means that the worker hangs and counts as lost.
        """
        self.address = address
        self._deployment = deployment
        self._step_timeout_s = step_timeout_s
        self._log = get_logger(replica=address.replica_id, worker=address.worker_id, target=address.target)
        self._work = asyncio.Event()
        self._compiling: dict[Grammar, asyncio.Future[None]] = {}
        # Interrupts a lease; set while one is under way that was not interrupted yet.
        self._interrupt: Callable[[], None] | None = None
        self._interrupting: asyncio.Future[None] | None = None
        self.ready = asyncio.Event()

    async def run(self) -> None:
        """Runs until the worker is lost.

        Raises:
            TriptychError: always, at the end: why it ended.
        """
        async with open_channel(self.address.target) as channel:
            stub = worker_pb2_grpc.WorkerStub(channel)
            self._deployment.starting[self.address.replica_id] = "dialling"
            try:
                await self._start(stub)
                await self._serve(stub)
            except grpc.aio.AioRpcError as error:
                raise from_rpc_error(error) from error
            except TriptychError:
                raise
            except Exception as error:
                # Whatever a worker sent: it costs this worker its registration, never the scheduler.
                self._log.exception("replica_failed")
                raise Internal(f"driving the worker failed: {type(error).__name__}: {error}") from error
            finally:
                requeued = self._deployment.detach(self.address.replica_id)
                if requeued:
                    self._log.warning("requests_requeued", count=requeued)

    async def _start(self, stub: "worker_pb2_grpc.WorkerAsyncStub") -> None:
        description = await stub.Describe(
            worker_pb2.DescribeRequest(schema_revision=SCHEMA_REVISION),
            timeout=DESCRIBE_TIMEOUT_S,
            wait_for_ready=True,
        )
        if description.schema_revision != SCHEMA_REVISION:
            raise SchemaMismatch(
                f"the worker speaks schema revision {description.schema_revision}, this scheduler {SCHEMA_REVISION}; "
                "run the same release on both"
            )
        request, add = self._pooling(description) if description.pool_tasks else self._generating(description)
        ready: worker_pb2.ConfigureReady | None = None
        events = aiter(stub.Configure(request))
        while ready is None:
            try:
                async with asyncio.timeout(CONFIGURE_SILENCE_S):
                    event = await anext(events, None)
            except TimeoutError:
                raise Unavailable(
                    f"the worker said nothing for {CONFIGURE_SILENCE_S:g} s while it was to be configured"
                ) from None
            if event is None:
                raise Internal("the worker ended Configure without saying that it is ready")
            if event.HasField("ready"):
                ready = event.ready
            else:
                self._note_progress(event.progress)
        files = await receive_files(
            stub.GetModelFiles(worker_pb2.GetModelFilesRequest(), timeout=MODEL_FILES_TIMEOUT_S)
        )
        self._scheduler = add(tuple(ready.num_blocks), files)
        self._log.info(
            "ready",
            num_blocks=list(ready.num_blocks),
            graphs=len(ready.graphs),
            phase_seconds=dict(ready.phase_seconds),
        )

    def _generating(
        self, description: worker_pb2.DescribeResponse
    ) -> tuple[worker_pb2.ConfigureRequest, _Add]:
        """What a worker of a generating model is to run with, and how it is added once it does."""
        deployment = self._deployment
        geometry = deployment.geometry_for(description)
        geometry.check(limits_from_proto(description), groups_from_proto(description))
        self._log.info("configuring", device=description.device, model=description.model.source, chunk=geometry.chunk,
                       block_size=geometry.block_size, buckets=geometry.buckets, max_model_len=geometry.max_model_len)  # fmt: skip

        def add(num_blocks: tuple[int, ...], files: dict[str, bytes]) -> ReplicaScheduler:
            return deployment.add(self.address.replica_id, geometry, description, num_blocks, files)

        return configure_to_proto(geometry, deployment.num_blocks, deployment.windows_kept_per_slot), add

    def _pooling(self, description: worker_pb2.DescribeResponse) -> tuple[worker_pb2.ConfigureRequest, _Add]:
        """The same for a pooling model."""
        deployment = self._deployment
        shapes = deployment.pool_shapes_for(description)
        self._log.info("configuring", device=description.device, model=description.model.source,
                       shapes=[str(shape) for shape in shapes])  # fmt: skip

        def add(_: tuple[int, ...], files: dict[str, bytes]) -> PoolScheduler:
            return deployment.add_pooling(self.address.replica_id, shapes, description, files)

        return configure_pool_to_proto(shapes), add

    def _note_progress(self, progress: worker_pb2.ConfigureProgress) -> None:
        phase = worker_pb2.ConfigureProgress.Phase.Name(progress.phase).removeprefix("PHASE_").lower()
        of = f" {progress.done}/{progress.total}" if progress.total else ""
        self._deployment.starting[self.address.replica_id] = f"{phase}{of} {progress.message}".strip()
        self._log.info(
            "progress", phase=phase, done=progress.done, total=progress.total, message=progress.message
        )

    async def _serve(self, stub: "worker_pb2_grpc.WorkerAsyncStub") -> None:
        call = stub.Execute()
        try:
            scheduler = self._scheduler
            attached = (
                PoolReplica(scheduler, self._wake)
                if isinstance(scheduler, PoolScheduler)
                else AttachedReplica(
                    scheduler, self._wake, functools.partial(self._ask, stub), self._withdraw
                )
            )
            self._deployment.attach(self.address.replica_id, attached)
            self.ready.set()
            while True:
                await self._one_step(call)
        finally:
            call.cancel()
            for task in self._compiling.values():
                task.cancel()
            if self._interrupting is not None:
                self._interrupting.cancel()
                await asyncio.gather(self._interrupting, return_exceptions=True)

    def _ask(self, stub: "worker_pb2_grpc.WorkerAsyncStub", grammar: Grammar) -> None:
        self._compiling[grammar] = asyncio.ensure_future(self._compile(stub, grammar))

    def _withdraw(self, grammar: Grammar) -> None:
        """Ends the call, and with it the worker's part, unless the answer is on its way."""
        task = self._compiling.pop(grammar, None)
        if task is not None:
            task.cancel()

    async def _compile(self, stub: "worker_pb2_grpc.WorkerAsyncStub", grammar: Grammar) -> None:
        """Has the worker compile a grammar and tells how it went; says nothing if the worker is lost meanwhile."""
        refusal: TriptychError | None = None
        try:
            request = worker_pb2.CompileGrammarRequest(structured_output=grammar_to_proto(grammar))
            await stub.CompileGrammar(request, timeout=COMPILE_GRAMMAR_TIMEOUT_S, wait_for_ready=True)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNAVAILABLE and not error.trailing_metadata():
                return  # the connection broke, and with it the stream of steps: this replica is about to be detached
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                refusal = Overloaded(
                    f"the grammar was not compiled within {COMPILE_GRAMMAR_TIMEOUT_S:g} s, as others are before it; retry later",
                    param="structured_output", retry_after_ms=5000,
                )  # fmt: skip
            else:
                refusal = from_rpc_error(error)
        except Exception as error:  # noqa: BLE001 - whatever it is, who waits for the grammar is told
            self._log.exception("grammar_failed")
            refusal = Internal(f"having the grammar compiled failed: {type(error).__name__}: {error}")
        del self._compiling[grammar]
        if refusal is None:
            self._deployment.grammar_compiled(self.address.replica_id, grammar)
        else:
            self._deployment.grammar_refused(self.address.replica_id, grammar, refusal)

    async def _one_step(self, call: "_Call") -> None:
        self._deployment.dispatch()
        plan = self._scheduler.step()
        if plan is None:
            self._work.clear()
            await self._idle(call)
            return
        scheduler = self._scheduler
        await self._write(call, plan)
        if isinstance(scheduler, ReplicaScheduler):
            # What comes in from now on may cut a lease short; so may what its results bring about.
            self._interrupt = lambda: self._cut_short(call, scheduler)
            self._interrupt()  # and so may what came while the plan was being written
        try:
            scheduler.update(await self._read(call, plan.step))
            while isinstance(scheduler, ReplicaScheduler) and scheduler.has_pending:
                self._deployment.dispatch()
                self._wake()
                scheduler.update(await self._read(call, plan.step))
        finally:
            self._interrupt = None
        if self._interrupting is not None:
            written, self._interrupting = self._interrupting, None
            await written

    def _wake(self) -> None:
        """There is work: a driver that waits for some goes on, one that waits for a lease's results ends the lease."""
        self._work.set()
        if self._interrupt is not None:
            self._interrupt()

    def _cut_short(self, call: "_Call", scheduler: ReplicaScheduler) -> None:
        plan = scheduler.interrupt()
        if plan is not None:
            self._interrupting = asyncio.ensure_future(self._write(call, plan))

    async def _write(self, call: "_Call", plan: StepPlan) -> None:
        try:
            async with asyncio.timeout(self._step_timeout_s):
                await call.write(plan_to_proto(plan))
        except TimeoutError:
            raise _hangs(plan.step, self._step_timeout_s) from None
        except (asyncio.InvalidStateError, grpc.aio.AioRpcError):
            pass  # the call has ended, and reading says why

    async def _read(self, call: "_Call", step: int) -> StepResult:
        """The next result. ``step`` is the plan that its reader began with."""
        try:
            async with asyncio.timeout(self._step_timeout_s):
                answer = await call.read()
        except TimeoutError:
            raise _hangs(step, self._step_timeout_s) from None
        if answer is grpc.aio.EOF:
            code, details = await call.code(), await call.details()
            raise Unavailable(f"the worker ended its stream: {details or code.name}")
        result = result_from_proto(cast("worker_pb2.StepResult", answer))
        if result.error is not None:
            self._log.error("step_failed", step=result.step, error=result.error.message)
        return result

    async def _idle(self, call: "_Call") -> None:
        """Waits for work, or for the worker to go."""
        work = asyncio.ensure_future(self._work.wait())
        ended = asyncio.ensure_future(call.code())
        try:
            await asyncio.wait({work, ended}, return_when=asyncio.FIRST_COMPLETED)
            if ended.done():
                raise Unavailable(
                    f"the worker ended its stream: {await call.details() or ended.result().name}"
                )
        finally:
            for task in (work, ended):
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task


def _hangs(step: int, timeout_s: float) -> Unavailable:
    return Unavailable(f"step {step} was not answered within {timeout_s:g} s; the worker hangs")
