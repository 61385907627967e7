"""The commands `triptych chat` and `triptych complete`; `run-batch` uses their client."""

import argparse
import contextlib
import os
import ssl
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import httpx2
import openai

from protos.service.help import ArgumentParser

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
        """Returns a client without retries and without a limit on the time of answers."""
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
    """Returns the server of the flags; `CommandError` if one of them cannot be used."""
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
    """Returns the name of the server's first model; `CommandError` without an answer or a model."""
    try:
        models = client.models.list().data
    except ERRORS as error:
        raise CommandError(server.line(error)) from error
    if not models:
        raise CommandError(f"{server.url} lists no model; name one with --model-name")
    return models[0].id


@dataclass
class Answer:
    """The part of an answer received so far."""

    text: str = ""
    """Without the thinking."""
    interrupted: bool = False
    """Whether Ctrl-C ended it."""
    num_tokens: int = 0
    started_s: float = field(default_factory=time.perf_counter)
    first_s: float = 0.0
    """The time of the first token."""

    def print_stats(self) -> None:
        """Prints the time to the first token, and the rate of all."""
        total_s = time.perf_counter() - self.started_s
        print(f"{'TTFT:':<5} {(self.first_s - self.started_s) * 1000:.2f} ms")
        rate = self.num_tokens / total_s
        print(f"{'TPS:':<5} {rate:.2f} tokens/s ({self.num_tokens} tokens in {total_s:.2f}s)")


def chat(argv: list[str]) -> int:
    """Answers a message, or each line of standard input.

    Returns:
        0, 1 if the server cannot be reached or refuses, 2 for a bad flag, 130 after Ctrl-C.
    """
    parser = ArgumentParser(
        prog="triptych chat",
        description="Chats with the model of a running gateway. Ctrl-C ends an answer, a second one the program.",
        epilog='Example: triptych chat -q "Name the capital of France."',
    )
    parser.add_argument("--system-prompt", metavar="TEXT", help="the system message of the conversation")
    return _run(parser, argv, is_chat=True)


def complete(argv: list[str]) -> int:
    """Completes a prompt, or each line of standard input; returns the exit code of `chat`."""
    parser = ArgumentParser(
        prog="triptych complete",
        description="Completes prompts with the model of a running gateway. Ctrl-C ends an answer, a second one"
        " the program.",
        epilog='Example: triptych complete -q "The capital of France is" --max-tokens 32',
    )
    return _run(parser, argv, is_chat=False)


def _run(parser: ArgumentParser, argv: list[str], *, is_chat: bool) -> int:
    """Answers the text of --quick, or each line of standard input; returns the exit code."""
    add = parser.add_argument
    add("-q", "--quick", metavar="TEXT", help="answer this text and exit")
    add("--max-tokens", type=int, metavar="N", help="the longest answer (the server's default)")
    add("--model-name", metavar="NAME", help="default: the first model that the server lists")
    add("--stats", action="store_true", help="print the time to the first token and tokens per second")
    add_flags(parser)
    arguments = parser.parse_args(argv)
    try:
        server = server_of(arguments)
        with server.client() as client:
            fields: dict[str, Any] = {"model": arguments.model_name or first_model(client, server)}
            print(f"Using model: {fields['model']}", file=sys.stderr)
            fields |= {"stream": True, "stream_options": {"include_usage": True}}
            fields |= {} if arguments.max_tokens is None else {"max_tokens": arguments.max_tokens}
            kept: list[Any] = []
            if is_chat and arguments.system_prompt is not None:
                kept.append({"role": "system", "content": arguments.system_prompt})

            def start(text: str) -> Any:
                if not is_chat:
                    return client.completions.create(prompt=text, **fields)
                messages = [*kept, {"role": "user", "content": text}]
                return client.chat.completions.create(messages=messages, **fields)

            def ask(text: str) -> Answer:
                answer = Answer()
                try:
                    with start(text) as chunks:
                        _print_chunks(chunks, answer)
                except ERRORS as error:
                    raise CommandError(server.line(error)) from error
                except KeyboardInterrupt:
                    answer.interrupted = True
                print(flush=True)
                if arguments.stats and answer.first_s and not answer.interrupted:
                    answer.print_stats()
                if is_chat and (answer.text or not answer.interrupted):
                    kept.append({"role": "user", "content": text})
                    kept.append({"role": "assistant", "content": answer.text})
                return answer

            if arguments.quick is not None:
                return 130 if ask(arguments.quick).interrupted else 0
            return _ask_until_end(ask)
    except CommandError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return error.exit_code


def _ask_until_end(ask: Callable[[str], Answer]) -> int:
    """Asks for lines until the end of standard input; a failed request does not end it."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - edits lines and keeps a history
    while True:
        try:
            ask(input("> " if sys.stdin.isatty() else ""))
        except EOFError:
            return 0
        except CommandError as error:
            print(error, file=sys.stderr)


def _print_chunks(chunks: Iterable[Any], answer: Answer) -> None:
    thinking = False
    for chunk in chunks:
        if usage := getattr(chunk, "usage", None):
            answer.num_tokens = usage.completion_tokens
        for choice in getattr(chunk, "choices", None) or ():
            delta = getattr(choice, "delta", choice)  # a completion's text is in the choice
            text = getattr(delta, "content", None) or getattr(delta, "text", None) or ""
            thought = getattr(delta, "reasoning", None) or getattr(delta, "reasoning_content", None) or ""
            answer.first_s = answer.first_s or (time.perf_counter() if thought or text else 0.0)
            if thought:
                print("" if thinking else "<think>\n", thought, sep="", end="", flush=True)
                thinking = True
            if text:
                print("\n</think>\n" if thinking else "", text, sep="", end="", flush=True)
                thinking = False
                answer.text += text
    if thinking:
        print("\n</think>", end="")
