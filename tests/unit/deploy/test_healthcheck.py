"""The health check that containers run."""

import asyncio
import functools
import http.server
import socket
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from deploy import healthcheck
from protos.service.channels import LinkSecurity
from protos.service.server import Server
from protos.service.tls import Certificates
from protos.service.tokens import ServiceTokens
from tests.support.security.certificates import TOKEN, service_files


async def check(*arguments: str) -> int:
    return await asyncio.to_thread(healthcheck.main, list(arguments))


async def test_a_grpc_service_is_healthy_when_it_reports_serving(capsys: pytest.CaptureFixture[str]) -> None:
    """The exit code follows the reported health, of the server and of each service; the reason is printed."""
    server = Server(("triptych.v1.Worker",), lambda _: None)
    address = f"127.0.0.1:{await server.start('127.0.0.1', 0)}"
    assert await check(address) == 1
    assert "NOT_SERVING" in capsys.readouterr().out
    await server.set_serving(True)
    assert await check(address) == 0
    assert await check(address, "triptych.v1.Worker") == 0
    assert await check(address, "triptych.v1.Nothing") == 1
    await server.stop(0)
    assert await check(address) == 1


async def test_a_grpc_service_with_tls_is_checked_with_the_variables_of_the_services(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check shows the service's own certificate; it needs no token."""
    paths = service_files(tmp_path, hosts=("triptych.internal",))
    security = LinkSecurity(Certificates(paths), ServiceTokens(token=TOKEN), require_client_cert=True)
    server = Server((), lambda _: None, security=security)
    address = f"127.0.0.1:{await server.start('127.0.0.1', 0)}"
    await server.set_serving(True)
    assert await check(address) == 1
    for name, value in (("CA", paths.ca), ("CERT", paths.cert), ("KEY", paths.key)):
        monkeypatch.setenv(f"TRIPTYCH_GRPC_TLS_{name}", str(value))
    monkeypatch.setenv("TRIPTYCH_GRPC_TLS_NAME", "triptych.internal")
    assert await check(address) == 0
    await server.stop(0)


@pytest.mark.parametrize("clients", [ssl.CERT_NONE, ssl.CERT_REQUIRED])
async def test_a_gateway_with_https_is_healthy_whatever_the_certificates(
    tmp_path: Path, clients: ssl.VerifyMode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check uses another name than clients, and has no certificate for a gateway that asks for one."""
    monkeypatch.setenv("TRIPTYCH_SSL_CERT_REQS", str(int(clients)))
    paths = service_files(tmp_path, hosts=("api.example",))
    assert paths.cert is not None
    with http.server.HTTPServer(("127.0.0.1", 0), functools.partial(Handler, 200)) as server:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(paths.cert, paths.key)
        context.load_verify_locations(paths.ca)
        context.verify_mode = clients
        server.socket = context.wrap_socket(server.socket, server_side=True)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        assert await check(f"https://127.0.0.1:{server.server_port}/health") == 0
        server.shutdown()


class UnixServer(http.server.HTTPServer):
    address_family = socket.AF_UNIX

    def server_bind(self) -> None:
        self.socket.bind(self.server_address)

    def get_request(self) -> tuple[socket.socket, Any]:
        return self.socket.accept()[0], ("", 0)


@pytest.mark.parametrize("code", [200, 503])
async def test_a_gateway_on_a_unix_socket_is_asked_there(code: int, tmp_path: Path) -> None:
    """The launcher asks it; a status other than 200 is a fault."""
    path: Any = str(tmp_path / "http.sock")
    ask = functools.partial(healthcheck.check_http, "http://localhost/health", uds=Path(path))
    assert "No such file" in await asyncio.to_thread(ask)
    with UnixServer(path, functools.partial(Handler, code)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        found = await asyncio.to_thread(ask)
        assert found == ("" if code == 200 else "http://localhost/health: 503")
        server.shutdown()


class Handler(http.server.BaseHTTPRequestHandler):
    def __init__(self, code: int, *arguments: object) -> None:
        self.code = code
        super().__init__(*arguments)  # type: ignore[arg-type]

    def do_GET(self) -> None:
        self.send_response(self.code)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def answers(request: pytest.FixtureRequest) -> Iterator[str]:
    """The URL of a server that answers every request with the same status."""
    handler = functools.partial(Handler, request.param)
    with http.server.HTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/health"
        server.shutdown()


@pytest.mark.parametrize(("answers", "code"), [(200, 0), (503, 1), (404, 1)], indirect=["answers"])
async def test_a_gateway_is_healthy_when_it_answers_200(answers: str, code: int) -> None:
    assert await check(answers) == code


async def test_missing_arguments_are_refused() -> None:
    """Without an address the command prints its usage and exits with 2."""
    assert await check() == 2
