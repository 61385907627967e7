"""Loads LoRA adapters on all ranks of one replica, and frees them."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import grpc.aio
from structlog.typing import FilteringBoundLogger

from protos.errors import Internal, TriptychError, Unavailable, from_rpc_error
from protos.triptych.v1 import worker_pb2, worker_pb2_grpc
from scheduler_svc.adapters.registry import Adapter, LoadAnswer, LoadedAdapter

# A large adapter from a slow disk or a hub; a rank that is lost ends the calls at once.
LOAD_TIMEOUT_S = 300.0

# Loads of a replica at the same time. Each takes a thread of every rank. While its layers are converted, it
# also takes processor time from steps.
MAX_LOADS = 4


class AdapterLoader:
    """The LoadAdapter calls of one replica, each to all ranks at once, and the UnloadAdapter calls of rank 0.

    Up to `MAX_LOADS` loads run at the same time, so one slow download or disk delays no other adapter.
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
            load_id: the worker's id for what this load brings; no other load has it.
            needed: returns the loads that must stay; called when this one begins.
            answered: called once with what the ranks say about it, or why it cannot be loaded; no rank has
                it then. Not called if the replica is lost.
        """
        task = self._loads[load_id] = self._start(self._load(adapter, load_id, needed, answered))
        task.add_done_callback(lambda _: self._loads.pop(load_id))

    def unload(self, load_id: int) -> None:
        """Frees what a load has brought, once it has ended."""
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
                # Also where a call failed: the worker may still be reading.
                await self._unload(load_id)
        answered(result)

    def _result(
        self, adapter: Adapter, answers: Sequence[worker_pb2.LoadAdapterResponse | BaseException]
    ) -> LoadedAdapter | TriptychError:
        for answer in answers:
            if isinstance(answer, BaseException):
                return self._error(answer)
        first, *others = (answer for answer in answers if not isinstance(answer, BaseException))
        if any(other.digest != first.digest for other in others):
            return Internal(f"the ranks of the replica found different files in {adapter.source!r}")
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
