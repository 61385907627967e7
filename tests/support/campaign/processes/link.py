"""A TCP link between two services, which a test cuts, silences and slows."""

import asyncio
import contextlib
import socket
import struct
from typing import Final

_PIECE_BYTES: Final = 65536
# Closing a socket that lingers for 0 s sends a reset.
_NO_LINGER: Final = struct.pack("ii", 1, 0)


class Link:
    """Forwards connections to one address."""

    host: str
    """Where it listens."""
    port: int
    """Where it listens; set by :meth:`open`."""

    def __init__(self, target: tuple[str, int], host: str = "127.0.0.1", port: int = 0) -> None:
        """Prepares a link."""
        self._target = target
        self.host, self.port = host, port
        self._delay_s = 0.0
        self._forwards = asyncio.Event()
        self._forwards.set()
        self._connections: set[asyncio.Task[None]] = set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server | None = None

    async def open(self) -> None:
        """Starts to listen."""
        self._server = await asyncio.start_server(self._accept, self.host, self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        """Resets all connections and stops listening."""
        if self._server is not None:
            self._server.close()
        connections = tuple(self._connections)
        for connection in connections:
            connection.cancel()
        await asyncio.gather(*connections, return_exceptions=True)

    def cut(self) -> None:
        """Resets all connections. New ones are accepted at once."""
        for writer in self._writers:
            _reset(writer)

    def silence(self) -> None:
        """Forwards nothing any more, not even the end of a connection: the link is half-open."""
        self._forwards.clear()

    def restore(self) -> None:
        """Forwards again, first what arrived while the link was silent."""
        self._forwards.set()

    def slow(self, delay_s: float) -> None:
        """Lets each piece of data wait for `delay_s` seconds, and the pieces behind it, too; 0: no more."""
        self._delay_s = delay_s

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = asyncio.current_task()
        assert connection is not None
        self._connections.add(connection)
        self._writers.add(writer)
        try:
            await self._forwards.wait()
            their_reader, their_writer = await asyncio.open_connection(*self._target)
            self._writers.add(their_writer)
            try:
                async with asyncio.TaskGroup() as group:
                    group.create_task(self._forward(reader, their_writer))
                    group.create_task(self._forward(their_reader, writer))
            finally:
                self._writers.discard(their_writer)
                _reset(their_writer)
        except (OSError, ExceptionGroup):
            pass  # reset by a peer or by `cut`: the other side is reset below
        finally:
            self._connections.discard(connection)
            self._writers.discard(writer)
            _reset(writer)

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while piece := await reader.read(_PIECE_BYTES):
            if self._delay_s:
                await asyncio.sleep(self._delay_s)
            await self._forwards.wait()
            writer.write(piece)
            await writer.drain()
        await self._forwards.wait()
        writer.write_eof()


def _reset(writer: asyncio.StreamWriter) -> None:
    end: socket.socket | None = writer.get_extra_info("socket")
    if end is not None:
        with contextlib.suppress(OSError):  # it is closed already
            end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
    writer.transport.abort()
