"""The driver of one worker: dials back, configures it, and runs its step loop until it is lost or leaves."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, replace

import grpc.aio

from protos.errors import Internal, SchemaMismatch, TriptychError, Unavailable, from_rpc_error
from protos.logs import get_logger
from protos.triptych.v1 import worker_pb2, worker_pb2_grpc
from protos.wire import SCHEMA_REVISION, open_channel
from scheduler_svc.convert.model import (
    WorkerDescription,
    copies_blocks_from_proto,
    description_from_proto,
)
from scheduler_svc.replica.suspects import Loss
from scheduler_svc.workers.deployment import Deployment
from scheduler_svc.workers.engine_protocol import ReplicaSetup, StepScheduler, WorkerLink
from scheduler_svc.workers.failed_steps import FailedSteps, FailedTooOften
from scheduler_svc.workers.grammar_compiler import GrammarCompiler
from scheduler_svc.workers.model_files import FileReceiver
from scheduler_svc.workers.step_loop import Hung, Left, StepLoop, StreamLost

# Describe needs the worker's process and the configuration of its model, but no weights.
DESCRIBE_TIMEOUT_S = 60.0

MODEL_FILES_TIMEOUT_S = 120.0

# How long a worker whose stream broke may take to show that its process still runs. A dead process refuses
# the connection at once.
PROBE_TIMEOUT_S = 1.0


# What the end of a step loop says about the worker.
_LOSSES: Mapping[type[Exception], Loss] = {
    Hung: Loss.HUNG,
    FailedTooOften: Loss.FAILED_STEPS,
    Left: Loss.LEFT,
}


@dataclass(frozen=True, slots=True)
class WorkerAddress:
    """A registered worker and where it listens."""

    replica_id: str
    worker_id: str
    target: str
    """Host and port to dial."""


@dataclass(frozen=True, slots=True)
class _Configured:
    """A worker that is configured."""

    description: WorkerDescription
    setup: ReplicaSetup
    ready: worker_pb2.ConfigureReady
    files: Mapping[str, bytes]


class WorkerDriver:
    """Drives one worker from its registration to its end."""

    def __init__(
        self,
        address: WorkerAddress,
        deployment: Deployment,
        *,
        step_timeout_s: float,
        failed_steps: FailedSteps,
    ) -> None:
        """Prepares to dial `address`.

        Args:
            address: the worker.
            deployment: the deployment that the worker joins.
            step_timeout_s: a worker that takes longer for one step counts as lost.
            failed_steps: counts the worker's failed steps.
        """
        self.address = address
        self._deployment = deployment
        self._step_timeout_s = step_timeout_s
        self._failed_steps = failed_steps
        self._log = get_logger(replica=address.replica_id, worker=address.worker_id, target=address.target)
        self.ready = asyncio.Event()
        """Set once the worker receives steps."""
        self._leaving = False
        self._returned = False
        self._loop: StepLoop | None = None
        self._task: asyncio.Task[None] | None = None
        self._ended = asyncio.Event()

    async def leave(self) -> None:
        """Lets the worker go: its running plan ends, and its requests wait for another worker."""
        self._leaving = True
        if self.ready.is_set() and self._loop is not None:
            self._loop.leave()
            await self._ended.wait()

    async def make_way(self) -> None:
        """Ends at once: the worker has registered again, so its old connection is dead."""
        self._returned = True
        if self._task is not None:
            self._task.cancel()
            await self._ended.wait()

    async def run(self) -> None:
        """Runs until the worker is lost.

        Raises:
            TriptychError: always, at the end: why it ended.
        """
        self._task = asyncio.current_task()
        async with open_channel(self.address.target) as channel:
            stub = worker_pb2_grpc.WorkerStub(channel)
            self._deployment.starting[self.address.replica_id] = "dialling"
            compiler = GrammarCompiler(stub, self._log)
            loop = self._loop = StepLoop(
                stub,
                self._deployment.dispatch,
                step_timeout_s=self._step_timeout_s,
                failed_steps=self._failed_steps,
                log=self._log,
            )
            link = WorkerLink(
                loop.wake, compiler.compile, compiler.withdraw, lambda: self._failed_steps.failing
            )
            loss = Loss.FAULT
            try:
                configured = await self._start(stub)
                async with loop.stream() as call:
                    scheduler = self._attach(configured, link)
                    self.ready.set()
                    first_s = configured.ready.first_step_timeout_s
                    await loop.run(call, scheduler, first_step_timeout_s=first_s)
            except (StreamLost, grpc.aio.AioRpcError, asyncio.CancelledError) as error:
                loss = await self._why_lost(stub, error)
                if isinstance(error, grpc.aio.AioRpcError):
                    raise from_rpc_error(error) from error
                if self._returned:
                    raise Unavailable("the worker has registered again") from None
                raise
            except tuple(_LOSSES) as error:
                loss = _LOSSES[type(error)]
                raise
            except TriptychError:
                raise
            except Exception as error:
                # A worker may send anything. A bad message costs its registration, never the scheduler.
                self._log.exception("replica_failed")
                raise Internal(f"driving the worker failed: {type(error).__name__}: {error}") from error
            finally:
                compiler.close()
                self._deployment.detach(self.address.replica_id, loss)
                self._ended.set()

    async def _why_lost(self, stub: "worker_pb2_grpc.WorkerAsyncStub", error: BaseException) -> Loss:
        """Finds out why a stream ended. If the connection broke, a worker that still answers has not died."""
        if self._leaving:
            return Loss.LEFT
        if self._returned or not self.ready.is_set():  # if not ready, it ran no request
            return Loss.CUT_OFF
        if isinstance(error, StreamLost) and not error.by_transport:
            return Loss.DIED
        try:
            answer = await stub.Describe(
                worker_pb2.DescribeRequest(schema_revision=SCHEMA_REVISION), timeout=PROBE_TIMEOUT_S
            )
        except grpc.aio.AioRpcError:
            return Loss.DIED
        return Loss.CUT_OFF if answer.worker_id == self.address.worker_id else Loss.DIED

    async def _start(self, stub: "worker_pb2_grpc.WorkerAsyncStub") -> _Configured:
        """Configures the worker."""
        description = await self._describe(stub)
        setup = self._deployment.set_up(self.address.replica_id, description)
        self._log.info(
            "configuring", device=description.device, model=description.model.source, **setup.facts
        )
        setup.request.step_timeout_s = self._step_timeout_s
        ready = await self._configure(stub, setup.request)
        files = FileReceiver()
        async for chunk in stub.GetModelFiles(
            worker_pb2.GetModelFilesRequest(), timeout=MODEL_FILES_TIMEOUT_S
        ):
            files.add(chunk.name, chunk.data, last=chunk.last)
        model = replace(description.model, weights_digest=ready.weights_digest)
        copies_blocks = copies_blocks_from_proto(ready.block_copies)
        configured = replace(description, model=model, copies_blocks=copies_blocks)
        return _Configured(configured, setup, ready, files.files())

    def _attach(self, worker: _Configured, link: WorkerLink) -> StepScheduler:
        """Attaches the worker to the deployment."""
        num_blocks = tuple(worker.ready.num_blocks)
        scheduler = self._deployment.attach(
            self.address.replica_id, worker.description, worker.setup, num_blocks, worker.files, link
        )
        self._log.info(
            "ready",
            num_blocks=list(num_blocks),
            graphs=len(worker.ready.graphs),
            phase_seconds=dict(worker.ready.phase_seconds),
        )
        return scheduler

    async def _describe(self, stub: "worker_pb2_grpc.WorkerAsyncStub") -> WorkerDescription:
        message = await stub.Describe(
            worker_pb2.DescribeRequest(schema_revision=SCHEMA_REVISION),
            timeout=DESCRIBE_TIMEOUT_S,
            wait_for_ready=True,
        )
        if message.schema_revision != SCHEMA_REVISION:
            raise SchemaMismatch(
                f"the worker speaks schema revision {message.schema_revision}, this scheduler {SCHEMA_REVISION}; "
                "run the same release on both"
            )
        return description_from_proto(message)

    async def _configure(
        self, stub: "worker_pb2_grpc.WorkerAsyncStub", request: worker_pb2.ConfigureRequest
    ) -> worker_pb2.ConfigureReady:
        # No limit here: only the worker knows how long its model and its compiler may be silent, and it ends
        # itself beyond that (--configure-hang-timeout-s).
        async for event in stub.Configure(request):
            if event.HasField("ready"):
                return event.ready
            self._note_progress(event.progress)
        raise Internal("the worker ended Configure before it was ready")

    def _note_progress(self, progress: worker_pb2.ConfigureProgress) -> None:
        phase = worker_pb2.ConfigureProgress.Phase.Name(progress.phase).removeprefix("PHASE_").lower()
        count = f" {progress.done}/{progress.total}" if progress.total else ""
        self._deployment.starting[self.address.replica_id] = f"{phase}{count} {progress.message}".strip()
        self._log.info(
            "progress", phase=phase, done=progress.done, total=progress.total, message=progress.message
        )
