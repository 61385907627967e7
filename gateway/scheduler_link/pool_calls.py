"""Pooling: one unary call per input, a bounded number at once, repeated when the scheduler is lost."""

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

import grpc.aio

from gateway.scheduler_link.jitter import jittered
from gateway.scheduler_link.parking import Parking
from protos.errors import from_rpc_error
from protos.triptych.v1 import inference_pb2 as inference

if TYPE_CHECKING:
    from protos.triptych.v1.inference_pb2_grpc import InferenceAsyncStub

# Calls of one HTTP request that are under way at once.
_MAX_CALLS: Final = 64

# A request waits in the queue and runs within this time, seconds; a dead connection is noticed much earlier.
_TIMEOUT_S: Final = 600.0

_RETRY_PAUSE_S: Final = 0.5


async def pool_all(
    stub: "InferenceAsyncStub",
    requests: Sequence[inference.PoolRequest],
    parking: Parking,
    *,
    resume_timeout_s: float,
    is_new: bool = False,
    clock: Callable[[], float] = time.monotonic,
) -> list[inference.PoolResponse]:
    """Returns the results of a pooling model, in the order of ``requests``.

    Args:
        stub: the scheduler.
        requests: complete, with ids unique in this process.
        parking: has a place for the requests while they wait for a scheduler with a ready worker.
        resume_timeout_s: how long each call waits for a lost scheduler before it fails.
        is_new: whether no scheduler is connected: the requests wait as new ones do, not as running ones.
        clock: monotonic seconds.

    Raises:
        TriptychError: the first failure; the other requests are cancelled.
    """
    # A request with thousands of inputs must not fill the scheduler's queue.
    limit = asyncio.Semaphore(_MAX_CALLS)

    place = object()
    if is_new:
        parking.enter(place)

    def may_wait(error: grpc.aio.AioRpcError, waited_s: float) -> bool:
        if error.code() is not grpc.StatusCode.UNAVAILABLE:
            return False
        # An error with details comes from a scheduler that refuses. Without details, no scheduler answers.
        if error.trailing_metadata() or place in parking:
            return waited_s < parking.timeout_s and parking.enter(place)
        return waited_s <= resume_timeout_s

    async def one(request: inference.PoolRequest) -> inference.PoolResponse:
        async with limit:
            return await _pool(stub, request, may_wait, clock)

    calls = [asyncio.create_task(one(request)) for request in requests]
    try:
        return await asyncio.gather(*calls)
    finally:
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        parking.leave(place)


async def _pool(
    stub: "InferenceAsyncStub",
    request: inference.PoolRequest,
    may_wait: Callable[[grpc.aio.AioRpcError, float], bool],
    clock: Callable[[], float],
) -> inference.PoolResponse:
    """Returns the result of one request; ``may_wait`` decides after each error, with the seconds waited."""
    lost_at: float | None = None
    attempt = 0
    while True:
        try:
            response: inference.PoolResponse = await stub.Pool(request, timeout=_TIMEOUT_S)
            return response
        except grpc.aio.AioRpcError as error:
            lost_at = clock() if lost_at is None else lost_at
            if not may_wait(error, clock() - lost_at):
                raise from_rpc_error(error) from error
        await asyncio.sleep(jittered(_RETRY_PAUSE_S))
        # A scheduler that has not noticed the loss may still know the old id.
        attempt += 1
        again = inference.PoolRequest()
        again.CopyFrom(request)
        again.request_id = f"{request.request_id}.{attempt}"
        request = again
