"""The `WorkerRegistry` service: workers register here, and a driver serves each of them."""

import asyncio
import re
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import unquote

from protos.errors import InvalidArgument, SchemaMismatch, TriptychError, Unavailable, Unsupported, abort
from protos.logs import get_logger
from protos.triptych.v1 import registry_pb2, registry_pb2_grpc
from protos.wire import SCHEMA_REVISION, Context, unix_address
from scheduler_svc.workers.deployment import Deployment
from scheduler_svc.workers.driver import WorkerAddress, WorkerDriver
from scheduler_svc.workers.failed_steps import FailedSteps
from scheduler_svc.workers.step_loop import Hung, Left

# Workers with failed steps that are remembered; a restarted process is another worker.
_REMEMBERED = 256

_PEER = re.compile(r"(?:ipv4:(?P<v4>[^:]+)|ipv6:(?P<v6>\[[^\]]+\])):\d+")


def address_of(request: registry_pb2.RegisterRequest, peer: str) -> WorkerAddress:
    """Returns the address to dial back to.

    Args:
        request: the worker's registration.
        peer: gRPC's name of the caller, for example `ipv4:10.0.0.7:41234`.

    Raises:
        SchemaMismatch: the worker runs another release.
        Unsupported: the worker has several ranks.
        InvalidArgument: the registration is incomplete.
    """
    if request.schema_revision != SCHEMA_REVISION:
        raise SchemaMismatch(
            f"the worker speaks schema revision {request.schema_revision}, this scheduler {SCHEMA_REVISION}; run the same release on both"
        )
    if request.world_size > 1:
        raise Unsupported(
            "replicas of several ranks are not served by this release; start the worker with one rank"
        )
    if not request.worker_id or not 1 <= request.port <= 65535:
        raise InvalidArgument("a worker must send its id and its port")
    replica_id = request.replica_id or request.worker_id
    if request.socket:
        return WorkerAddress(replica_id, request.worker_id, unix_address(Path(request.socket)))
    host = request.host
    if not host:
        match = _PEER.fullmatch(unquote(peer))
        if match is None:
            raise InvalidArgument(
                f"cannot dial back to {peer}; start the worker with --socket or --advertise-host"
            )
        host = match["v4"] or match["v6"]
    if ":" in host and not host.startswith("["):
        host = f"[{host}]"
    return WorkerAddress(replica_id, request.worker_id, f"{host}:{request.port}")


class RegistryServicer(registry_pb2_grpc.WorkerRegistryServicer):
    """Keeps one Register stream open per worker.

    A stream ends with its worker, and the end of a stream means that the worker is lost.
    """

    def __init__(
        self, deployment: Deployment, *, step_timeout_s: float, detach_after_failed_steps: int
    ) -> None:
        """Adds workers to `deployment`.

        Args:
            deployment: the deployment.
            step_timeout_s: a worker that takes longer for a step counts as lost.
            detach_after_failed_steps: a worker that fails that many steps in a row loses its registration.
        """
        self._deployment = deployment
        self._step_timeout_s = step_timeout_s
        self._detach_after_failed_steps = detach_after_failed_steps
        # Workers whose last step failed.
        self._failed_steps: dict[str, FailedSteps] = {}
        # The drivers of registered workers, by replica.
        self._drivers: dict[str, WorkerDriver] = {}
        self._log = get_logger()

    async def Register(
        self, request: registry_pb2.RegisterRequest, context: Context
    ) -> AsyncIterator[registry_pb2.RegisterEvent]:
        """Drives the worker until either side ends; the stream ends with the reason."""
        try:
            address = address_of(request, context.peer())
            await self._end_earlier(address)
            failed_steps = self._failed_steps.get(address.worker_id)
            failed_steps = failed_steps or FailedSteps(self._detach_after_failed_steps)
            failed_steps.check()
        except TriptychError as error:
            self._log.warning("worker_refused", peer=context.peer(), reason=error.message)
            await abort(context, error)
        driver = self._drivers[address.replica_id] = WorkerDriver(
            address, self._deployment, step_timeout_s=self._step_timeout_s, failed_steps=failed_steps
        )
        running = asyncio.create_task(driver.run(), name=f"replica {address.replica_id}")
        ready = asyncio.create_task(driver.ready.wait())
        try:
            yield _event(registry_pb2.RegisterEvent.STATE_ACCEPTED, f"dialling {address.target}")
            await asyncio.wait({running, ready}, return_when=asyncio.FIRST_COMPLETED)
            if driver.ready.is_set():
                yield _event(registry_pb2.RegisterEvent.STATE_SERVING, "serving")
            await running
        except Hung as error:
            self._log.error(
                "worker_hung", worker=address.worker_id, target=address.target, reason=error.message
            )
            yield _event(registry_pb2.RegisterEvent.STATE_HUNG, error.message)
            await abort(context, error)
        except Left:
            self._log.info("worker_left", worker=address.worker_id, target=address.target)
        except TriptychError as error:
            self._log.error(
                "worker_lost", worker=address.worker_id, target=address.target, reason=error.message
            )
            await abort(context, error)
        finally:
            if not running.done():
                self._log.warning("worker_hung_up", worker=address.worker_id, target=address.target)
            for task in (running, ready):
                task.cancel()
            await asyncio.gather(running, ready, return_exceptions=True)
            self._remember(address.worker_id, failed_steps)
            del self._drivers[address.replica_id]

    async def _end_earlier(self, address: WorkerAddress) -> None:
        """Ends the earlier registration of a worker that registers again.

        Raises:
            Unavailable: another worker has this replica, or the earlier registration has not ended yet.
        """
        earlier = self._drivers.get(address.replica_id)
        if earlier is None:
            return
        if earlier.address.worker_id == address.worker_id:
            await earlier.make_way()
        raise Unavailable(f"replica {address.replica_id} is still registered; retry", retry_after_ms=200)

    async def Leave(self, request: registry_pb2.LeaveRequest, context: Context) -> registry_pb2.LeaveResponse:
        """Takes the requests off a worker that shuts down."""
        for driver in list(self._drivers.values()):
            if driver.address.worker_id == request.worker_id:
                await driver.leave()
        return registry_pb2.LeaveResponse()

    def _remember(self, worker_id: str, failed_steps: FailedSteps) -> None:
        """Keeps the count of a worker that failed its last step, for its next registration."""
        self._failed_steps.pop(worker_id, None)
        if failed_steps.in_a_row:
            self._failed_steps[worker_id] = failed_steps
        if len(self._failed_steps) > _REMEMBERED:
            del self._failed_steps[next(iter(self._failed_steps))]


def _event(state: registry_pb2.RegisterEvent.State.ValueType, message: str) -> registry_pb2.RegisterEvent:
    return registry_pb2.RegisterEvent(state=state, message=message)
