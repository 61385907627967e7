"""Pooling: calls with many inputs each, a bounded number at once, repeated when the scheduler is lost."""

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Final

import grpc.aio

from gateway.scheduler_client.in_flight import StartupQueue, jittered
from protos.errors import Overloaded, from_rpc_error
from protos.triptych.v1 import inference_pb2 as inference
from protos.validation import count_values

if TYPE_CHECKING:
    from protos.triptych.v1.inference_pb2_grpc import InferenceAsyncStub

# Inputs of one call: they arrive at the scheduler together and fill its batches. While the gateway reads the
# results of one call, the device has another one's inputs.
_INPUTS_PER_CALL: Final = 32
_MAX_CALLS: Final = 2

# Values of the results of a call, unless a single input has more: about 4 MiB.
_VALUES_PER_CALL: Final = 1 << 20

# Prompt tokens of a call, unless a single input has more: a few such calls fit into the scheduler's queue.
_TOKENS_PER_CALL: Final = 1 << 17

_RETRY_PAUSE_S: Final = 0.5

# A call that fails sooner, although a scheduler is connected, was not lost with it. No new connection can be
# made, for example, with certificates that have changed.
_AT_ONCE_S: Final = 1.0


async def pool_all(
    stub: "InferenceAsyncStub",
    requests: Sequence[inference.PoolRequest],
    startup_queue: StartupQueue,
    *,
    vector_size: int,
    resume_timeout_s: float,
    is_new: bool = False,
    last_connected_s: Callable[[], float] = lambda: -math.inf,
    clock: Callable[[], float] = time.monotonic,
) -> list[inference.PoolResponse]:
    """Returns the results of a pooling model, in the order of ``requests``.

    Args:
        stub: the scheduler.
        requests: complete, with ids unique in this process.
        startup_queue: bounds the requests that wait for a scheduler with a ready worker.
        vector_size: values of each of the model's vectors.
        resume_timeout_s: how long each call waits for a lost scheduler before it fails.
        is_new: whether the requests wait as new requests, because no scheduler is connected.
        last_connected_s: returns when a scheduler was connected last, on `clock`.
        clock: monotonic seconds.
    """
    place = object()
    if is_new:
        startup_queue.enter(place)

    def may_wait(error: grpc.aio.AioRpcError, waited_s: float) -> bool:
        if error.code() is not grpc.StatusCode.UNAVAILABLE:
            return False
        # An error with details comes from a scheduler that refuses. Without details, no scheduler answers.
        if error.trailing_metadata() or place in startup_queue:
            return waited_s < startup_queue.timeout_s and startup_queue.enter(place)
        return waited_s <= resume_timeout_s

    turns = _Turns(lambda part: _pool(stub, part, may_wait, last_connected_s, clock))
    calls = [asyncio.create_task(turns.run(part)) for part in _parts(requests, vector_size)]
    try:
        return [response for part in await asyncio.gather(*calls) for response in part]
    finally:
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        startup_queue.leave(place)


class _Turns:
    """Bounds the simultaneous calls of a request, so that they do not fill the scheduler's queue."""

    def __init__(
        self, send: Callable[[Sequence[inference.PoolRequest]], Awaitable[list[inference.PoolResponse]]]
    ) -> None:
        self._send = send
        self._places = asyncio.Semaphore(_MAX_CALLS)
        self._under_way = 0

    async def run(self, part: Sequence[inference.PoolRequest]) -> list[inference.PoolResponse]:
        """Returns the results of a call.

        If the queue is too full for it and the request's other call, it waits until no other is under way.
        """
        async with self._places:
            others = self._under_way
            try:
                return await self._run(part)
            except Overloaded:
                # A call that was under way when this one was refused may have ended by now.
                if not (others or self._under_way):
                    raise
            async with self._places:
                return await self._run(part)

    async def _run(self, part: Sequence[inference.PoolRequest]) -> list[inference.PoolResponse]:
        self._under_way += 1
        try:
            return await self._send(part)
        finally:
            self._under_way -= 1


async def _pool(
    stub: "InferenceAsyncStub",
    requests: Sequence[inference.PoolRequest],
    may_wait: Callable[[grpc.aio.AioRpcError, float], bool],
    last_connected_s: Callable[[], float],
    clock: Callable[[], float],
) -> list[inference.PoolResponse]:
    """Returns the results of a call; ``may_wait`` decides after each error, with the seconds waited.

    The call has no deadline: the scheduler bounds how long requests wait and run, and a dead connection fails
    all of its calls.
    """
    lost_at: float | None = None
    attempt = 0
    sent = requests
    while True:
        sent_at = clock()
        try:
            answer = await stub.PoolAll(inference.PoolAllRequest(requests=sent))
            return list(answer.responses)
        except grpc.aio.AioRpcError as error:
            # The loss of a scheduler that was there meanwhile is a new one; one that refuses is not lost.
            was_there = last_connected_s() >= sent_at and not error.trailing_metadata()
            if lost_at is None or (was_there and clock() - sent_at > _AT_ONCE_S):
                lost_at = clock()
            if not may_wait(error, clock() - lost_at):
                raise from_rpc_error(error) from error
        await asyncio.sleep(jittered(_RETRY_PAUSE_S))
        # A scheduler that has not noticed the loss may still know the old ids.
        attempt += 1
        sent = [_renamed(request, attempt) for request in requests]


def _parts(
    requests: Sequence[inference.PoolRequest], vector_size: int
) -> Iterator[list[inference.PoolRequest]]:
    """Yields the requests of each call, in order."""
    part: list[inference.PoolRequest] = []
    values = tokens = 0
    for request in requests:
        length = len(request.prompt_token_ids)
        count = count_values(request, length, vector_size)
        if part and (
            len(part) == _INPUTS_PER_CALL
            or tokens + length > _TOKENS_PER_CALL
            or values + count > _VALUES_PER_CALL
        ):
            yield part
            part, values, tokens = [], 0, 0
        part.append(request)
        values += count
        tokens += length
    if part:
        yield part


def _renamed(request: inference.PoolRequest, attempt: int) -> inference.PoolRequest:
    again = inference.PoolRequest()
    again.CopyFrom(request)
    again.request_id = f"{request.request_id}.{attempt}"
    return again
