"""Where the server is, who asks, and how its errors read in one line."""

import argparse
import json
import os
import resource
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx

DEFAULT_URL: Final = "http://localhost:8000/v1"
_CONNECT_TIMEOUT_S: Final = 10.0
_OK: Final = 200


class ClientError(Exception):
    """A command cannot go on; the message is one line for people."""

    exit_code: int = 1


class FlagError(ClientError):
    """A flag, or the variable that stands in for it, has a value that cannot be used."""

    exit_code = 2


@dataclass(frozen=True)
class Connection:
    """How to reach a server."""

    url: str
    """Without /v1 at its end."""
    api_key: str = ""
    verify: ssl.SSLContext | bool = False
    """What to check the server's certificate with; True: the usual certificates; False: there is no TLS."""
    uds: Path | None = None
    """The server's Unix socket, if it listens on no port."""

    def client(self) -> httpx.Client:
        """Returns a client that waits for answers as long as they take.

        Raises:
            ClientError: a variable names a proxy that cannot be used.
        """
        transport = None if self.uds is None else httpx.HTTPTransport(uds=str(self.uds))
        try:
            return httpx.Client(transport=transport, **self._options())
        except (ValueError, ImportError) as error:
            raise ClientError(f"{error}; change HTTP_PROXY, HTTPS_PROXY or ALL_PROXY") from error

    def async_client(self) -> httpx.AsyncClient:
        """Returns the same for asyncio, with any number of connections; `client` checks the proxies."""
        transport = None if self.uds is None else httpx.AsyncHTTPTransport(uds=str(self.uds))
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        return httpx.AsyncClient(transport=transport, limits=limits, **self._options())

    def _options(self) -> dict[str, Any]:
        return {
            "base_url": self.url,
            "headers": {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {},
            "verify": self.verify,
            "timeout": httpx.Timeout(None, connect=_CONNECT_TIMEOUT_S),
        }


def add_flags(parser: argparse.ArgumentParser, *aliases: str) -> None:
    """Adds the flags that say where the server is.

    Args:
        parser: a command's.
        *aliases: further names of --url.
    """
    group = parser.add_argument_group("server")
    group.add_argument(
        "--url", *aliases, default=None, help=f"the server's address, with or without /v1 ({DEFAULT_URL})"
    )
    group.add_argument("--api-key", default=None, metavar="KEY", help="default: the variable OPENAI_API_KEY")
    group.add_argument(
        "--ca-file", type=Path, default=None, metavar="FILE",
        help="certificates that the server's is checked with; default: the variable SSL_CERT_FILE, or the usual ones",
    )  # fmt: skip


def at_least_one(text: str) -> int:
    """Reads a flag's number.

    Raises:
        ArgumentTypeError: it is not a whole number above 0.
    """
    if text.isdecimal() and (value := int(text)) > 0:
        return value
    raise argparse.ArgumentTypeError(f"must be a whole number above 0, got {text!r}")


def connection_of(arguments: argparse.Namespace) -> Connection:
    """Returns what the flags say.

    Raises:
        FlagError: the address is not a URL, the key cannot be one, or the certificates cannot be read.
    """
    text = arguments.url or DEFAULT_URL
    try:
        url = httpx.URL(text)
    except httpx.InvalidURL as error:
        raise FlagError(f"--url {text}: {error}") from error
    if url.scheme not in {"http", "https"} or not url.host:
        raise FlagError(f"--url {text} is not an address; write it like {DEFAULT_URL}")
    verify: ssl.SSLContext | bool = url.scheme == "https"
    path = arguments.ca_file or os.environ.get("SSL_CERT_FILE")
    if path and verify:
        try:
            verify = ssl.create_default_context(cafile=path)
        except OSError as error:
            reason = error.strerror or error
            raise FlagError(
                f"the certificates in {path} cannot be read ({reason}); change --ca-file"
            ) from error
    key = (arguments.api_key or os.environ.get("OPENAI_API_KEY", "")).strip()
    if not (key.isascii() and key.isprintable()):
        raise FlagError("the API key has characters that no key has; change --api-key or OPENAI_API_KEY")
    return Connection(text.rstrip("/").removesuffix("/v1"), key, verify)


def allow_open_files() -> None:
    """Lets this process open as many connections as the system allows; often it begins with 1,024."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def first_model(client: httpx.Client, connection: Connection) -> str:
    """Returns the name of the first model that the server lists.

    Raises:
        ClientError: the server is not reached, refuses, or lists none.
    """
    try:
        response = client.get("/v1/models")
    except httpx.HTTPError as error:
        raise ClientError(unreachable(connection, error)) from error
    check(response.status_code, response.content)
    try:
        return str(response.json()["data"][0]["id"])
    except (ValueError, LookupError, TypeError) as error:
        raise ClientError(f"{connection.url} lists no model; name one with --model-name") from error


def check(status: int, content: bytes) -> None:
    """Refuses an answer that is an error.

    Raises:
        ClientError: it is one.
    """
    if status != _OK:
        raise ClientError(f"the server answered {status}: {error_text(content)}")


def error_text(content: bytes) -> str:
    """Returns the message of an error's body in one line."""
    try:
        body = json.loads(content)
        message = body["error"]["message"] if "error" in body else body["message"]
    except (ValueError, LookupError, TypeError):
        message = content.decode(errors="replace")[:200]
    return " ".join(str(message).split()) or "without a message"


def unreachable(connection: Connection, error: httpx.HTTPError) -> str:
    """Returns the line about a connection that failed."""
    where = connection.url if connection.uds is None else str(connection.uds)
    reason = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
        advice = (
            "give its CA with --ca-file" if "CERTIFICATE" in reason else "start a gateway, or change --url"
        )
        return f"cannot reach {where}: {reason}; {advice}"
    return f"{where} broke off: {reason}"
