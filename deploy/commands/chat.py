"""`triptych chat` and `triptych complete`: texts by the model of a running gateway."""

import contextlib
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import openai

from deploy.argument_parser import ArgumentParser
from deploy.commands.server import ERRORS, CommandError, add_flags, first_model, server_of


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


Start = Callable[[openai.OpenAI, Namespace, str, dict[str, Any]], Any]
"""Sends a request for a text with some fields, and returns the stream of its answer."""


def main(argv: list[str]) -> int:
    """Answers a message, or each line of standard input.

    Returns:
        The exit code: 0, 1 if the server cannot be reached or refuses, 2 for a bad flag, 130 after Ctrl-C.
    """
    parser = ArgumentParser(
        prog="triptych chat",
        description="Chats with the model of a running gateway. Ctrl-C ends an answer, a second one the program.",
        epilog='Example: triptych chat -q "Name the capital of France."',
    )
    parser.add_argument("--system-prompt", metavar="TEXT", help="the system message of the conversation")
    kept: list[dict[str, str]] = []

    def start(client: openai.OpenAI, arguments: Namespace, text: str, fields: dict[str, Any]) -> Any:
        if arguments.system_prompt is not None and not kept:
            kept.append({"role": "system", "content": arguments.system_prompt})
        messages: Any = [*kept, {"role": "user", "content": text}]
        return client.chat.completions.create(messages=messages, **fields)

    def keep(text: str, answer: str) -> None:
        kept.extend([{"role": "user", "content": text}, {"role": "assistant", "content": answer}])

    return _run(parser, argv, start, keep)


def complete(argv: list[str]) -> int:
    """Completes a prompt, or each line of standard input; returns the exit code of `main`."""
    parser = ArgumentParser(
        prog="triptych complete",
        description="Completes prompts with the model of a running gateway. Ctrl-C ends an answer, a second one"
        " the program.",
        epilog='Example: triptych complete -q "The capital of France is" --max-tokens 32',
    )
    return _run(
        parser,
        argv,
        lambda client, _, prompt, fields: client.completions.create(prompt=prompt, **fields),
        lambda *_: None,
    )


def _run(parser: ArgumentParser, argv: list[str], start: Start, keep: Callable[[str, str], None]) -> int:
    """Answers the text of --quick, or each line of standard input; returns the exit code.

    Args:
        parser: with the command's own flags.
        argv: the command line.
        start: sends a request for a text, and returns the stream of its answer.
        keep: gets each text with its answer.
    """
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

            def ask(text: str) -> Answer:
                answer = Answer()
                try:
                    with start(client, arguments, text, fields) as chunks:
                        _print_chunks(chunks, answer)
                except ERRORS as error:
                    raise CommandError(server.line(error)) from error
                except KeyboardInterrupt:
                    answer.interrupted = True
                print(flush=True)
                if arguments.stats and answer.first_s and not answer.interrupted:
                    answer.print_stats()
                if answer.text or not answer.interrupted:
                    keep(text, answer.text)
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
