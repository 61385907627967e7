"""Runs the requests of a batch file, a bounded number at a time."""

import asyncio
import json
import sys
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx

from deploy.client.batch_file import BadLine, BatchOutput, BatchRequest, read_requests
from deploy.client.connection import ClientError, Connection, unreachable

_TRIES: Final = 5
# A server that is overloaded or restarts. It says in Retry-After when to come back, or is asked after these.
_BUSY: Final = {429, 502, 503}
_PAUSES_S: Final = (1.0, 2.0, 5.0, 10.0)
_LONGEST_PAUSE_S: Final = 60.0
_PROGRESS_S: Final = 5.0


@dataclass
class Counts:
    """The outcome of the input's lines."""

    succeeded: int = 0
    failed: int = 0
    """Answered with an HTTP error."""
    invalid: int = 0
    """No requests."""
    skipped: int = 0
    """Done by an earlier run."""

    def __str__(self) -> str:
        """One line for people."""
        return (
            f"{self.succeeded} succeeded, {self.failed} failed, {self.invalid} invalid lines,"
            f" {self.skipped} done before"
        )


class BatchRun:
    """One run over an input file."""

    def __init__(
        self, http: httpx.AsyncClient, connection: Connection, output: BatchOutput, max_concurrency: int
    ) -> None:
        """Starts with no request.

        Args:
            http: of `connection`.
            connection: names the server in errors.
            output: open; says what an earlier run has done.
            max_concurrency: requests that run at the same time.
        """
        self._http = http
        self._connection = connection
        self._output = output
        self._slots = asyncio.Semaphore(max_concurrency)
        self._reported_s = time.monotonic()
        self.counts = Counts()

    async def run(self, path: Path) -> None:
        """Runs the requests of an input file that are not done.

        Raises:
            ClientError: a file cannot be used, or the server is lost. The output keeps what was done.
        """
        try:
            async with asyncio.TaskGroup() as group:
                for number, line in read_requests(path):
                    if isinstance(line, BadLine):
                        self._refuse(number, line)
                    elif line.custom_id in self._output.done_ids:
                        self.counts.skipped += 1
                    else:
                        await self._slots.acquire()
                        group.create_task(self._answer(line))
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from errors

    def _refuse(self, number: int, line: BadLine) -> None:
        if number in self._output.done_lines:
            self.counts.skipped += 1
            return
        self.counts.invalid += 1
        self._output.write_error(line)

    async def _answer(self, request: BatchRequest) -> None:
        try:
            response = await self._send(request)
        finally:
            self._slots.release()
        body = _body(response)
        request_id = response.headers.get("x-request-id") or f"req_{uuid.uuid4().hex}"
        self._output.write_response(request, response.status_code, request_id, body)
        if response.is_success:
            self.counts.succeeded += 1
        else:
            self.counts.failed += 1
        self._report()

    async def _send(self, request: BatchRequest) -> httpx.Response:
        """Returns the server's answer; asks again while it is busy or away.

        Raises:
            ClientError: the server stays away.
        """
        for attempt in range(_TRIES):
            last = attempt == _TRIES - 1
            try:
                response = await self._http.post(request.url, json=request.body)
            except httpx.TransportError as error:
                if last:
                    reason = unreachable(self._connection, error)
                    raise ClientError(f"{reason}; the same command goes on where this one stopped") from error
                pause_s = _PAUSES_S[attempt]
            else:
                if last or response.status_code not in _BUSY:
                    return response
                pause_s = _pause_s(response.headers.get("retry-after"), _PAUSES_S[attempt])
            await asyncio.sleep(pause_s)
        raise AssertionError("unreachable: the last try returns or raises")

    def _report(self) -> None:
        if time.monotonic() - self._reported_s > _PROGRESS_S:
            self._reported_s = time.monotonic()
            print(self.counts, file=sys.stderr, flush=True)


def _pause_s(retry_after: str | None, default_s: float) -> float:
    try:
        return min(max(float(retry_after or default_s), 0.0), _LONGEST_PAUSE_S)
    except ValueError:
        return default_s


def _body(response: httpx.Response) -> Any:
    """Returns the JSON of an answer; a text in the form of an error if it is none."""
    try:
        return json.loads(response.content)
    except ValueError:
        return {"error": {"message": response.text[:1000], "type": "invalid_response"}}
