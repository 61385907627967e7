"""The Connect stream: opened, written, read, and opened again when it breaks."""

import asyncio
import contextlib
import math
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

import grpc.aio

from gateway.scheduler_client.in_flight import InFlightRequests, Outbox, jittered
from protos.errors import (
    SchemaMismatch,
    TriptychError,
    Unauthenticated,
    Unavailable,
    Unimplemented,
    from_rpc_error,
)
from protos.service.channels import wait_until_ready
from protos.service.grpc_options import SCHEMA_REVISION
from protos.service.logs import get_logger
from protos.triptych.v1 import inference_pb2 as inference

if TYPE_CHECKING:
    # Exists for type checkers only.
    from protos.triptych.v1.inference_pb2_grpc import InferenceAsyncStub

# Pauses between attempts to open the stream, seconds: doubled from the first up to the longest.
_FIRST_PAUSE_S: Final = 0.1
_LONGEST_PAUSE_S: Final = 2.0

# A message has waited for the gateway if it comes within this part of the time that the one before it took.
_WAITED_PART: Final = 0.25

# `Unimplemented` comes from another service.
_REFUSALS: Final = (Unauthenticated, SchemaMismatch, Unimplemented)

_HELLO: Final = inference.ConnectRequest(schema_revision=SCHEMA_REVISION)


class Connection:
    """Keeps an ``Inference.Connect`` stream open, and resubmits the table's requests on each new stream."""

    down: TriptychError
    """Why no stream was open the last time; meaningless during a stream."""

    def __init__(
        self,
        address: str,
        outbox: Outbox,
        table: InFlightRequests,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Prepares the connection; :meth:`run` opens it.

        Args:
            address: the scheduler's, ``host:port`` or ``unix:path``.
            outbox: holds messages for the scheduler.
            table: the requests under way.
            clock: monotonic seconds.
        """
        self.down = Unavailable(f"the scheduler at {address} has not been reached yet")
        self._outbox = outbox
        self._table = table
        self._clock = clock
        self._closed_s = -math.inf
        self._address = address
        self._refusal = ""
        self._on_open: list[Callable[[], None]] = []
        self._log = get_logger(scheduler=address)

    def last_open_s(self) -> float:
        """Returns the time of the last open stream, on `clock`; minus infinity before the first."""
        return self._clock() if self._outbox.is_open else self._closed_s

    def on_open(self, callback: Callable[[], None]) -> None:
        """Calls ``callback`` at each opening of a stream."""
        self._on_open.append(callback)

    async def run(self, channel: grpc.aio.Channel, stub: "InferenceAsyncStub") -> None:
        """Opens stream after stream until it is cancelled."""
        pause = _FIRST_PAUSE_S
        while True:
            began = self._clock()
            error = await self._session(channel, stub)
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                # grpc.aio loses a cancellation when the stream breaks at the same moment.
                raise asyncio.CancelledError
            was_open = self._outbox.is_open
            self._outbox.close()
            self.down = error
            if was_open:
                self._closed_s = self._clock()
                self._log.warning("connection lost", error=str(error), pending=len(self._table))
            self._log_refusal(error)
            if self._clock() - began > _LONGEST_PAUSE_S:
                pause = _FIRST_PAUSE_S
            self._table.mark_all_lost()
            await asyncio.sleep(jittered(pause))
            pause = min(2 * pause, _LONGEST_PAUSE_S)

    def _log_refusal(self, error: TriptychError) -> None:
        """Logs once that the scheduler wants another service token or another release."""
        refusal = error.message if isinstance(error, _REFUSALS) else ""
        if refusal and refusal != self._refusal:
            self._log.error("refused", reason=refusal, retry="until it succeeds")
        self._refusal = refusal

    async def _session(self, channel: grpc.aio.Channel, stub: "InferenceAsyncStub") -> TriptychError:
        """Runs a stream to its end; returns the reason."""
        writer = None
        call = None
        try:
            # A stream opened on a dead channel fails only after its first write. A ready channel has a
            # scheduler.
            await wait_until_ready(channel, self._address)
            call = stub.Connect()
            await call.write(_HELLO)
            self._outbox.open()
            self._table.resubmit_all()
            writer = asyncio.create_task(self._write(call), name="inference-write")
            self._log.info("connected", resubmitted=len(self._table))
            for callback in self._on_open:
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

    async def _deliver(self, call: grpc.aio.StreamStreamCall) -> None:  # type: ignore[type-arg]
        """Hands the stream's messages to the table, until the stream ends."""
        began = ended = time.perf_counter()
        async for response in call:
            # A message that came at once has waited, if reading took a part of the time that writing did.
            busy_s, now = ended - began, time.perf_counter()
            more_waits, began = now - ended < _WAITED_PART * busy_s, now
            self._table.deliver(response, more_waits=more_waits)
            ended = time.perf_counter()

    async def _write(self, call: grpc.aio.StreamStreamCall) -> None:  # type: ignore[type-arg]
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
