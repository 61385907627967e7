"""`triptych run-batch`: runs a file of OpenAI batch requests, a JSON object a line."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any, Final, Literal

import httpx2
import openai
from pydantic import BaseModel, Field, PositiveInt, TypeAdapter, ValidationError

from deploy.commands.client import ERRORS, CommandError, Server, add_flags, first_model, server_of
from deploy.launcher.process import COMMAND, PARENT_VARIABLE
from protos.service.help import ArgumentParser

_START: Final = b'{"id": "batch_req_'  # the beginning of each line of an output
_RETRIES: Final = 4
# The socket of a batch's own stack is this user's, so it needs no keys and no TLS.
_PROTECTION: Final = ("VLLM_API_KEY", "TRIPTYCH_API_KEY", "TRIPTYCH_SECURE", "TRIPTYCH_SSL_")


class Request(BaseModel):
    """A line of the input."""

    custom_id: str = Field(min_length=1)
    method: Literal["POST"]
    url: Literal[
        "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings", "/v1/score", "/score",
        "/v1/rerank", "/v2/rerank", "/rerank",
    ]  # fmt: skip
    body: dict[str, Any]


def main(argv: list[str]) -> int:
    """Runs the requests without an answer in the output file.

    Returns:
        0 if the output has all lines, 1 if the batch stopped before, 2 for a bad flag.
    """
    parser = _parser()
    arguments, rest = parser.parse_known_args(argv)
    if rest and arguments.model is None:
        parser.parse_args(argv)  # refuses the rest
    if arguments.model is not None and arguments.url is not None:
        parser.error("--model starts a stack, and --url names a running gateway; omit one of them")
    try:
        with arguments.input_file.open("rb") as lines, _server(arguments, rest) as server:
            with server.client() as client:
                first_model(client, server)  # before anything is written
            with arguments.output_file.open("a+b") as file:
                output = Output(file)
                asyncio.run(_answer_all(lines, server, output, arguments.max_concurrency))
    except (CommandError, OSError, ExceptionGroup) as error:
        first = error.exceptions[0] if isinstance(error, ExceptionGroup) else error
        line = f"{first.filename or 'the output'}: {first.strerror}" if isinstance(first, OSError) else first
        print(f"triptych run-batch: {line}", file=sys.stderr)
        return getattr(first, "exit_code", 1)
    words = ("succeeded", "failed", "invalid lines", "done before")
    counts = ", ".join(f"{output.counts[word]} {word}" for word in words)
    print(f"{counts}; written to {arguments.output_file}")
    return 0


async def _answer_all(lines: IO[bytes], server: Server, output: "Output", max_concurrency: int) -> None:
    slots = asyncio.Semaphore(max_concurrency)
    ids: set[str] = set()
    async with server.async_client(_RETRIES) as client, asyncio.TaskGroup() as group:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            request = _request(line, ids)
            if (number if isinstance(request, str) else request.custom_id) in output.done:
                output.counts["done before"] += 1
            elif isinstance(request, str):
                error = {"code": "invalid_line", "message": f"line {number}: {request}", "line": number}
                output.write("invalid lines", error=error)
            else:
                await slots.acquire()
                task = group.create_task(_answer(client, server, output, request))
                task.add_done_callback(lambda _: slots.release())


def _request(line: bytes, ids: set[str]) -> Request | str:
    """Returns the request of a line, or the reason of its refusal."""
    try:
        request = Request.model_validate_json(line)
    except ValidationError as error:
        first = error.errors()[0]
        return ": ".join([*map(str, first["loc"]), first["msg"]])
    if request.custom_id in ids:
        return f"custom_id {request.custom_id!r} is that of an earlier line"
    ids.add(request.custom_id)
    return "a batch has no streams; omit stream" if request.body.get("stream") else request


async def _answer(client: openai.AsyncOpenAI, server: Server, output: "Output", request: Request) -> None:
    try:
        response = await client.post(server.url + request.url, body=request.body, cast_to=httpx2.Response)
    except openai.APIStatusError as error:
        response = error.response
    except ERRORS as error:
        line = f"{server.line(error)}; the same command goes on where this one stopped"
        raise CommandError(line) from error
    try:
        body = json.loads(response.content)
    except ValueError:
        body = {"error": {"message": response.text[:1000], "type": "invalid_response"}}
    request_id = response.headers.get("x-request-id") or f"req_{uuid.uuid4().hex}"
    answer = {"status_code": response.status_code, "request_id": request_id, "body": body}
    output.write("succeeded" if response.is_success else "failed", request.custom_id, answer)


class Output:
    """The output file. Lines are added as requests end, and the lines of an earlier run stay."""

    def __init__(self, file: IO[bytes]) -> None:
        """Reads the earlier lines, and removes an incomplete last line."""
        self.counts: Counter[str] = Counter()
        self.done: set[str | int] = set()
        """Ids with an answer, and numbers of bad lines."""
        self._file = file
        self._file.seek(0)
        end = 0
        for line in self._file:
            if not line.endswith(b"\n") and (line.startswith(_START) or _START.startswith(line)):
                break
            try:
                entry = json.loads(line)
                self.done.add(entry["error"]["line"] if entry["error"] else entry["custom_id"])
            except (ValueError, LookupError, TypeError) as error:
                text = f"{file.name} is not the output of a batch; name another file with -o"
                raise CommandError(text) from error
            end += len(line)
        self._file.truncate(end)

    def write(
        self, outcome: str, custom_id: str | None = None, response: Any = None, error: Any = None
    ) -> None:
        """Adds a line. An HTTP error is a response, too."""
        self.counts[outcome] += 1
        entry = {
            "id": f"batch_req_{uuid.uuid4().hex}",
            "custom_id": custom_id,
            "response": response,
            "error": error,
        }
        self._file.write(json.dumps(entry, ensure_ascii=False).encode(errors="replace") + b"\n")
        self._file.flush()


@contextlib.contextmanager
def _server(arguments: Namespace, flags: Sequence[str]) -> Iterator[Server]:
    """Names the running server, or serves --model on a Unix socket until the block ends."""
    if arguments.model is None:
        yield server_of(arguments)
        return
    environment = {name: value for name, value in os.environ.items() if not name.startswith(_PROTECTION)}
    environment[PARENT_VARIABLE] = str(os.getpid())
    with tempfile.TemporaryDirectory(prefix="triptych-batch-") as folder:
        server = Server("http://localhost", uds=f"{folder}/http.sock")
        command = [*COMMAND, "up", arguments.model, *flags]
        # Its own session: Ctrl-C reaches this command, which then stops the stack.
        launcher = subprocess.Popen(
            [*command, f"--uds={server.uds}"], env=environment, stdout=sys.stderr, start_new_session=True
        )
        try:
            with server.client() as client:
                while not _answers(client):
                    if launcher.poll() is not None:
                        raise CommandError("the stack did not start, see above")
                    time.sleep(0.1)
            yield server
        finally:
            launcher.send_signal(signal.SIGINT)
            launcher.wait()


def _answers(client: openai.OpenAI) -> bool:
    """Returns whether a starting gateway answers; a refusal of a request counts, too."""
    try:
        client.models.list()
    except openai.APIStatusError as error:
        return error.status_code != httpx2.codes.SERVICE_UNAVAILABLE
    except openai.APIConnectionError as error:
        return not isinstance(error.__cause__, httpx2.ConnectError)
    return True


def _parser() -> ArgumentParser:
    parser = ArgumentParser(
        prog="triptych run-batch",
        description="Runs a file of OpenAI batch requests. The output file gets one line for each, as they end;"
        " the same command goes on where an earlier run stopped.",
        epilog="Example: triptych run-batch -i batch.jsonl -o answers.jsonl --model smollm2",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("-i", "--input-file", type=Path, required=True, metavar="FILE", help="the requests")
    add("-o", "--output-file", type=Path, required=True, metavar="FILE", help="the answers")
    stack = "start a stack with this model for the batch; all other flags are those of `triptych up`"
    add("--model", metavar="MODEL", help=stack)
    number = TypeAdapter(PositiveInt).validate_strings
    add(
        "--max-concurrency",
        type=number,
        default=64,
        metavar="N",
        help="requests that run at the same time (64)",
    )
    add_flags(parser)
    return parser
