"""The files of `triptych run-batch`: OpenAI's batch input and output, one JSON object a line."""

import json
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Final

from deploy.client.connection import ClientError

URLS: Final = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/embeddings",
    "/v1/score",
    "/score",
    "/v1/rerank",
    "/v2/rerank",
    "/rerank",
)
"""The routes that a line may name."""


# How each line of an output begins.
_START: Final = b'{"id": "batch_req_'


@dataclass(frozen=True)
class BatchRequest:
    """A line of the input."""

    custom_id: str
    url: str
    body: dict[str, Any]


@dataclass(frozen=True)
class BadLine:
    """A line of the input that is not a request."""

    number: int
    """Counted from 1."""
    reason: str
    custom_id: str | None


def read_requests(path: Path) -> Iterator[tuple[int, BatchRequest | BadLine]]:
    """Yields the lines of an input file with their numbers; blank lines are left out.

    Raises:
        ClientError: the file cannot be read.
    """
    ids: set[str] = set()
    try:
        with path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield number, _parse(number, line, ids)
    except OSError as error:
        raise ClientError(f"{path} cannot be read ({error.strerror}); change -i") from error


def _parse(number: int, line: bytes, ids: set[str]) -> BatchRequest | BadLine:
    try:
        entry = json.loads(line)
    except ValueError as error:
        return BadLine(number, f"the line is not JSON: {error}", None)
    if not isinstance(entry, dict):
        return BadLine(number, "the line is not a JSON object", None)
    custom_id, body = entry.get("custom_id"), entry.get("body")
    if not isinstance(custom_id, str) or not custom_id:
        return BadLine(number, "custom_id must be a text that is not empty", None)
    if custom_id in ids:
        return BadLine(number, f"custom_id {custom_id!r} is that of an earlier line", custom_id)
    ids.add(custom_id)
    if entry.get("method") != "POST":
        return BadLine(number, f"method must be 'POST', got {entry.get('method')!r}", custom_id)
    if entry.get("url") not in URLS:
        return BadLine(number, f"url must be one of {', '.join(URLS)}; got {entry.get('url')!r}", custom_id)
    if not isinstance(body, dict):
        return BadLine(number, "body must be an object", custom_id)
    if body.get("stream"):
        return BadLine(number, "a batch has no streams; omit stream", custom_id)
    return BatchRequest(custom_id, entry["url"], body)


@dataclass
class BatchOutput:
    """The output file. Lines are added as requests end, and what an earlier run has written stays."""

    path: Path
    done_ids: set[str] = field(default_factory=set)
    """Requests that have an answer."""
    done_lines: set[int] = field(default_factory=set)
    """Numbers of bad input lines that have been reported."""
    _file: IO[bytes] | None = None

    def open(self) -> None:
        """Reads what is there, and removes a last line that was cut off.

        Raises:
            ClientError: the file cannot be written, or is not the output of a batch.
        """
        try:
            self._file = self.path.open("a+b")
            self._file.seek(0)
            end = 0
            for line in self._file:
                if not line.endswith(b"\n") and (line.startswith(_START) or _START.startswith(line)):
                    break
                self._remember(line)
                end += len(line)
            self._file.truncate(end)
        except OSError as error:
            raise ClientError(f"{self.path} cannot be written ({error.strerror}); change -o") from error
        except BaseException:
            self.close()
            raise

    def _remember(self, line: bytes) -> None:
        try:
            entry = json.loads(line)
            bad_line = (entry["error"] or {}).get("line")
            if bad_line is None:
                self.done_ids.add(entry["custom_id"])
            else:
                self.done_lines.add(bad_line)
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise ClientError(
                f"{self.path} is not the output of a batch; name another file with -o"
            ) from error

    def close(self) -> None:
        """Closes the file."""
        if self._file is not None:
            self._file.close()

    def write_response(self, request: BatchRequest, status: int, request_id: str, body: Any) -> None:
        """Adds the answer to a request. An HTTP error is an answer, too."""
        response = {"status_code": status, "request_id": request_id, "body": body}
        self._write(request.custom_id, response, None)

    def write_error(self, line: BadLine) -> None:
        """Adds an input line that is not a request."""
        error = {"code": "invalid_line", "message": f"line {line.number}: {line.reason}", "line": line.number}
        self._write(line.custom_id, None, error)

    def _write(
        self, custom_id: str | None, response: dict[str, Any] | None, error: dict[str, Any] | None
    ) -> None:
        entry = {
            "id": f"batch_req_{uuid.uuid4().hex}",
            "custom_id": custom_id,
            "response": response,
            "error": error,
        }
        assert self._file is not None
        try:
            self._file.write(json.dumps(entry, ensure_ascii=False).encode(errors="replace") + b"\n")
            self._file.flush()
        except OSError as failure:
            raise ClientError(f"{self.path} cannot be written ({failure.strerror})") from failure
