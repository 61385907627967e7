"""The gRPC server's addresses: Unix sockets beside ports."""

import asyncio
import socket
from pathlib import Path

import pytest

from deploy import healthcheck
from protos.errors import ConfigurationRefused
from protos.service.grpc_options import unix_address
from protos.service.server import Server


def make() -> Server:
    return Server(("triptych.v1.Worker",), lambda _: None)


async def health(path: Path) -> int:
    return await asyncio.to_thread(healthcheck.main, [unix_address(path)])


async def test_a_server_listens_on_a_unix_socket_too(tmp_path: Path) -> None:
    """Any file name will do, and a socket that a dead process left is replaced."""
    path = tmp_path / "a socket #1%20?.sock"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
    server = make()
    assert await server.start("127.0.0.1", 0, path) > 0
    await server.set_serving(True)
    assert await health(path) == 0
    await server.stop(0)
    assert await health(path) == 1


async def test_a_socket_in_use_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "s.sock"
    first = make()
    await first.start("127.0.0.1", 0, path)
    await first.set_serving(True)
    with pytest.raises(ConfigurationRefused, match="another process listens on it"):
        await make().start("127.0.0.1", 0, path)
    assert await health(path) == 0
    await first.stop(0)


async def test_a_path_that_cannot_be_a_socket_is_refused(tmp_path: Path) -> None:
    """A file is not removed, and the message says what is wrong."""
    file = tmp_path / "notes.txt"
    file.write_text("keep me")
    for path, reason in (
        (file, "the path is a file"),
        (tmp_path / ("x" * 200), "more than 107 bytes"),
        (tmp_path / "missing" / "s.sock", "No such file or directory"),
    ):
        with pytest.raises(ConfigurationRefused, match=reason):
            await make().start("127.0.0.1", 0, path)
    assert file.read_text() == "keep me"
