"""Loads LoRA adapters on all ranks of one replica, and frees them."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

import grpc.aio
from structlog.typing import FilteringBoundLogger

from protos.errors import Internal, TriptychError, Unavailable, from_rpc_error
from protos.triptych.v1 import worker_pb2, worker_pb2_grpc
from scheduler_svc.adapters.adapter import Adapter, LoadedAdapter

# A large adapter from a slow disk or a hub; a rank that is lost ends the calls at once.
LOAD_TIMEOUT_S = 300.0

Answer = Callable[[LoadedAdapter | TriptychError], None]


class AdapterLoader:
    """The LoadAdapter and UnloadAdapter calls of one replica, one after the other.

    So the memory of an adapter is free before the next one is loaded in its place. Each call goes to all
    ranks at once.
    """

    def __init__(self, stubs: "Sequence[worker_pb2_grpc.WorkerAsyncStub]", log: FilteringBoundLogger) -> None:
        """Starts without calls; `stubs` are the ranks."""
        self._stubs = stubs
        self._log = log
        self._calls: asyncio.Queue[Callable[[], Awaitable[None]]] = asyncio.Queue()
        self._task = asyncio.create_task(self._run(), name="adapters")

    def load(self, adapter: Adapter, answered: Answer) -> None:
        """Loads an adapter.

        Args:
            adapter: an adapter that is not loaded here.
            answered: called once with what the ranks say about it, or why it cannot be loaded; no rank has
                it then. Not called if the replica is lost.
        """
        self._calls.put_nowait(partial(self._load, adapter, answered))

    def unload(self, adapter_id: int) -> None:
        """Frees an adapter."""
        self._calls.put_nowait(partial(self._unload, adapter_id))

    def close(self) -> None:
        """Cancels all calls."""
        self._task.cancel()

    async def _run(self) -> None:
        while True:
            call = await self._calls.get()
            try:
                await call()
            except Exception:  # noqa: BLE001 - any bug
                # It must not end the calls that follow.
                self._log.exception("adapter_call_failed")

    async def _load(self, adapter: Adapter, answered: Answer) -> None:
        request = worker_pb2.LoadAdapterRequest(
            adapter_id=adapter.adapter_id, name=adapter.name, source=adapter.source
        )
        answers = await asyncio.gather(*(self._load_on(stub, request) for stub in self._stubs))
        refusals = [answer for answer in answers if isinstance(answer, TriptychError)]
        facts = {answer for answer in answers if isinstance(answer, LoadedAdapter)}
        if refusals:
            result: LoadedAdapter | TriptychError = refusals[0]
        elif len(facts) > 1:
            result = Internal(f"the ranks of the replica found different files in {adapter.source!r}")
        else:
            (result,) = facts
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
            return from_rpc_error(error)
        except Exception:  # noqa: BLE001 - any bug; the engine waits for an answer
            self._log.exception("adapter_call_failed")
            return Internal("calling the worker failed; see the scheduler's log")
        return LoadedAdapter(answer.rank, answer.digest)

    async def _unload(self, adapter_id: int) -> None:
        request = worker_pb2.UnloadAdapterRequest(adapter_id=adapter_id)
        calls = (stub.UnloadAdapter(request, timeout=LOAD_TIMEOUT_S) for stub in self._stubs)
        for answer in await asyncio.gather(*calls, return_exceptions=True):
            if isinstance(answer, BaseException):
                self._log.warning("adapter_not_unloaded", adapter_id=adapter_id, reason=str(answer))
