"""The server of a command: its flags, its client and its errors."""

import argparse
import os
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx2
import openai

_URL: Final = "http://localhost:8000/v1"
ERRORS: Final = (openai.OpenAIError, httpx2.HTTPError, ValueError)
"""The failures of a request; ValueError stands for an event without valid JSON."""


class CommandError(Exception):
    """A command cannot go on; the message is a line for people."""

    def __init__(self, message: str, exit_code: int = 1) -> None:
        """Is a failure, or a bad flag with the exit code 2."""
        super().__init__(message)
        self.exit_code = exit_code


@dataclass(frozen=True)
class Server:
    """The address and the key of a server."""

    url: str
    """Without /v1 at its end."""
    api_key: str = ""
    verify: ssl.SSLContext | bool = True
    """Checks the server's certificate; True uses the usual certificates."""
    uds: str | None = None
    """The server's Unix socket, if it listens on no port."""

    def client(self) -> openai.OpenAI:
        """Returns a client without retries and without a limit on the time of answers.

        Raises:
            CommandError: A variable names an unusable proxy.
        """
        try:
            transport = httpx2.HTTPTransport(uds=self.uds) if self.uds else None
            http = httpx2.Client(transport=transport, verify=self.verify)
        except (ValueError, ImportError) as error:
            raise CommandError(f"{error}; change HTTP_PROXY, HTTPS_PROXY or ALL_PROXY") from error
        return openai.OpenAI(http_client=http, max_retries=0, **self._options())

    def async_client(self, max_retries: int) -> openai.AsyncOpenAI:
        """Returns the same for asyncio, with retries."""
        transport = httpx2.AsyncHTTPTransport(uds=self.uds) if self.uds else None
        http = httpx2.AsyncClient(transport=transport, verify=self.verify, limits=httpx2.Limits())
        return openai.AsyncOpenAI(http_client=http, max_retries=max_retries, **self._options())

    def _options(self) -> dict[str, Any]:
        timeout = httpx2.Timeout(None, connect=10)
        return {"base_url": f"{self.url}/v1", "api_key": self.api_key or "none", "timeout": timeout}

    def line(self, error: Exception) -> str:
        """Returns the line about a failed request."""
        if isinstance(error, openai.APIStatusError):
            message = error.body.get("message") if isinstance(error.body, dict) else error.response.text
            text = " ".join(str(message or "").split())[:200] or "without a message"
            return f"the server answered {error.status_code}: {text}"
        cause = error.__cause__ or error
        reason = " ".join(str(cause).split()) or type(cause).__name__
        if isinstance(cause, httpx2.ConnectError | httpx2.ConnectTimeout):
            is_certificate = "CERTIFICATE" in reason
            advice = "give its CA with --ca-file" if is_certificate else "start a gateway, or change --url"
            return f"cannot reach {self.uds or self.url}: {reason}; {advice}"
        return f"{self.url} broke off: {reason}"


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags for the server's address and keys."""
    add = parser.add_argument_group("server").add_argument
    add("--url", help=f"the server's address, with or without /v1 ({_URL})")
    add("--api-key", metavar="KEY", help="default: the variable OPENAI_API_KEY")
    usual = "default: the variable SSL_CERT_FILE, or the usual CAs"
    add("--ca-file", type=Path, metavar="FILE", help=f"the CA of the server's certificate; {usual}")


def server_of(arguments: argparse.Namespace) -> Server:
    """Returns the server of the flags.

    Raises:
        CommandError: The address is not a URL, the key is not ASCII, or the certificates cannot be read.
    """
    text = arguments.url or _URL
    if not text.startswith(("http://", "https://")):
        raise CommandError(f"--url {text} is not an address; write it like {_URL}", 2)
    key = (arguments.api_key or os.environ.get("OPENAI_API_KEY", "")).strip()
    if not (key.isascii() and key.isprintable()):
        raise CommandError(
            "the API key has characters that no key has; change --api-key or OPENAI_API_KEY", 2
        )
    path = arguments.ca_file or os.environ.get("SSL_CERT_FILE")
    try:
        verify = ssl.create_default_context(cafile=path) if path and text.startswith("https:") else True
    except OSError as error:
        reason = error.strerror or error
        raise CommandError(
            f"the certificates in {path} cannot be read ({reason}); change --ca-file", 2
        ) from error
    return Server(text.rstrip("/").removesuffix("/v1"), key, verify)


def first_model(client: openai.OpenAI, server: Server) -> str:
    """Returns the name of the server's first model.

    Raises:
        CommandError: The server is not reached, refuses, or lists none.
    """
    try:
        models = client.models.list().data
    except ERRORS as error:
        raise CommandError(server.line(error)) from error
    if not models:
        raise CommandError(f"{server.url} lists no model; name one with --model-name")
    return models[0].id
