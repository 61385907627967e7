"""Checks a service's health from inside its container: `triptych healthcheck ADDRESS [SERVICE]`.

ADDRESS is an HTTP or HTTPS URL, or `host:port` or `unix:PATH` of a gRPC server. SERVICE names a gRPC
service; without it the check covers the whole server. `TRIPTYCH_GRPC_TLS_*` say how gRPC servers are reached,
as for the services.
"""

import contextlib
import os
import socket
import ssl
import sys
from functools import partial
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from pathlib import Path
from urllib.parse import urlsplit

_TIMEOUT_S = 3.0


def main(argv: list[str]) -> int:
    """Checks once; returns 0 if healthy, 1 if not, 2 for wrong arguments."""
    match argv:
        case [str(url)] if url.startswith(("http://", "https://")):
            problem = check_http(url, demands_certificate=os.environ.get("TRIPTYCH_SSL_CERT_REQS") == "2")
        case [str(address)]:
            problem = check_grpc(address, "")
        case [str(address), str(service)]:
            problem = check_grpc(address, service)
        case _:
            print(__doc__, file=sys.stderr)
            return 2
    if problem:
        print(problem)
    return int(bool(problem))


def check_http(url: str, *, uds: Path | None = None, demands_certificate: bool = False) -> str:
    """Returns the fault of a URL of this machine, whatever its certificate; empty if it answers 200.

    The server may be on a Unix socket. One that demands a client certificate is healthy if it refuses this
    client: it listens.
    """
    # Nothing secret is sent that another server could steal.
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    parts = urlsplit(url)
    secure = parts.scheme == "https"
    kind = partial(HTTPSConnection, context=context) if secure else HTTPConnection
    try:
        with contextlib.closing(kind(parts.netloc, timeout=_TIMEOUT_S)) as connection:
            if uds is not None:
                connection.sock = socket.socket(socket.AF_UNIX)
                connection.sock.settimeout(_TIMEOUT_S)
                connection.sock.connect(str(uds))
                if secure:
                    connection.sock = context.wrap_socket(connection.sock)
            connection.request("GET", parts.path or "/")
            status = connection.getresponse().status
            return "" if status == HTTPStatus.OK else f"{url}: {status}"
    except (OSError, HTTPException) as error:
        # The server's alert may be lost when it closes the connection.
        refused = isinstance(error, ssl.SSLError | ConnectionResetError)
        return "" if demands_certificate and refused else f"{url}: {error}"


def check_grpc(address: str, service: str) -> str:
    """Returns the fault of a gRPC service; empty if it reports SERVING."""
    import grpc  # checks of URLs need no gRPC
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    if os.environ.get("TRIPTYCH_GRPC_TLS_CA"):
        # Imported late: a check runs every few seconds, and without TLS it needs no settings.
        from protos.service.common_settings import CallSecuritySettings

        opened = CallSecuritySettings().link_security().open_blocking_channel(address)
    else:
        opened = grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)])
    with opened as channel:
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(  # type: ignore[attr-defined]
                health_pb2.HealthCheckRequest(service=service), timeout=_TIMEOUT_S
            )
        except grpc.RpcError as error:
            details = getattr(error, "details", None)
            return f"{address}: {details() if details else error}"
    status = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
    return "" if status == "SERVING" else f"{address}: {status}"
