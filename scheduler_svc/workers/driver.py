"""The driver of a replica: dials its ranks, configures them, and steps rank 0 until a rank is lost."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from functools import partial

import grpc.aio

from protos.errors import Internal, TriptychError, Unavailable, from_rpc_error
from protos.service.channels import LinkSecurity
from protos.service.grpc_options import SCHEMA_REVISION
from protos.service.logs import get_logger
from protos.triptych.v1 import worker_pb2, worker_pb2_grpc
from scheduler_svc.engine.placement import AttachedReplica
from scheduler_svc.replica.quarantine import Loss
from scheduler_svc.workers.adapter_loader import AdapterLoader
from scheduler_svc.workers.configure import Configurator
from scheduler_svc.workers.deployment import Deployment, make_memory
from scheduler_svc.workers.grammar_compiler import GrammarCompiler
from scheduler_svc.workers.losses import FailedTooOften
from scheduler_svc.workers.progress import ProgressWatch, Stalled
from scheduler_svc.workers.rank import Rank, ReplicaLost
from scheduler_svc.workers.replicas import Connect
from scheduler_svc.workers.step_loop import Hung, Left, StepLoop, StreamLost

# Time limit for a sign of life from a worker after its stream broke. A dead process refuses the connection at
# once.
PROBE_TIMEOUT_S = 1.0


# What the end of a step loop says about the replica.
_LOSSES: Mapping[type[Exception], Loss] = {
    Hung: Loss.HUNG,
    FailedTooOften: Loss.FAILED_STEPS,
    Stalled: Loss.STALLED,
}


class ReplicaDriver:
    """Drives the ranks of a replica from their registration to their end.

    All ranks are configured. Rank 0 alone receives plans and passes each step on to the others.
    """

    def __init__(
        self,
        ranks: Sequence[Rank],
        deployment: Deployment,
        on_ready: Callable[[], None],
        security: LinkSecurity,
    ) -> None:
        """Prepares to dial all ranks, in order; calls `on_ready` once the replica receives steps."""
        self._ranks = ranks
        first = ranks[0]
        self._replica_id = first.replica_id
        self._deployment = deployment
        self._failed_steps = deployment.losses.failed_steps_of(first.worker_id)
        self._on_ready = on_ready
        self._security = security
        self._log = get_logger(replica=first.replica_id, worker=first.worker_id, target=first.target)
        self._attached = False
        self._loop: StepLoop | None = None
        self._task: asyncio.Task[None] | None = None
        # The reason after the end of a registration, and whether its worker registered again.
        self._lost: ReplicaLost | None = None
        self._returned = False
        # The first rank to announce its departure.
        self._leaving: int | None = None
        self._ending = False

    def start(self) -> asyncio.Task[None]:
        """Starts driving; the task ends with the reason, a :class:`TriptychError`."""
        self._task = asyncio.create_task(self._run(), name=f"replica {self._replica_id}")
        return self._task

    def leave(self, rank: int) -> None:
        """Releases the replica: its running plan ends, and its requests wait for another."""
        if self._leaving is None:
            self._leaving = rank
        if self._attached and self._loop is not None:
            self._loop.leave()
        else:
            self.lose(self._left())

    def lose(self, error: ReplicaLost, *, returned: bool = False) -> None:
        """Ends at once, because the registration of ``error.rank`` ended.

        Args:
            error: the reason.
            returned: whether the rank registered again, so that only its old connection is dead.
        """
        if self._ending or self._lost is not None or self._task is None:
            return
        self._lost, self._returned = error, returned
        self._task.cancel()

    async def _run(self) -> None:
        async with AsyncExitStack() as stack:
            for rank in self._ranks:
                channel = await stack.enter_async_context(self._security.open_channel(rank.target))
                rank.stub = worker_pb2_grpc.WorkerStub(channel)
            answered = partial(self._deployment.grammar_answered, self._replica_id)
            grammar_rank = self._ranks[self._ranks[0].sizes.grammar_rank]
            compiler = GrammarCompiler(grammar_rank.stub, answered, self._log)
            loop = self._loop = StepLoop(
                self._ranks[0].stub,
                self._deployment.dispatch,
                step_timeout_s=self._deployment.settings.step_timeout_s,
                failed_steps=self._failed_steps,
                progress=ProgressWatch(partial(self._deployment.stalled, self._replica_id)),
                log=self._log,
            )
            loader = AdapterLoader([rank.stub for rank in self._ranks], self._log)
            connect = partial(
                AttachedReplica, wake=loop.wake, ask=compiler.compile, withdraw=compiler.withdraw,
                failing=lambda: self._failed_steps.failing, load_adapter=loader.load, unload_adapter=loader.unload,
            )  # fmt: skip
            loss = Loss.FAULT
            try:
                await self._serve(loop, connect)
            except (StreamLost, grpc.aio.AioRpcError, asyncio.CancelledError) as error:
                loss = await self._why_lost(error)
                raise self._end_of(error) from error
            except Left:
                loss = Loss.LEFT
                raise self._left() from None
            except tuple(_LOSSES) as error:
                loss = _LOSSES[type(error)]
                if loss is Loss.STALLED:
                    self._failed_steps.stalled()
                raise
            except TriptychError:
                raise
            except Exception as error:
                # A worker may send anything. A bad message costs its registration, never the scheduler.
                self._log.exception("replica_failed")
                raise Internal(f"driving the worker failed: {type(error).__name__}: {error}") from error
            finally:
                self._ending = True
                compiler.close()
                loader.close()
                self._deployment.detach(self._replica_id, loss)

    async def _serve(self, loop: StepLoop, connect: Connect) -> None:
        """Configures the ranks and runs steps. Ends only by raising."""
        replica = await Configurator(self._ranks, self._deployment).run()
        ready = replica.ready
        async with loop.stream() as call:
            memory = await asyncio.to_thread(make_memory, replica)
            scheduler = self._deployment.attach(self._replica_id, replica, memory, connect)
            self._attached = True
            self._log.info(
                "ready",
                num_blocks=list(ready.num_blocks),
                graphs=len(ready.graphs),
                phase_seconds=dict(ready.phase_seconds),
            )
            self._on_ready()
            await loop.run(call, scheduler, first_step_timeout_s=replica.first_step_timeout_s)

    async def _why_lost(self, error: BaseException) -> Loss:
        """Finds out why a stream ended: a worker that answers after a broken connection has not died."""
        self._ending = True
        if self._leaving is not None:
            return Loss.LEFT
        if self._returned or not self._attached:  # if not attached, it ran no request
            return Loss.CUT_OFF
        if isinstance(error, StreamLost) and not error.by_transport:
            return Loss.DIED
        rank = self._ranks[self._lost.rank or 0 if self._lost is not None else 0]
        try:
            answer = await rank.stub.Describe(
                worker_pb2.DescribeRequest(schema_revision=SCHEMA_REVISION), timeout=PROBE_TIMEOUT_S
            )
        except grpc.aio.AioRpcError:
            return Loss.DIED
        return Loss.CUT_OFF if answer.worker_id == rank.worker_id else Loss.DIED

    def _end_of(self, error: BaseException) -> TriptychError:
        """Returns the reason for the end, given the error of the calls."""
        if self._lost is not None:
            return self._lost
        if isinstance(error, StreamLost):
            return self._ranks[0].lost(error)
        if isinstance(error, grpc.aio.AioRpcError):
            return from_rpc_error(error)
        return Unavailable("the scheduler stops")

    def _left(self) -> ReplicaLost:
        rank = self._ranks[self._leaving or 0]
        return ReplicaLost(f"{rank.name} leaves", rank.number, Left("the worker leaves"))
