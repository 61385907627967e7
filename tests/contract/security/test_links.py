"""Secured servers and channels: what gets through, what is refused, and files that change meanwhile."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from structlog.testing import capture_logs

from protos.errors import Unauthenticated, from_rpc_error
from protos.service import channels
from protos.service.channels import PLAIN, LinkSecurity
from protos.service.grpc_options import unix_address
from protos.service.server import Server
from protos.service.tls import Certificates, Expiries
from protos.service.tokens import ServiceTokens
from protos.triptych.v1 import (
    inference_pb2,
    inference_pb2_grpc,
    registry_pb2,
    registry_pb2_grpc,
    worker_pb2,
    worker_pb2_grpc,
)
from tests.support.security.certificates import OTHER_TOKEN, TOKEN, service_files
from tests.support.waiting import until

pytestmark = pytest.mark.contract

METHODS = [
    f"/{service.full_name}/{method.name}"
    for module in (inference_pb2, registry_pb2, worker_pb2)
    for service in module.DESCRIPTOR.services_by_name.values()
    for method in service.methods
]


def tls(folder: Path, *, mutual: bool = True, alone: bool = False, **files: Any) -> LinkSecurity:
    """Returns a security with new files, as `service_files` writes them, or with the CA ``alone``."""
    paths = service_files(folder, **files)
    certificates = Certificates(type(paths)(paths.ca) if alone else paths)
    return LinkSecurity(certificates, require_client_cert=mutual)


def with_token(token: str = TOKEN) -> LinkSecurity:
    return LinkSecurity(tokens=ServiceTokens(token=token))


@contextlib.asynccontextmanager
async def serving(security: LinkSecurity, path: Path | None = None) -> AsyncIterator[str]:
    """Runs a server with all services, whose methods are not implemented; yields its address."""

    def register(server: grpc.aio.Server) -> None:
        for module, name in (
            (inference_pb2_grpc, "Inference"),
            (registry_pb2_grpc, "WorkerRegistry"),
            (worker_pb2_grpc, "Worker"),
        ):
            getattr(module, f"add_{name}Servicer_to_server")(getattr(module, f"{name}Servicer")(), server)

    server = Server((), register, security=security)
    port = await server.start("127.0.0.1", 0, path)
    await server.set_serving(True)
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


async def code_of(client: LinkSecurity, address: str, method: str = METHODS[0]) -> grpc.StatusCode:
    """Returns the status of a call; UNIMPLEMENTED means that it got through."""
    async with client.open_channel(address) as channel:
        return (await failed(channel, method)).code()


async def failed(channel: Any, method: str = METHODS[0]) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await channel.unary_unary(method)(b"", timeout=10)
    return caught.value


async def test_every_method_needs_the_token_and_a_health_check_does_not() -> None:
    """A new method is protected without further ado; a check needs no secret, a watch does."""
    assert len(METHODS) > 20
    async with serving(with_token()) as address:
        for method in METHODS:
            assert await code_of(PLAIN, address, method) is grpc.StatusCode.UNAUTHENTICATED, method
            assert await code_of(with_token(OTHER_TOKEN), address, method) is grpc.StatusCode.UNAUTHENTICATED
            assert await code_of(with_token(), address, method) is not grpc.StatusCode.UNAUTHENTICATED, method
        async with PLAIN.open_channel(address) as channel:
            health: Any = health_pb2_grpc.HealthStub(channel)
            await health.Check(health_pb2.HealthCheckRequest())
            with pytest.raises(
                grpc.aio.AioRpcError, match="no service token"
            ):  # it would take a place of a call
                await health.Watch(health_pb2.HealthCheckRequest(), timeout=10).read()


async def test_a_socket_needs_the_token_too_and_others_cannot_open_it(tmp_path: Path) -> None:
    """TLS ends at ports; a socket's file is closed to other users."""
    path = tmp_path / "s.sock"
    security = LinkSecurity(tls(tmp_path / "files").certificates, ServiceTokens(token=TOKEN))
    async with serving(security, path):
        assert path.stat().st_mode & 0o007 == 0
        assert await code_of(PLAIN, unix_address(path)) is grpc.StatusCode.UNAUTHENTICATED
        assert await code_of(security, unix_address(path)) is grpc.StatusCode.UNIMPLEMENTED


async def test_streams_carry_the_token() -> None:
    async with serving(with_token()) as address, with_token().open_channel(address) as channel:
        kinds: tuple[Any, ...] = (
            channel.unary_unary,
            channel.unary_stream,
            channel.stream_unary,
            channel.stream_stream,
        )
        for kind in kinds:
            call: Any = kind(METHODS[0])(b"" if kind in kinds[:2] else iter([b""]))
            assert await call.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_a_refused_call_is_logged_by_both_sides_without_tokens() -> None:
    """The client's error says what to set; the server's log names peer and method, and does not fill up."""
    with capture_logs() as logs:
        async with serving(with_token()) as address, with_token(OTHER_TOKEN).open_channel(address) as channel:
            error = from_rpc_error(await failed(channel))
            for _ in range(2):
                await failed(channel)
    assert isinstance(error, Unauthenticated)
    assert "another service token; set --service-token-file" in error.message
    (line,) = (entry for entry in logs if entry["event"] == "call_refused")
    assert (line["method"], line["reason"]) == (METHODS[0], "the call has another service token")
    assert TOKEN not in f"{logs}{error}"
    assert OTHER_TOKEN not in f"{logs}{error}"


@pytest.mark.parametrize(
    ("server", "client", "reason"),
    [
        ({}, {}, ""),
        ({"mutual": False}, {}, ""),
        ({}, {"trusts": "foreign"}, "certificate is not accepted"),
        ({"signed_by": "foreign"}, {}, "certificate is not accepted"),
        ({"days": -1}, {}, "certificate is not accepted"),
        ({"hosts": ("elsewhere",)}, {}, "certificate is not accepted"),
        ({}, {"signed_by": "foreign"}, "does it want a client certificate"),
        ({}, {"days": -1}, "does it want a client certificate"),
        ({"mutual": False}, {"alone": True}, ""),
        ({}, {"alone": True}, "does it want a client certificate"),
        ({}, None, "does it use TLS"),
        (None, {}, "does not use TLS"),
    ],
)
async def test_tls_lets_in_those_with_good_certificates(
    server: dict[str, Any] | None,
    client: dict[str, Any] | None,
    reason: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Either side refuses foreign CAs, expired certificates and plain peers; the client logs the reason."""
    # No service starts with an expired certificate, but one can end while its service runs.
    monkeypatch.setattr(Expiries, "note", lambda *_: None)
    ours = PLAIN if server is None else tls(tmp_path / "server", **server)
    theirs = PLAIN if client is None else tls(tmp_path / "client", **client)
    async with serving(ours) as address:
        code = await code_of(theirs, address)
        assert code is (grpc.StatusCode.UNAVAILABLE if reason else grpc.StatusCode.UNIMPLEMENTED)
        if reason:
            assert reason in await refusal(theirs, address)


async def refusal(client: LinkSecurity, address: str) -> str:
    """Returns what a client logs that waits for a server which refuses it."""
    async with client.open_channel(address) as channel:
        with capture_logs() as logs:
            ready = asyncio.ensure_future(channels.wait_until_ready(channel, address))
            await until(lambda: logs)
            ready.cancel()
    assert (logs[0]["event"], logs[0]["address"]) == ("not_connected", address)
    return str(logs[0]["reason"])


async def test_certificates_rotate_while_a_stream_goes_on(tmp_path: Path) -> None:
    """Server and client move to another CA: the open stream stays, new calls use the new files."""
    server, client = tls(tmp_path / "server"), tls(tmp_path / "client")
    async with serving(server) as address, client.open_channel(address) as channel:
        health: Any = health_pb2_grpc.HealthStub(channel)
        watch = health.Watch(health_pb2.HealthCheckRequest())
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        old_client = tls(tmp_path / "old")
        service_files(tmp_path / "server", signed_by="next", trusts="next")
        assert await code_of(old_client, address) is grpc.StatusCode.UNAVAILABLE
        service_files(tmp_path / "client", signed_by="next", trusts="next")
        await health.Check(health_pb2.HealthCheckRequest(), timeout=10)
        assert not watch.done()
        await channel.close()
        assert await watch.code() is grpc.StatusCode.CANCELLED


async def test_waiting_for_a_peer_ends_when_its_ca_arrives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client that waits with the wrong CA goes on with the right one, without a restart."""
    monkeypatch.setattr(channels, "_LOOK_EVERY_S", 0.05)
    client = tls(tmp_path / "client", trusts="foreign")
    async with serving(tls(tmp_path / "server")) as address, client.open_channel(address) as channel:
        ready = asyncio.ensure_future(channels.wait_until_ready(channel, address))
        with capture_logs() as logs:
            await until(lambda: logs)
        service_files(tmp_path / "client")
        async with asyncio.timeout(10):
            await ready


async def test_bad_files_do_not_replace_good_ones(tmp_path: Path) -> None:
    """Half of a new pair is not used, and the log says so once."""
    server, client = tls(tmp_path / "server"), tls(tmp_path / "client")
    async with serving(server) as address:
        (tmp_path / "server" / "key.pem").write_bytes(b"half")
        with capture_logs() as logs:
            for _ in range(2):
                assert await code_of(client, address) is grpc.StatusCode.UNIMPLEMENTED
    assert [entry["event"] for entry in logs] == ["files_not_reloaded"]


async def test_tokens_rotate_without_a_restart(tmp_path: Path) -> None:
    """A server accepts all lines of its file, a client sends the first; both read a changed file."""
    files = [tmp_path / name for name in ("server", "client")]
    for file in files:
        file.write_text(f"{TOKEN}\n")
    server, client = (LinkSecurity(tokens=ServiceTokens(file=file)) for file in files)
    async with serving(server) as address:
        files[0].write_text(f"# next\n{OTHER_TOKEN}\n\n{TOKEN}\n")
        assert await code_of(client, address) is grpc.StatusCode.UNIMPLEMENTED
        files[1].write_text(f"{OTHER_TOKEN}\n")
        assert await code_of(client, address) is grpc.StatusCode.UNIMPLEMENTED
        files[0].write_text(f"{OTHER_TOKEN}\n")
        assert await code_of(client, address) is grpc.StatusCode.UNIMPLEMENTED
        assert await code_of(with_token(), address) is grpc.StatusCode.UNAUTHENTICATED


@pytest.mark.parametrize(
    ("host", "security", "lacking"),
    [
        ("127.0.0.1", PLAIN, ()),
        ("localhost", PLAIN, ()),
        ("0.0.0.0", PLAIN, ("every client", "can read")),
        ("10.0.0.1", with_token(), ("can read",)),
    ],
)
def test_an_open_port_is_warned_of_once(host: str, security: LinkSecurity, lacking: tuple[str, ...]) -> None:
    with capture_logs() as logs:
        security.warn_if_open(host)
    assert len(logs) == bool(lacking)
    assert all(part in logs[0]["reason"] for part in lacking)
