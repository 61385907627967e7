"""Messages that wait to be written to the Connect stream."""

import asyncio
from collections import deque

from protos.triptych.v1 import inference_pb2 as inference


class Outbox:
    """A queue of messages for the scheduler. While no stream is open, it drops what is put into it."""

    __slots__ = ("_filled", "_messages", "is_open")

    is_open: bool
    """Whether a stream to a scheduler is open."""

    def __init__(self) -> None:
        self.is_open = False
        self._messages: deque[inference.ConnectRequest] = deque()
        self._filled = asyncio.Event()

    def open(self) -> None:
        """Starts empty: messages for an earlier stream are void."""
        self._messages.clear()
        self.is_open = True

    def close(self) -> None:
        """Drops messages from now on."""
        self.is_open = False

    def put(self, message: inference.ConnectRequest) -> None:
        """Appends ``message``, which the writer of the open stream sends soon."""
        if self.is_open:
            self._messages.append(message)
            self._filled.set()

    async def take(self) -> inference.ConnectRequest:
        """Waits for the oldest message and removes it."""
        while not self._messages:
            self._filled.clear()
            await self._filled.wait()
        return self._messages.popleft()
