"""The gateway's line to the scheduler: one ``Inference.Connect`` stream that carries every request of this process.

When the stream breaks, the requests on it are not lost: they are sent again with the tokens received so far as soon as a scheduler
answers, and their clients see a pause. Only after ``resume_timeout_s`` do they fail.
"""

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import grpc.aio

from gateway.scheduler_link.pending_request import Live, Submission, finished_already
from protos import wire
from protos.errors import (
    Aborted,
    Internal,
    Overloaded,
    SchemaMismatch,
    TriptychError,
    Unavailable,
    from_proto,
    from_rpc_error,
)
from protos.logs import get_logger
from protos.triptych.v1 import common_pb2 as pb
from protos.triptych.v1 import inference_pb2 as inference
from protos.triptych.v1.inference_pb2_grpc import InferenceStub

if TYPE_CHECKING:
    # Exists for type checkers only.
    from protos.triptych.v1.inference_pb2_grpc import InferenceAsyncStub

# Pauses between attempts to open the stream, seconds: doubled up to the longest.
_FIRST_PAUSE_S: Final = 0.1
_LONGEST_PAUSE_S: Final = 2.0

# Pause before a running request that a scheduler turned away (no replica yet) is sent again, if it did not say how long.
_RESUBMIT_PAUSE_S: Final = 0.5

# Who scrapes metrics waits for ten seconds at the most; the gateway's own must be among what it gets by then.
_METRICS_TIMEOUT_S: Final = 2.0

# Pooling calls of one HTTP request that are under way at once.
_POOL_CALLS: Final = 64

# A pooling request waits its turn and runs within that, seconds; a dead peer is noticed much earlier.
_POOL_TIMEOUT_S: Final = 600.0

# Largest tokenizers of today: 40 MB in a handful of files.
MAX_TOKENIZER_BYTES: Final = 256 * 2**20
MAX_TOKENIZER_FILES: Final = 64

_HELLO: Final = inference.ConnectRequest(schema_revision=wire.SCHEMA_REVISION)


class InferenceClient:
    """Client of ``triptych.v1.Inference`` for one event loop.

    Attributes:
        connected: whether a stream to a scheduler is open.
    """

    def __init__(
        self,
        address: str,
        *,
        resume_timeout_s: float = 60.0,
        call_timeout_s: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Prepares the client; :meth:`start` connects it.

        Args:
            address: the scheduler's, ``host:port``.
            resume_timeout_s: how long running requests wait for a lost scheduler.
            call_timeout_s: deadline of unary calls.
            clock: monotonic seconds.
        """
        self.connected = False
        self._address = address
        self._resume_timeout_s = resume_timeout_s
        self._call_timeout_s = call_timeout_s
        self._clock = clock
        self._live: dict[str, Live] = {}
        self._outbox: deque[inference.ConnectRequest] = deque()
        self._outbox_filled = asyncio.Event()
        self._down: TriptychError = Unavailable(f"the scheduler at {address} has not been reached yet")
        self._eos_token_ids: frozenset[int] = frozenset()
        self._on_connect: list[Callable[[], None]] = []
        self._task: asyncio.Task[None] | None = None
        self._channel: grpc.aio.Channel
        self._stub: InferenceAsyncStub
        self._log = get_logger(scheduler=address)

    async def start(self) -> None:
        """Starts to connect, and returns without waiting for it: a gateway may be up before its scheduler."""
        self._channel = wire.open_channel(self._address)
        self._stub = InferenceStub(self._channel)
        self._task = asyncio.create_task(self._run(), name="inference-connect")

    async def close(self) -> None:
        """Ends all requests and the connection."""
        self.fail_all(Unavailable("the gateway is shutting down"))
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            await self._channel.close()

    def on_connect(self, callback: Callable[[], None]) -> None:
        """Calls ``callback`` whenever a stream has been opened."""
        self._on_connect.append(callback)

    # Requests

    def submit(self, requests: Sequence[inference.GenerateRequest]) -> Submission:
        """Sends requests whose events are wanted together.

        Args:
            requests: complete, with ids unique in this process.

        Raises:
            Unavailable: if there is no scheduler to send them to.
        """
        if not self.connected:
            raise self._down
        submission = Submission(requests, self._abort)
        for live in submission.live:
            self._send(live)
        return submission

    def fail_all(self, error: TriptychError) -> None:
        """Ends every request with ``error``."""
        for live in list(self._live.values()):
            live.submission.fail(error)

    @property
    def num_live(self) -> int:
        """Requests under way."""
        return len(self._live)

    # Unary calls

    async def get_model(self) -> pb.ModelInfo:
        """The served model.

        Raises:
            TriptychError: ``Unavailable`` while no replica is or was ready, or the scheduler is away.
        """
        try:
            info: pb.ModelInfo = await self._stub.GetModel(
                inference.GetModelRequest(), timeout=self._call_timeout_s
            )
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error
        self._eos_token_ids = frozenset(info.eos_token_ids)
        return info

    async def get_load(self) -> inference.Load:
        """The deployment's load; raises as :meth:`get_model` does."""
        try:
            load: inference.Load = await self._stub.GetLoad(
                inference.GetLoadRequest(), timeout=self._call_timeout_s
            )
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error
        return load

    async def get_metrics(self) -> bytes:
        """The scheduler's metrics in Prometheus' text format; raises as :meth:`get_model` does, and sooner."""
        timeout = min(self._call_timeout_s, _METRICS_TIMEOUT_S)
        try:
            response: inference.GetMetricsResponse = await self._stub.GetMetrics(
                inference.GetMetricsRequest(), timeout=timeout
            )
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error
        return response.text

    async def pool(self, requests: Sequence[inference.PoolRequest]) -> list[inference.PoolResponse]:
        """Results of a pooling model, in the requests' order. A lost scheduler costs a pause, as it does elsewhere.

        Args:
            requests: complete, with ids unique in this process.

        Raises:
            TriptychError: the first failure; the other requests are cancelled then.
        """
        if not self.connected:
            raise self._down
        # One request of thousands of inputs must not fill the scheduler's queue.
        room = asyncio.Semaphore(_POOL_CALLS)

        async def one(request: inference.PoolRequest) -> inference.PoolResponse:
            async with room:
                return await self._pool(request)

        calls = [asyncio.create_task(one(request)) for request in requests]
        try:
            return await asyncio.gather(*calls)
        finally:
            for call in calls:
                call.cancel()
            await asyncio.gather(*calls, return_exceptions=True)

    async def _pool(self, request: inference.PoolRequest) -> inference.PoolResponse:
        lost_at: float | None = None
        attempt = 0
        while True:
            try:
                response: inference.PoolResponse = await self._stub.Pool(request, timeout=_POOL_TIMEOUT_S)
                return response
            except grpc.aio.AioRpcError as error:
                # With details it is the scheduler that speaks; without, there is none at the other end.
                if error.code() is not grpc.StatusCode.UNAVAILABLE or error.trailing_metadata():
                    raise from_rpc_error(error) from error
                lost_at = self._clock() if lost_at is None else lost_at
                if self._clock() - lost_at > self._resume_timeout_s:
                    raise from_rpc_error(error) from error
            await asyncio.sleep(_RESUBMIT_PAUSE_S)
            # The old id may still be known to a scheduler that has not noticed the loss.
            attempt += 1
            again = inference.PoolRequest()
            again.CopyFrom(request)
            again.request_id = f"{request.request_id}.{attempt}"
            request = again

    async def get_tokenizer(self, folder: Path) -> None:
        """Writes the model's tokenizer files into ``folder``.

        Raises:
            Internal: if what comes cannot be a tokenizer: unsafe file names, too many files or bytes.
            TriptychError: as :meth:`get_model`.
        """
        names: set[str] = set()
        rest = MAX_TOKENIZER_BYTES
        call = self._stub.GetTokenizer(inference.GetTokenizerRequest(), timeout=12 * self._call_timeout_s)
        try:
            async for chunk in call:
                name = chunk.name
                if Path(name).name != name or name in {"", ".", ".."} or "\0" in name:
                    raise Internal(f"the scheduler sent a tokenizer file with the name {name[:80]!r}")
                names.add(name)
                rest -= len(chunk.data)
                if len(names) > MAX_TOKENIZER_FILES or rest < 0:
                    raise Internal(
                        f"the scheduler sent more than {MAX_TOKENIZER_FILES} tokenizer files or "
                        f"{MAX_TOKENIZER_BYTES >> 20} MiB of them; does the model's folder hold other files?"
                    )
                # A temporary folder: the write ends in the page cache.
                with (folder / name).open("ab") as file:
                    file.write(chunk.data)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error
        finally:
            call.cancel()

    # The stream

    async def _run(self) -> None:
        pause = _FIRST_PAUSE_S
        while True:
            began = self._clock()
            error = await self._session()
            was_connected, self.connected = self.connected, False
            self._down = error
            if was_connected:
                self._log.warning("connection lost", error=str(error), live=len(self._live))
            if self._clock() - began > _LONGEST_PAUSE_S:
                pause = _FIRST_PAUSE_S
            if isinstance(error, SchemaMismatch):
                # Waiting does not help; someone must upgrade one of the two.
                self._log.error("refused by the scheduler", error=str(error))
                self.fail_all(error)
            for live in self._live.values():
                self._mark_lost(live)
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)

    async def _session(self) -> TriptychError:
        """Runs one stream until it ends; returns why it ended."""
        writer = None
        call = None
        try:
            # A stream opened on a dead channel fails only after its first write; ready means there is a scheduler.
            await self._channel.channel_ready()
            call = self._stub.Connect()
            await call.write(_HELLO)
            self._outbox.clear()
            self.connected = True
            for live in list(self._live.values()):
                self._resubmit(live)
            writer = asyncio.create_task(self._write(call), name="inference-write")
            self._log.info("connected", resubmitted=len(self._live))
            for callback in self._on_connect:
                callback()
            async for response in call:
                self._deliver(response)
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
            # Whatever is wrong with this stream, the requests on it must not hang: the next one begins from a clean state.
            self._log.exception("the stream to the scheduler failed")
            return Unavailable(f"the gateway failed on the stream to the scheduler ({type(error).__name__})")
        finally:
            if writer is not None:
                writer.cancel()
            if call is not None:
                call.cancel()

    async def _write(self, call: grpc.aio.StreamStreamCall) -> None:  # type: ignore[type-arg]
        try:
            # A failed write means a broken stream, which the reader reports.
            with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError, grpc.aio.UsageError):
                while True:
                    while self._outbox:
                        message = self._outbox.popleft()
                        await call.write(message)
                        if (live := self._live.get(message.generate.request_id)) is not None:
                            live.on_written()
                    self._outbox_filled.clear()
                    await self._outbox_filled.wait()
        except Exception:  # noqa: BLE001 - any bug
            self._log.exception("the stream to the scheduler could not be written")
            # Ends the reader, too.
            call.cancel()

    def _put(self, message: inference.ConnectRequest) -> None:
        self._outbox.append(message)
        self._outbox_filled.set()

    def _send(self, live: Live) -> None:
        self._live[live.wire_id] = live
        self._put(inference.ConnectRequest(generate=live.request))

    def _deliver(self, response: inference.ConnectResponse) -> None:
        """Hands one step's events to their requests. The hot path: once per step, a few operations per token."""
        live_by_id = self._live
        for event in response.events:
            live = live_by_id.get(event.request_id)
            if live is None:
                continue  # aborted here, and the abort is still on its way
            if event.HasField("error"):
                self._on_error(live, from_proto(event.error))
                continue
            if event.sequence in live.ended:
                continue  # the same, of one of its sequences
            live.on_event(event)
            if event.finish_reason:
                if live.over:
                    self._forget(live)
                if event.finish_reason == pb.FINISH_REASON_ABORT:
                    live.submission.fail(Aborted("the request was aborted at the scheduler"))
                    continue
            live.submission.put(live.index + event.sequence, event)

    def _on_error(self, live: Live, error: TriptychError) -> None:
        if live.accepted and isinstance(error, Unavailable | Overloaded):
            # It has run before: the scheduler is new and has no replica yet, or lost its last one.
            self._mark_lost(live)
            pause = error.retry_after_ms / 1000 or _RESUBMIT_PAUSE_S
            live.retry = asyncio.get_running_loop().call_later(pause, self._retry, live)
        else:
            self._forget(live)
            live.submission.fail(error)

    def _retry(self, live: Live) -> None:
        live.retry = None
        # Without a connection there is nothing to do: the next session sends all live requests.
        if self.connected and live.wire_id in self._live:
            self._resubmit(live)

    def _resubmit(self, live: Live) -> None:
        """Sends a request again, under a new id: the old one may still be known to a scheduler that has not noticed the loss."""
        if live.retry is not None:
            live.retry.cancel()
            live.retry = None
        live.accepted = True
        for sequence, received in enumerate(live.received):
            if sequence in live.ended:
                continue
            ended = finished_already(live.request, sequence, received, self._eos_token_ids)
            if ended is not None:
                live.ended.add(sequence)
                live.submission.put(live.index + sequence, ended)
        del self._live[live.wire_id]
        if live.over:
            live.stop_timers()
            return
        live.renew()
        self._send(live)

    def _mark_lost(self, live: Live) -> None:
        if live.deadline is None:
            rest = self._resume_timeout_s if live.patience is None else live.patience
            live.deadline = asyncio.get_running_loop().call_later(rest, self._give_up, live)

    def _give_up(self, live: Live) -> None:
        live.submission.fail(
            Unavailable(
                f"the request was interrupted and could not be resumed within {self._resume_timeout_s:g} s"
            )
        )

    def _forget(self, live: Live) -> None:
        if self._live.pop(live.wire_id, None) is not None:
            live.stop_timers()

    def _abort(self, live: Live, sequence: int | None = None) -> None:
        """Drops a request, or one of its sequences; tells the scheduler if it may still be running there."""
        if self._live.get(live.wire_id) is not live:
            return
        abort = inference.AbortRequest(request_id=live.wire_id)
        if sequence is not None:
            if sequence in live.ended:
                return
            live.ended.add(sequence)
        if sequence is None or live.over:
            self._forget(live)
        else:
            abort.sequence = sequence
        if self.connected:
            self._put(inference.ConnectRequest(abort=abort))
