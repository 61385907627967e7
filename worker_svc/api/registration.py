"""Keeps the worker registered with its scheduler."""

import asyncio
import math
import random
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import grpc.aio

from protos.errors import ConfigurationRefused, Internal, InvalidArgument, Unimplemented, from_rpc_error
from protos.service.channels import PLAIN, LinkSecurity, wait_until_ready
from protos.service.grpc_options import SCHEMA_REVISION, is_unix
from protos.service.logs import get_logger
from protos.triptych.v1 import registry_pb2, registry_pb2_grpc
from worker_svc.ranks.layout import RankLayout

_FIRST_DELAY_S = 0.2
_LONGEST_DELAY_S = 5.0

# Serving for less time counts as a failed registration.
_LASTING_S = 1.0

# The running step ends meanwhile. Supervisors kill a process after 10 s.
_LEAVE_TIMEOUT_S = 5.0

_ALONE = RankLayout()

# A retry with the same settings cannot fix these errors. `Unimplemented` comes from another service. A
# scheduler of another release or with another token may have a successor that accepts.
_FINAL = (ConfigurationRefused, InvalidArgument, Unimplemented)

# A fault repeated so often before the worker serves counts as permanent.
_MOST_FAULTS = 3


async def stay_registered(
    scheduler: str,
    *,
    worker_id: str,
    host: str,
    port: int,
    socket: Path | None = None,
    rank: RankLayout = _ALONE,
    replica_id: str = "",
    on_hung: Callable[[str], None] = lambda _: None,
    on_rank_lost: Callable[[str], None] = lambda _: None,
    leaving: asyncio.Event | None = None,
    security: LinkSecurity = PLAIN,
) -> None:
    """Keeps one Register stream open and opens another when it ends, until the worker leaves.

    Args:
        scheduler: the scheduler's host:port or unix:path.
        worker_id: identifies this process.
        host: the host at which the scheduler connects to the worker; empty for the call's origin.
        port: the port there.
        rank: this process' place in its replica.
        replica_id: the replica's name; empty for a generated name.
        on_hung: called with the reason when the scheduler gives the worker up after a step's timeout.
        on_rank_lost: called with the reason when another rank is lost, and the replica with it.
        socket: the absolute path of the worker's Unix socket, for a scheduler of this machine.
        leaving: set when the worker shuts down; it registers no more.
        security: the connection's protection.

    Raises:
        ConfigurationRefused: if the scheduler refuses this worker and a retry would not help.
    """
    log, delay_s, last_reason, faults = get_logger(scheduler=scheduler), _FIRST_DELAY_S, "", Counter[str]()
    near = socket if is_unix(scheduler) else None
    request = _request(worker_id, host, port, near, rank, replica_id)
    states = registry_pb2.RegisterEvent
    notes = {states.STATE_HUNG: on_hung, states.STATE_RANK_LOST: on_rank_lost}
    async with security.open_channel(scheduler) as channel:
        stub = registry_pb2_grpc.WorkerRegistryStub(channel)
        while True:
            served_since = math.inf
            try:
                await wait_until_ready(channel, scheduler)
                async for event in stub.Register(request):
                    if event.state == states.STATE_SERVING:
                        served_since, last_reason, faults = time.monotonic(), "", Counter()
                    if (note := notes.get(event.state)) is not None:
                        note(event.message)
                    log.info("registered", state=_state(event.state), message=event.message)
                reason = "the scheduler ended the registration"
            except grpc.aio.AioRpcError as error:
                reason = _reason(error, scheduler, faults)
            if leaving is not None and leaving.is_set():
                return
            delay_s = _FIRST_DELAY_S if time.monotonic() - served_since >= _LASTING_S else delay_s
            if reason != last_reason:  # log a reason once, not at every retry
                log.warning("not_registered", reason=reason, retry="until it succeeds")
                last_reason = reason
            await asyncio.sleep(delay_s * random.uniform(0.8, 1.2))  # noqa: S311 - not a secret
            delay_s = min(delay_s * 2, _LONGEST_DELAY_S)


def _request(
    worker_id: str, host: str, port: int, socket: Path | None, rank: RankLayout, replica_id: str
) -> registry_pb2.RegisterRequest:
    request = registry_pb2.RegisterRequest(
        schema_revision=SCHEMA_REVISION, worker_id=worker_id, host=host, port=port, replica_id=replica_id,
        socket="" if socket is None else str(socket),
    )  # fmt: skip
    if rank.world_size > 1:
        request.rank, request.world_size = rank.rank, rank.world_size
        request.tensor_parallel_size, request.pipeline_parallel_size = rank.tensor, rank.pipeline
        request.expert_parallel = rank.experts
    return request


def _reason(error: grpc.aio.AioRpcError, scheduler: str, faults: Counter[str]) -> str:
    """Returns why a registration ended, and counts faults.

    Raises:
        ConfigurationRefused: if no retry would help.
    """
    failure = from_rpc_error(error)
    if isinstance(failure, Internal):
        faults[failure.message] += 1
        if faults[failure.message] >= _MOST_FAULTS:
            raise ConfigurationRefused(f"{failure.message} ({_MOST_FAULTS} times)") from error
    if isinstance(failure, _FINAL):
        raise ConfigurationRefused(
            f"the scheduler at {scheduler} refuses this worker: {failure.message}"
        ) from error
    return failure.message


async def leave(scheduler: str, *, worker_id: str, security: LinkSecurity = PLAIN) -> None:
    """Announces the shutdown to the scheduler, and waits for the takeover of the worker's requests.

    Does not raise: a worker ends, whatever the scheduler does.
    """
    async with security.open_channel(scheduler) as channel:
        stub = registry_pb2_grpc.WorkerRegistryStub(channel)
        try:
            await stub.Leave(registry_pb2.LeaveRequest(worker_id=worker_id), timeout=_LEAVE_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            get_logger(scheduler=scheduler).warning("not_left", reason=from_rpc_error(error).message)


def _state(state: registry_pb2.RegisterEvent.State.ValueType) -> str:
    return registry_pb2.RegisterEvent.State.Name(state).removeprefix("STATE_").lower()
