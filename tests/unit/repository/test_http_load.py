"""The client processes of the benches of served loads, against a small HTTP server."""

import asyncio
import json
import threading
from collections.abc import Iterator
from typing import Final

import pytest

from tests.bench.support.http_load import Load, step_seconds, tokens_per_second

_GAP_S: Final = 0.01


class Server:
    """Answers completions with a token every `_GAP_S`, and keeps their prompts."""

    def __init__(self) -> None:
        self.prompts: list[tuple[int, ...]] = []
        self.breaks_off = False
        self.port = 0
        self.listening = threading.Event()

    async def run(self) -> None:
        """Listens on a free port until `stop`."""
        self._loop, self._stopped = asyncio.get_running_loop(), asyncio.Event()
        server = await asyncio.start_server(self._answer, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        self.listening.set()
        await self._stopped.wait()
        server.close()

    def stop(self) -> None:
        """Ends `run`; safe on any thread."""
        self._loop.call_soon_threadsafe(self._stopped.set)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                (length,) = (
                    line[15:] for line in head.split(b"\r\n") if line.lower().startswith(b"content-length")
                )
                body = json.loads(await reader.readexactly(int(length)))
                self.prompts.append(tuple(body["prompt"]))
                writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
                for piece in [*["data: {}\n\n"] * body["max_tokens"], "data: [DONE]\n\n"]:
                    writer.write(f"{len(piece):x}\r\n{piece}\r\n".encode())
                    await writer.drain()
                    await asyncio.sleep(_GAP_S)
                    if self.breaks_off:
                        break
                writer.write(b"0\r\n\r\n")
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()


@pytest.fixture
def server() -> Iterator[Server]:
    """A server in a thread."""
    server = Server()
    thread = threading.Thread(target=lambda: asyncio.run(server.run()))
    thread.start()
    assert server.listening.wait(60)
    yield server
    server.stop()
    thread.join()


def load(server: Server, tokens: int) -> Load:
    return Load(f"http://127.0.0.1:{server.port}", "m", 1000, prompt_tokens=3, output_tokens=tokens)


def test_each_stream_requests_one_answer_at_the_same_time(server: Server) -> None:
    """A step is the time in which each of the streams, spread over two processes, gets a token."""
    seconds = step_seconds(load(server, 50), streams=3, clients=2)
    assert 0.9 * _GAP_S < seconds < 20 * _GAP_S  # the machine may be busy
    assert len(set(server.prompts)) == 3


def test_calls_share_no_prompt(server: Server) -> None:
    """A prefix cache finds nothing of an earlier call."""
    for _ in range(2):
        step_seconds(load(server, 50), streams=2, clients=2)
    assert len(set(server.prompts)) == 4


def test_an_answer_that_breaks_off_is_an_error(server: Server) -> None:
    """A bench must not count it as a good one."""
    server.breaks_off = True
    with pytest.raises(RuntimeError, match="broke off after 1 chunks"):
        step_seconds(load(server, 50), streams=1, clients=1)


def test_a_closed_loop_requests_again_until_its_end(server: Server) -> None:
    """The rate counts all streams after the warm-up."""
    rate = tokens_per_second(load(server, 10), streams=2, warm_up_s=0.3, seconds=0.5, clients=2)
    assert 2 / (20 * _GAP_S) < rate < 2 / (0.9 * _GAP_S)
    assert len(server.prompts) > 2
