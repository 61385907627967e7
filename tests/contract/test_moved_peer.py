"""gRPC channels follow a peer that moves to another address."""

import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from protos.service.grpc_options import CHANNEL_OPTIONS


class _NameServer:
    """Answers every query for an IPv4 address with one address."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind(("127.0.0.1", 0))
        self.port: int = self._socket.getsockname()[1]
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            query, client = self._socket.recvfrom(512)
            if not query:
                return
            end = query.index(b"\0", 12) + 5  # the name, its type and class
            has = query[end - 4 : end - 2] == b"\0\1"
            header = query[:2] + b"\x81\x80\0\1" + bytes([0, has]) + bytes(4)
            found = b"\xc0\x0c\0\1\0\1" + bytes(4) + b"\0\4" + socket.inet_aton(self.address)
            self._socket.sendto(header + query[12:end] + (found if has else b""), client)

    def close(self) -> None:
        """Stops the thread."""
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as last:
            last.sendto(b"", ("127.0.0.1", self.port))
        self._thread.join()
        self._socket.close()


@pytest.fixture
def names() -> Iterator[_NameServer]:
    """A name server of our own."""
    server = _NameServer("127.0.0.1")
    yield server
    server.close()


def _serve(address: str) -> tuple[grpc.Server, int]:
    server = grpc.server(ThreadPoolExecutor(1))
    health_pb2_grpc.add_HealthServicer_to_server(health.HealthServicer(), server)
    port = server.add_insecure_port(address)
    server.start()
    return server, port


def test_a_channel_finds_a_peer_that_is_back_at_another_address(names: _NameServer) -> None:
    """So does a container that is made anew: gRPC by itself asks for a name again after 30 s."""
    first, port = _serve("127.0.0.1:0")
    target = f"dns://127.0.0.1:{names.port}/scheduler:{port}"
    with grpc.insecure_channel(target, options=CHANNEL_OPTIONS) as channel:
        check = health_pb2_grpc.HealthStub(channel).Check  # type: ignore[attr-defined]
        check(health_pb2.HealthCheckRequest(), timeout=10)
        first.stop(None).wait()
        with pytest.raises(grpc.RpcError):
            check(health_pb2.HealthCheckRequest(), timeout=10)
        names.address = "127.0.0.2"
        second, _ = _serve(f"127.0.0.2:{port}")
        start = time.monotonic()
        check(health_pb2.HealthCheckRequest(), timeout=40, wait_for_ready=True)
        assert time.monotonic() - start < 10
        second.stop(None).wait()
