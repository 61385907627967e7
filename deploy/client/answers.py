"""Streamed answers: their events, and how they are printed while they arrive."""

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import httpx

from deploy.client.connection import ClientError, Connection, check, unreachable


@dataclass
class Answer:
    """What one answer has said so far."""

    text: str = ""
    """Without the thinking."""
    interrupted: bool = False
    """Whether Ctrl-C has ended it."""


@dataclass
class _Clock:
    """The times that --stats shows."""

    started_s: float
    first_s: float | None = None
    num_tokens: int = 0

    def show(self) -> None:
        total_s = time.perf_counter() - self.started_s
        if self.first_s is not None and total_s > 0:
            print(f"{'TTFT:':<5} {(self.first_s - self.started_s) * 1000:.2f} ms")
            rate = self.num_tokens / total_s
            print(f"{'TPS:':<5} {rate:.2f} tokens/s ({self.num_tokens} tokens in {total_s:.2f}s)")


def add_answer_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags that choose the model, limit its answer, and choose what is printed."""
    parser.add_argument(
        "--max-tokens", type=int, metavar="N", help="the longest answer (the server's default)"
    )
    parser.add_argument("--model-name", metavar="NAME", help="default: the first model that the server lists")
    parser.add_argument(
        "--stats", action="store_true", help="print the time to the first token and tokens per second"
    )


def limit_of(arguments: argparse.Namespace) -> dict[str, int]:
    """Returns the fields of a request that `--max-tokens` sets."""
    return {} if arguments.max_tokens is None else {"max_tokens": arguments.max_tokens}


def event_of(line: str) -> dict[str, Any] | None:
    """Returns the object of one line of an event stream; None for comments and the end.

    Raises:
        ClientError: the object is an error.
    """
    if not line.startswith("data:"):
        return None
    data = line.removeprefix("data:").strip()
    if data == "[DONE]":
        return None
    try:
        event = json.loads(data)
    except ValueError as error:
        raise ClientError(f"the server sent an event that is not JSON: {data[:100]}") from error
    if not isinstance(event, dict):
        raise ClientError(f"the server sent an event that is not an object: {data[:100]}")
    if failure := event.get("error"):
        message = failure.get("message", failure) if isinstance(failure, dict) else failure
        raise ClientError(" ".join(str(message).split()))
    return event


def print_answer(
    client: httpx.Client, connection: Connection, path: str, body: dict[str, Any], *, stats: bool
) -> Answer:
    """Sends a request and prints the answer while it arrives. Ctrl-C ends the answer.

    Args:
        client: of `connection`.
        connection: names the server in errors.
        path: of chats or of completions.
        body: the request, without `stream`.
        stats: whether to print the time to the first token and the tokens per second.

    Raises:
        ClientError: the server is not reached, refuses, or breaks off.
    """
    answer = Answer()
    body = {**body, "stream": True, **({"stream_options": {"include_usage": True}} if stats else {})}
    clock = _Clock(time.perf_counter())
    try:
        with client.stream("POST", path, json=body) as response:
            if response.is_error:
                check(response.status_code, response.read())
            _print_events(response.iter_lines(), answer, clock)
    except httpx.HTTPError as error:
        raise ClientError(unreachable(connection, error)) from error
    except KeyboardInterrupt:
        answer.interrupted = True
    print(flush=True)
    if stats and not answer.interrupted:
        clock.show()
    return answer


def _print_events(lines: Iterator[str], answer: Answer, clock: _Clock) -> None:
    thinking = False
    for line in lines:
        event = event_of(line) or {}
        clock.num_tokens = (event.get("usage") or {}).get("completion_tokens", clock.num_tokens)
        for choice in event.get("choices") or ():
            thought, text = _pieces(choice)
            if thought or text:
                clock.first_s = clock.first_s or time.perf_counter()
            if thought:
                print("" if thinking else "<think>\n", thought, sep="", end="", flush=True)
                thinking = True
            if text:
                print("\n</think>\n" if thinking else "", text, sep="", end="", flush=True)
                thinking = False
                answer.text += text
    if thinking:
        print("\n</think>", end="")


def _pieces(choice: dict[str, Any]) -> tuple[str, str]:
    """Returns the thinking and the text of a chunk of a chat or of a completion."""
    delta = choice.get("delta")
    if delta is None:
        return "", choice.get("text") or ""
    return delta.get("reasoning") or delta.get("reasoning_content") or "", delta.get("content") or ""


def ask_until_end(invitation: str, ask: Callable[[str], Answer]) -> int:
    """Asks for each line of standard input, until its end.

    Ctrl-C at the prompt ends the program; in an answer it ends the answer. An error does not end it.

    Args:
        invitation: what a terminal shows first.
        ask: prints the answer to a line.

    Returns:
        The exit code.
    """
    shown = sys.stdin.isatty()
    if shown:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401 - edits lines and keeps a history
        print(invitation)
    while True:
        try:
            line = input("> " if shown else "")
        except EOFError:
            return 0
        try:
            ask(line)
        except ClientError as error:
            print(error, file=sys.stderr)
