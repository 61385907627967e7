"""The client of the scheduler: one Connect stream for all requests of this process, and unary calls.

When the stream breaks, its requests are not lost. As soon as a scheduler answers again, they are sent with
the tokens received so far, and their clients see a pause. After ``resume_timeout_s`` they fail. New requests
wait, too, as long as the startup queue has places and time for them.
"""

import asyncio
import contextlib
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import grpc.aio
from google.protobuf.message import Message

from gateway.scheduler_client.in_flight import InFlightRequests, Outbox, StartupQueue, Subscription, jittered
from gateway.scheduler_client.pool_calls import pool_all
from protos.errors import (
    ConfigurationRefused,
    SchemaMismatch,
    TriptychError,
    Unauthenticated,
    Unavailable,
    Unimplemented,
    from_rpc_error,
)
from protos.service.channels import PLAIN, LinkSecurity, wait_until_ready
from protos.service.grpc_options import ACCEPTED_HEADER, SCHEMA_REVISION
from protos.service.logs import get_logger
from protos.triptych.v1 import common_pb2 as pb
from protos.triptych.v1 import inference_pb2 as inference
from protos.triptych.v1.inference_pb2_grpc import InferenceStub

if TYPE_CHECKING:
    # Exists for type checkers only.
    from protos.triptych.v1.inference_pb2_grpc import InferenceAsyncStub

T = TypeVar("T")

# Stays below Prometheus' default scrape timeout of 10 s: the scrape must still return the gateway's own
# metrics.
_METRICS_TIMEOUT_S: Final = 2.0

# A tokenizer is megabytes: it gets this many times the deadline of other calls.
_TOKENIZER_TIMEOUT_FACTOR: Final = 12

# Today's largest tokenizers take 40 MB in a handful of files.
MAX_TOKENIZER_BYTES: Final = 256 * 2**20
MAX_TOKENIZER_FILES: Final = 64

# Workers read an adapter from a disk or a hub; the scheduler bounds how long.
_LOAD_TIMEOUT_S: Final = 600.0

# Pauses between attempts to open the stream, seconds: doubled from the first up to the longest.
_FIRST_PAUSE_S: Final = 0.1
_LONGEST_PAUSE_S: Final = 2.0

# A message has waited for the gateway if it comes within this part of the time that the one before it took.
_WAITED_PART: Final = 0.25

# `Unimplemented` comes from another service.
_REFUSALS: Final = (Unauthenticated, SchemaMismatch, Unimplemented)

_HELLO: Final = inference.ConnectRequest(schema_revision=SCHEMA_REVISION)


class InferenceClient:
    """Client of ``triptych.v1.Inference`` for one event loop."""

    startup_queue: StartupQueue
    """The new requests that wait for a scheduler with a ready worker."""

    def __init__(
        self,
        address: str,
        *,
        resume_timeout_s: float = 60.0,
        call_timeout_s: float = 5.0,
        startup_queue: StartupQueue | None = None,
        security: LinkSecurity = PLAIN,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Prepares the client; :meth:`start` connects it.

        Args:
            address: the scheduler's, ``host:port`` or ``unix:path``.
            resume_timeout_s: how long running requests wait for a lost scheduler.
            call_timeout_s: deadline of unary calls.
            startup_queue: bounds new requests that wait for a scheduler; ``None``: by the default limits.
            security: how the connection is protected.
            clock: monotonic seconds.
        """
        self._address = address
        self._security = security
        self._resume_timeout_s = resume_timeout_s
        self._call_timeout_s = call_timeout_s
        self._clock = clock
        self._outbox = Outbox()
        self.startup_queue = startup_queue if startup_queue is not None else StartupQueue()
        self._table = InFlightRequests(self._outbox, self.startup_queue, resume_timeout_s)
        # Why no stream was open the last time, and when the last one ended.
        self._down: TriptychError = Unavailable(f"the scheduler at {address} has not been reached yet")
        self._closed_s = -math.inf
        self._on_connect: list[Callable[[], None]] = []
        self._log = get_logger(scheduler=address)
        self._task: asyncio.Task[None] | None = None
        self._channel: grpc.aio.Channel
        self._stub: InferenceAsyncStub

    async def start(self) -> None:
        """Starts to connect and returns at once: a gateway may start before its scheduler."""
        self._channel = self._security.open_channel(self._address)
        self._stub = InferenceStub(self._channel)
        self._task = asyncio.create_task(self._connect(), name="inference-connect")

    async def close(self) -> None:
        """Ends all requests and the connection."""
        self.fail_all(Unavailable("the gateway is shutting down"))
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            await self._channel.close()

    def on_connect(self, callback: Callable[[], None]) -> None:
        """Calls ``callback`` at each opening of a stream."""
        self._on_connect.append(callback)

    @property
    def is_refused(self) -> bool:
        """Whether a scheduler answers and refuses this gateway: another release, or another service token."""
        return bool(self.startup_queue.refusal)

    @property
    def num_pending(self) -> int:
        """Unfinished requests, waiting requests included."""
        return len(self._table)

    def submit(self, requests: Sequence[inference.GenerateRequest]) -> Subscription:
        """Sends requests, whose ids are unique in this process, with a common subscription.

        While no scheduler is connected, or the scheduler has no ready worker, the requests wait.

        Raises:
            Unavailable: if no scheduler is connected and the startup queue is full.
        """
        self._check_may_wait(len(requests))
        return self._table.submit(requests)

    def fail_all(self, error: TriptychError) -> None:
        """Ends every request with ``error``."""
        self._table.fail_all(error)

    async def pool(
        self, requests: Sequence[inference.PoolRequest], *, vector_size: int
    ) -> list[inference.PoolResponse]:
        """Returns a pooling model's results, in the order of ``requests``, whose ids are unique here.

        A lost scheduler costs a pause. All inputs together take a single place in the startup queue.

        Raises:
            Unavailable: if no scheduler is connected and the startup queue is full.
            TriptychError: the first failure; the other requests are cancelled.
        """
        if self.is_refused:
            raise self._down.with_traceback(None)
        self._check_may_wait(1)
        return await pool_all(
            self._stub,
            requests,
            self.startup_queue,
            vector_size=vector_size,
            resume_timeout_s=self._resume_timeout_s,
            is_new=not self._outbox.is_open,
            last_connected_s=lambda: self._clock() if self._outbox.is_open else self._closed_s,
            clock=self._clock,
        )

    def _check_may_wait(self, count: int) -> None:
        """Checks for a connected scheduler, or room for `count` waiting requests."""
        if not self._outbox.is_open and not self.startup_queue.has_room(count):
            raise self.startup_queue.full(str(self._down))

    async def get_model(self) -> pb.ModelInfo:
        """Returns the served model.

        Raises:
            TriptychError: ``Unavailable`` if no replica has been ready yet, or the scheduler is away or
                refuses this gateway.
        """
        if not self._outbox.is_open:
            raise self._down.with_traceback(None)
        return await self._ask(self._stub.GetModel, inference.GetModelRequest())

    async def list_loras(self) -> Sequence[inference.LoraInfo]:
        """Returns the LoRA adapters that requests can name; raises as :meth:`get_model` does."""
        return (await self._ask(self._stub.ListLoras, inference.ListLorasRequest())).loras

    async def load_lora(self, request: inference.LoadLoraRequest) -> inference.LoraInfo:
        """Loads a LoRA adapter; takes as long as the workers read it."""
        return await self._ask(self._stub.LoadLora, request, _LOAD_TIMEOUT_S)

    async def unload_lora(self, name: str) -> None:
        """Frees the name of a LoRA adapter."""
        await self._ask(self._stub.UnloadLora, inference.UnloadLoraRequest(name=name))

    async def reset_prefix_cache(self) -> int:
        """Drops all cached prefixes; returns the number of replicas. Raises as :meth:`get_model`."""
        return (
            await self._ask(self._stub.ResetPrefixCache, inference.ResetPrefixCacheRequest())
        ).num_replicas

    async def get_load(self) -> inference.Load:
        """Returns the deployment's load; raises as :meth:`get_model` does."""
        return await self._ask(self._stub.GetLoad, inference.GetLoadRequest())

    async def get_metrics(self) -> bytes:
        """Returns the scheduler's metrics in Prometheus' text format; raises as :meth:`get_model` does."""
        timeout = min(self._call_timeout_s, _METRICS_TIMEOUT_S)
        return (await self._ask(self._stub.GetMetrics, inference.GetMetricsRequest(), timeout)).text

    async def get_tokenizer(self, folder: Path) -> None:
        """Writes the model's tokenizer files into ``folder``, which is empty.

        Raises:
            ConfigurationRefused: if the stream cannot be a tokenizer.
            TriptychError: as :meth:`get_model`.
        """
        timeout_s = _TOKENIZER_TIMEOUT_FACTOR * self._call_timeout_s
        call = self._stub.GetTokenizer(inference.GetTokenizerRequest(), timeout=timeout_s)
        names: set[str] = set()
        bytes_left = MAX_TOKENIZER_BYTES
        try:
            async for chunk in call:
                name = chunk.name
                if Path(name).name != name or name in {"", ".", ".."} or "\0" in name:
                    raise ConfigurationRefused(
                        f"the scheduler sent a tokenizer file with the name {name[:80]!r}"
                    )
                names.add(name)
                bytes_left -= len(chunk.data)
                if len(names) > MAX_TOKENIZER_FILES or bytes_left < 0:
                    raise ConfigurationRefused(
                        f"the scheduler sent more than {MAX_TOKENIZER_FILES} tokenizer files or"
                        f" {MAX_TOKENIZER_BYTES >> 20} MiB of them; check that the model's folder holds no other"
                        " files"
                    )
                # The folder is temporary: the write ends in the page cache and does not block for long.
                with (folder / name).open("ab") as file:
                    file.write(chunk.data)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error
        finally:
            call.cancel()

    async def _ask(
        self, method: Callable[..., Awaitable[T]], request: Message, timeout_s: float | None = None
    ) -> T:
        """Makes a unary call unless the scheduler refuses this gateway; failures are a `TriptychError`."""
        if self.is_refused:
            raise self._down.with_traceback(None)
        try:
            return await method(request, timeout=timeout_s or self._call_timeout_s)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error

    async def _connect(self) -> None:
        """Opens stream after stream until it is cancelled."""
        pause = _FIRST_PAUSE_S
        while True:
            began = self._clock()
            error = await self._session()
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                # grpc.aio loses a cancellation when the stream breaks at the same moment.
                raise asyncio.CancelledError
            was_open = self._outbox.is_open
            self._outbox.close()
            self._down = self._noted(error)
            if was_open:
                self._closed_s = self._clock()
                self._log.warning("connection lost", error=str(error), pending=len(self._table))
            if self._clock() - began > _LONGEST_PAUSE_S:
                pause = _FIRST_PAUSE_S
            self._table.mark_all_lost()
            await asyncio.sleep(jittered(pause))
            pause = min(2 * pause, _LONGEST_PAUSE_S)

    def _noted(self, error: TriptychError) -> TriptychError:
        """Returns the error for clients. Notes, and logs once, that the scheduler refuses this gateway."""
        before, self.startup_queue.refusal = self.startup_queue.refusal, ""
        if isinstance(error, _REFUSALS):
            refusal = f"the scheduler at {self._address} refuses this gateway: {error.message}"
            self.startup_queue.refusal = refusal
            if refusal != before:
                self._log.error("refused", reason=error.message, retry="until it succeeds")
            return Unavailable(refusal)
        return error

    async def _session(self) -> TriptychError:
        """Runs a stream to its end; returns the reason."""
        writer = None
        call = None
        try:
            # A stream opened on a dead channel fails only after its first write. A ready channel has a
            # scheduler.
            await wait_until_ready(self._channel, self._address)
            call = self._stub.Connect()
            await call.write(_HELLO)
            if ACCEPTED_HEADER not in tuple(await call.initial_metadata() or ()):
                await call.read()  # raises the refusal
                return Unavailable("the scheduler did not accept the stream")
            self.startup_queue.refusal = ""
            self._outbox.open()
            self._table.resubmit_all()
            writer = asyncio.create_task(self._write(call), name="inference-write")
            self._log.info("connected", resubmitted=len(self._table))
            for callback in self._on_connect:
                callback()
            await self._deliver(call)
            return Unavailable("the scheduler closed the connection")
        except grpc.aio.AioRpcError as error:
            return from_rpc_error(error)
        except (asyncio.InvalidStateError, grpc.aio.UsageError) as error:
            return Unavailable(f"the stream to the scheduler broke: {error}")
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            return Unavailable("the stream to the scheduler was cut off")
        except Exception as error:  # noqa: BLE001 - any bug
            # The requests on this stream must not hang, whatever the bug: the next stream starts from a clean
            # state.
            self._log.exception("the stream to the scheduler failed")
            return Unavailable(f"the gateway failed on the stream to the scheduler ({type(error).__name__})")
        finally:
            if writer is not None:
                writer.cancel()
            if call is not None:
                call.cancel()

    async def _deliver(self, call: "grpc.aio.StreamStreamCall[Any, Any]") -> None:
        """Hands the stream's messages to the table, until the stream ends."""
        began = ended = time.perf_counter()
        async for response in call:
            # A message that came at once has waited, if reading took a part of the time that writing did.
            busy_s, now = ended - began, time.perf_counter()
            more_waits, began = now - ended < _WAITED_PART * busy_s, now
            self._table.deliver(response, more_waits=more_waits)
            ended = time.perf_counter()

    async def _write(self, call: "grpc.aio.StreamStreamCall[Any, Any]") -> None:
        try:
            # A failed write means a broken stream, which the reader reports.
            with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError, grpc.aio.UsageError):
                while True:
                    message = await self._outbox.pop()
                    await call.write(message)
        except Exception:  # noqa: BLE001 - any bug
            self._log.exception("the stream to the scheduler could not be written")
            # Ends the reader, too.
            call.cancel()
