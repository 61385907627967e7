"""``WorkerRegistry``: workers announce themselves here and are driven from then on."""

import asyncio
import re
from collections.abc import AsyncIterator
from urllib.parse import unquote

from protos.errors import InvalidArgument, SchemaMismatch, TriptychError, Unavailable, Unsupported, abort
from protos.logs import get_logger
from protos.triptych.v1 import registry_pb2, registry_pb2_grpc
from protos.wire import SCHEMA_REVISION, Context
from scheduler_svc.workers.deployment import Deployment
from scheduler_svc.workers.driver import Replica, WorkerAddress

_PEER = re.compile(r"(?:ipv4:(?P<v4>[^:]+)|ipv6:(?P<v6>\[[^\]]+\])):\d+")


def address_of(request: registry_pb2.RegisterRequest, peer: str) -> WorkerAddress:
    """Where to dial back.

    Args:
        request: the announcement.
        peer: gRPC's name of the caller, for example ``ipv4:10.0.0.7:41234``.

    Raises:
        SchemaMismatch, Unsupported, InvalidArgument: if the worker cannot be used, with the reason.
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
        raise InvalidArgument("a worker must announce its id and its port")
    host = request.host
    if not host:
        match = _PEER.fullmatch(unquote(peer))
        if match is None:
            raise InvalidArgument(f"cannot dial back to {peer}; start the worker with --advertise-host")
        host = match["v4"] or match["v6"]
    if ":" in host and not host.startswith("["):
        host = f"[{host}]"
    return WorkerAddress(request.replica_id or request.worker_id, request.worker_id, f"{host}:{request.port}")


class RegistryServicer(registry_pb2_grpc.WorkerRegistryServicer):
    """One open Register stream per worker; its end is the worker's end."""

    def __init__(self, deployment: Deployment, *, step_timeout_s: float) -> None:
        """Serves ``deployment``."""
        self._deployment = deployment
        self._step_timeout_s = step_timeout_s
        self._active: set[str] = set()
        self._log = get_logger()

    async def Register(
        self, request: registry_pb2.RegisterRequest, context: Context
    ) -> AsyncIterator[registry_pb2.RegisterEvent]:
        """Drives the worker until either side is gone; the stream ends with the reason."""
        try:
            address = address_of(request, context.peer())
            if address.replica_id in self._active:
                raise Unavailable(f"replica {address.replica_id} is still registered; retry")
        except TriptychError as error:
            self._log.warning("worker_refused", peer=context.peer(), reason=error.message)
            await abort(context, error)
        self._active.add(address.replica_id)
        replica = Replica(address, self._deployment, step_timeout_s=self._step_timeout_s)
        driver = asyncio.create_task(replica.run(), name=f"replica {address.replica_id}")
        ready = asyncio.create_task(replica.ready.wait())
        try:
            yield _event(registry_pb2.RegisterEvent.STATE_ACCEPTED, f"dialling {address.target}")
            await asyncio.wait({driver, ready}, return_when=asyncio.FIRST_COMPLETED)
            if replica.ready.is_set():
                yield _event(registry_pb2.RegisterEvent.STATE_SERVING, "serving")
            await driver
        except TriptychError as error:
            self._log.error(
                "worker_lost", worker=address.worker_id, target=address.target, reason=error.message
            )
            await abort(context, error)
        finally:
            if not driver.done():
                self._log.warning("worker_left", worker=address.worker_id, target=address.target)
            for task in (driver, ready):
                task.cancel()
            await asyncio.gather(driver, ready, return_exceptions=True)
            self._active.discard(address.replica_id)


def _event(state: registry_pb2.RegisterEvent.State.ValueType, message: str) -> registry_pb2.RegisterEvent:
    return registry_pb2.RegisterEvent(state=state, message=message)
