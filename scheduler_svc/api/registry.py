"""The `WorkerRegistry` service: the ranks of replicas register here, and a driver serves each replica."""

import re
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import unquote

from structlog.typing import FilteringBoundLogger

from protos.errors import (
    ConfigurationRefused,
    Context,
    InvalidArgument,
    SchemaMismatch,
    TriptychError,
    Unavailable,
    abort,
)
from protos.limits import MAX_RANKS
from protos.service.channels import PLAIN, LinkSecurity
from protos.service.grpc_options import SCHEMA_REVISION, unix_address
from protos.service.logs import get_logger
from protos.triptych.v1 import registry_pb2, registry_pb2_grpc
from scheduler_svc.workers.deployment import Deployment
from scheduler_svc.workers.group import RankGroup
from scheduler_svc.workers.rank import ParallelSizes, Rank, ReplicaLost
from scheduler_svc.workers.step_loop import Hung, Left

_PEER = re.compile(r"(?:ipv4:(?P<v4>[^:]+)|ipv6:(?P<v6>\[[^\]]+\])):\d+")


def _rank_of(request: registry_pb2.RegisterRequest, peer: str) -> Rank:
    """Returns the rank of a registration; `peer` is gRPC's name, for example `ipv4:10.0.0.7:41234`.

    Raises:
        SchemaMismatch: the worker runs another release.
        InvalidArgument: the registration is incomplete.
        ConfigurationRefused: the worker's sizes and its rank contradict each other.
    """
    if request.schema_revision != SCHEMA_REVISION:
        raise SchemaMismatch(
            f"the worker speaks schema revision {request.schema_revision}, this scheduler {SCHEMA_REVISION}; run the same release on both"
        )
    if not request.worker_id or not (request.socket or 1 <= request.port <= 65535):
        raise InvalidArgument("a worker must send its id, and its port or its socket")
    sizes = _sizes_of(request)
    replica_id = request.replica_id or request.worker_id
    return Rank(replica_id, request.worker_id, _target_of(request, peer), request.rank, sizes)


def _sizes_of(request: registry_pb2.RegisterRequest) -> ParallelSizes:
    tensor, pipeline = max(1, request.tensor_parallel_size), max(1, request.pipeline_parallel_size)
    sizes = ParallelSizes(tensor, pipeline, request.expert_parallel)
    world_size = max(1, request.world_size)
    name = f"rank {request.rank} of replica {request.replica_id or request.worker_id}"
    if world_size != sizes.world_size:
        raise ConfigurationRefused(
            f"{name} says --world-size {world_size}, but --tensor-parallel-size {tensor} x "
            f"--pipeline-parallel-size {pipeline} is {sizes.world_size}"
        )
    if world_size > MAX_RANKS:
        raise ConfigurationRefused(
            f"{name} says --tensor-parallel-size {tensor} x --pipeline-parallel-size {pipeline}; "
            f"a replica has at most {MAX_RANKS} ranks"
        )
    if request.rank >= world_size:
        raise ConfigurationRefused(f"{name} does not exist: --rank must be below --world-size {world_size}")
    if world_size > 1 and not request.replica_id:
        raise ConfigurationRefused(
            f"rank {request.rank} of {world_size} does not say which replica it belongs to; "
            "start all ranks of a replica with the same --replica-id"
        )
    return sizes


def _target_of(request: registry_pb2.RegisterRequest, peer: str) -> str:
    if request.socket:
        return unix_address(Path(request.socket))
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
    return f"{host}:{request.port}"


class RegistryServicer(registry_pb2_grpc.WorkerRegistryServicer):
    """Keeps a Register stream open for each rank. A rank ends with its stream, and with it the replica."""

    def __init__(self, deployment: Deployment, security: LinkSecurity = PLAIN) -> None:
        """Adds replicas to `deployment`; `security` protects connections to workers."""
        self._deployment = deployment
        self._security = security
        # Groups with a registered rank, by replica.
        self._groups: dict[str, RankGroup] = {}
        self._closed = False
        self._log = get_logger()

    async def Register(
        self, request: registry_pb2.RegisterRequest, context: Context
    ) -> AsyncIterator[registry_pb2.RegisterEvent]:
        """Keeps a rank until either side ends; the stream ends with the reason."""
        try:
            rank = _rank_of(request, context.peer())
            group = await self._admit(rank)
        except TriptychError as error:
            self._log.warning("worker_refused", peer=context.peer(), reason=error.message)
            await abort(context, error, to_service=True)
        log = self._log.bind(worker=rank.worker_id, target=rank.target)
        try:
            while not isinstance(news := await rank.news.get(), TriptychError):
                yield news
            # Requests must wait elsewhere before the worker registers again.
            await group.ended()
            if self._closed or not isinstance(news, Left):
                if not self._closed:
                    _log_loss(log, news)
                await abort(context, news, to_service=True)
            log.info("worker_left")
        finally:
            if group.remove(rank, Unavailable("its registration has ended")):
                log.warning("worker_hung_up")
                await group.ended()

    async def _admit(self, rank: Rank) -> RankGroup:
        """Adds a rank to its group, which it returns."""
        if self._closed:
            raise Unavailable("the scheduler stops", retry_after_ms=1000)
        group = self._groups.get(rank.replica_id)
        if group is not None and (earlier := group.rank_of(rank.worker_id)) is not None:
            # Its old connection is dead.
            group.remove(earlier, Unavailable("the worker has registered again"), returned=True)
            await group.ended()
            raise Unavailable(f"replica {rank.replica_id} is still registered; retry", retry_after_ms=200)
        if group is not None:
            group.check(rank)
        if rank.number == 0:
            self._deployment.losses.failed_steps_of(rank.worker_id).check()
        if group is None:
            group = RankGroup(rank.replica_id, self._deployment, self._security, self._close)
            self._groups[rank.replica_id] = group
        group.join(rank)
        return group

    def _close(self, replica_id: str) -> None:
        del self._groups[replica_id]
        self._deployment.starting.pop(replica_id, None)

    async def Leave(self, request: registry_pb2.LeaveRequest, context: Context) -> registry_pb2.LeaveResponse:
        """Takes the requests off a worker that shuts down, and off the other ranks of its replica."""
        for group in list(self._groups.values()):
            if (rank := group.rank_of(request.worker_id)) is not None:
                await group.leave(rank)
        return registry_pb2.LeaveResponse()

    async def close(self) -> None:
        """Ends all registrations and waits for the ends of the replicas."""
        self._closed = True
        for group in list(self._groups.values()):
            await group.close()


def _log_loss(log: FilteringBoundLogger, error: TriptychError) -> None:
    if isinstance(error, ReplicaLost):  # of another rank, which has its own line
        log.warning("rank_released", reason=error.message)
    else:
        log.error("worker_hung" if isinstance(error, Hung) else "worker_lost", reason=error.message)
