"""Loads LoRA adapters on all ranks of one replica, and frees them."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import grpc.aio
from structlog.typing import FilteringBoundLogger

from protos.errors import Internal, TriptychError, Unavailable, from_rpc_error
from protos.triptych.v1 import worker_pb2, worker_pb2_grpc
from scheduler_svc.adapters.registry import Adapter, LoadAnswer, LoadedAdapter

# Enough for a large adapter from a slow disk or a hub. The loss of a rank ends the calls at once.
LOAD_TIMEOUT_S = 300.0

# Concurrent loads of a replica. Each takes a thread of every rank, and processor time away from steps while
# its layers are converted.
MAX_LOADS = 4


class AdapterLoader:
    """The LoadAdapter calls of one replica, each to all ranks at once, and its UnloadAdapter calls to rank 0.

    Up to `MAX_LOADS` loads run concurrently, so a slow download or disk delays no other adapter.
    """

    def __init__(self, stubs: "Sequence[worker_pb2_grpc.WorkerAsyncStub]", log: FilteringBoundLogger) -> None:
        """Starts without calls; `stubs` are the ranks."""
        self._stubs = stubs
        self._log = log
        self._may_load = asyncio.Semaphore(MAX_LOADS)
        self._calls: set[asyncio.Task[None]] = set()
        self._loads: dict[int, asyncio.Task[None]] = {}

    def load(
        self, adapter: Adapter, load_id: int, needed: Callable[[], Sequence[int]], answered: LoadAnswer
    ) -> None:
        """Loads an adapter.

        Args:
            adapter: an adapter.
            load_id: a new id.
            needed: returns the load ids to keep; called at the start of the load.
            answered: called once with the ranks' answer or an error, after which no rank holds the adapter.
                Not called if the replica is lost.
        """
        task = self._loads[load_id] = self._start(self._load(adapter, load_id, needed, answered))
        task.add_done_callback(lambda _: self._loads.pop(load_id))

    def unload(self, load_id: int) -> None:
        """Frees the adapter of a load once the load has ended."""
        self._start(self._unload(load_id, after=self._loads.get(load_id)))

    def close(self) -> None:
        """Cancels all calls."""
        for task in self._calls:
            task.cancel()

    def _start(self, call: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(call, name="adapter call")
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)
        return task

    async def _load(
        self, adapter: Adapter, load_id: int, needed: Callable[[], Sequence[int]], answered: LoadAnswer
    ) -> None:
        async with self._may_load:
            request = worker_pb2.LoadAdapterRequest(
                adapter_id=load_id, name=adapter.name, source=adapter.source, revision=adapter.revision,
                needed_ids=needed(),
            )  # fmt: skip
            calls = (stub.LoadAdapter(request, timeout=LOAD_TIMEOUT_S) for stub in self._stubs)
            answers = await asyncio.gather(*calls, return_exceptions=True)
            result = self._result(adapter, answers)
            if isinstance(result, TriptychError):
                # Also after a failed call: the worker may still be reading.
                await self._unload(load_id)
        answered(result)

    def _result(
        self, adapter: Adapter, answers: Sequence[worker_pb2.LoadAdapterResponse | BaseException]
    ) -> LoadedAdapter | TriptychError:
        facts = []
        for answer in answers:
            if isinstance(answer, BaseException):
                return self._error(answer)
            facts.append(answer)
        if len({each.digest for each in facts}) > 1:
            return Internal(f"the ranks of the replica found different files in {adapter.source!r}")
        first = facts[0]
        return LoadedAdapter(first.rank, first.digest, first.revision, tuple(first.displaced_ids))

    def _error(self, error: BaseException) -> TriptychError:
        if not isinstance(error, grpc.aio.AioRpcError):  # a bug; the engine waits for an answer
            self._log.error("adapter_call_failed", exc_info=error)
            return Internal("calling the worker failed; see the scheduler's log")
        if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
            return Unavailable(f"the worker did not load the adapter within {LOAD_TIMEOUT_S:g} s; retry")
        if error.code() is grpc.StatusCode.CANCELLED:
            return Unavailable("the worker ended the call, as it does when it stops; retry")
        return from_rpc_error(error)

    async def _unload(self, load_id: int, after: asyncio.Task[None] | None = None) -> None:
        if after is not None:
            await asyncio.wait([after])
        try:
            request = worker_pb2.UnloadAdapterRequest(adapter_id=load_id)
            await self._stubs[0].UnloadAdapter(request, timeout=LOAD_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            self._log.warning("adapter_not_unloaded", adapter_id=load_id, reason=str(error.details()))
