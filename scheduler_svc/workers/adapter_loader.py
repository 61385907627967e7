"""Loads LoRA adapters on all ranks of one replica, and frees them."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any

import grpc.aio
from structlog.typing import FilteringBoundLogger

from protos.errors import Internal, TriptychError, Unavailable, from_rpc_error
from protos.triptych.v1 import worker_pb2, worker_pb2_grpc
from scheduler_svc.adapters.registry import Adapter, LoadedAdapter

# A large adapter from a slow disk or a hub; a rank that is lost ends the calls at once.
LOAD_TIMEOUT_S = 300.0

# Loads of a replica at the same time. Each takes a thread of every rank and, while its layers are converted,
# processor time that steps need, too.
MAX_LOADS = 4

Answer = Callable[[LoadedAdapter | TriptychError], None]


class AdapterLoader:
    """The LoadAdapter and UnloadAdapter calls of one replica. Each goes to all ranks at once.

    `MAX_LOADS` run beside each other, so one slow download or disk delays no other adapter. The calls of one
    adapter keep their order. A load waits for the unloads before it, so the memory of an adapter is free
    before another one is loaded in its place.
    """

    def __init__(self, stubs: "Sequence[worker_pb2_grpc.WorkerAsyncStub]", log: FilteringBoundLogger) -> None:
        """Starts without calls; `stubs` are the ranks."""
        self._stubs = stubs
        self._log = log
        self._may_load = asyncio.Semaphore(MAX_LOADS)
        # Calls under way; those that unload, and the last one of each adapter.
        self._calls: set[asyncio.Task[None]] = set()
        self._unloads: set[asyncio.Task[None]] = set()
        self._last: dict[int, asyncio.Task[None]] = {}

    def load(self, adapter: Adapter, answered: Answer) -> None:
        """Loads an adapter.

        Args:
            adapter: an adapter that is not loaded here.
            answered: called once with what the ranks say about it, or why it cannot be loaded; no rank has
                it then. Not called if the replica is lost.
        """
        earlier = self._unloads | self._earlier(adapter.adapter_id)
        self._start(adapter.adapter_id, self._load_after(earlier, adapter, answered))

    def unload(self, adapter_id: int) -> None:
        """Frees an adapter."""
        unloads = self._unload_after(self._earlier(adapter_id), adapter_id)
        task = self._start(adapter_id, unloads)
        self._unloads.add(task)
        task.add_done_callback(self._unloads.discard)

    def close(self) -> None:
        """Cancels all calls."""
        for task in self._calls:
            task.cancel()

    def _earlier(self, adapter_id: int) -> set[asyncio.Task[None]]:
        """Returns the call that a new one of the same adapter follows, if it is still under way."""
        return {self._last[adapter_id]} if adapter_id in self._last else set()

    def _start(self, adapter_id: int, call: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(call, name=f"adapter {adapter_id}")
        self._calls.add(task)
        self._last[adapter_id] = task
        task.add_done_callback(partial(self._ended, adapter_id))
        return task

    def _ended(self, adapter_id: int, task: asyncio.Task[None]) -> None:
        self._calls.discard(task)
        if self._last.get(adapter_id) is task:
            del self._last[adapter_id]
        if not task.cancelled() and (error := task.exception()) is not None:
            # A bug. It must not end the calls that follow.
            self._log.error("adapter_call_failed", exc_info=error)

    async def _load_after(self, earlier: set[asyncio.Task[None]], adapter: Adapter, answered: Answer) -> None:
        if earlier:
            await asyncio.wait(earlier)
        async with self._may_load:
            await self._load(adapter, answered)

    async def _unload_after(self, earlier: set[asyncio.Task[None]], adapter_id: int) -> None:
        if earlier:
            await asyncio.wait(earlier)
        await self._unload(adapter_id)

    async def _load(self, adapter: Adapter, answered: Answer) -> None:
        request = worker_pb2.LoadAdapterRequest(
            adapter_id=adapter.adapter_id, name=adapter.name, source=adapter.source, revision=adapter.revision
        )
        answers = await asyncio.gather(*(self._load_on(stub, request) for stub in self._stubs))
        refusals = [answer for answer in answers if isinstance(answer, TriptychError)]
        facts = {answer.digest: answer for answer in answers if isinstance(answer, LoadedAdapter)}
        if refusals:
            result: LoadedAdapter | TriptychError = refusals[0]
        elif len(facts) > 1:
            result = Internal(f"the ranks of the replica found different files in {adapter.source!r}")
        else:
            (result,) = facts.values()
        if isinstance(result, TriptychError):
            # Also where a call failed: the worker may still be reading.
            await self._unload(adapter.adapter_id)
        answered(result)

    async def _load_on(
        self, stub: "worker_pb2_grpc.WorkerAsyncStub", request: worker_pb2.LoadAdapterRequest
    ) -> LoadedAdapter | TriptychError:
        try:
            answer = await stub.LoadAdapter(request, timeout=LOAD_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                return Unavailable(f"the worker did not load the adapter within {LOAD_TIMEOUT_S:g} s; retry")
            if error.code() is grpc.StatusCode.CANCELLED:
                return Unavailable("the worker ended the call, as it does when it stops; retry")
            return from_rpc_error(error)
        except Exception:  # noqa: BLE001 - any bug; the engine waits for an answer
            self._log.exception("adapter_call_failed")
            return Internal("calling the worker failed; see the scheduler's log")
        return LoadedAdapter(answer.rank, answer.digest, answer.revision)

    async def _unload(self, adapter_id: int) -> None:
        request = worker_pb2.UnloadAdapterRequest(adapter_id=adapter_id)
        calls = (stub.UnloadAdapter(request, timeout=LOAD_TIMEOUT_S) for stub in self._stubs)
        for answer in await asyncio.gather(*calls, return_exceptions=True):
            if isinstance(answer, BaseException):
                self._log.warning("adapter_not_unloaded", adapter_id=adapter_id, reason=str(answer))
