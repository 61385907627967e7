"""Reads traces: our JSONL, Mooncake's JSONL, and the CSV files of Azure and BurstGPT."""

import csv
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from protos.errors import ConfigurationRefused
from scheduler_svc.simulation.requests import FIRST_UNIQUE, SimulatedRequest, retimed, split_turns

_MOONCAKE_BLOCK: Final = 512
"""Tokens for each of Mooncake's hash ids."""

_MOST_TOKENS: Final = 1 << 24
"""Of a prompt or an answer: more than any model's context."""

_Count = Annotated[int, Field(ge=1, le=_MOST_TOKENS)]


class _Line(BaseModel):
    """A line of our JSONL."""

    model_config = ConfigDict(extra="forbid", strict=True)

    arrival_s: float = Field(ge=0, allow_inf_nan=False)
    prompt_tokens: _Count | None = None
    output_tokens: _Count
    prefix: list[tuple[str, Annotated[int, Field(ge=0)]]] = []
    tenant: str = ""
    priority: int = 0
    prompt_token_ids: list[Annotated[int, Field(ge=0, lt=FIRST_UNIQUE)]] = []
    session: str = ""

    def request(self) -> SimulatedRequest:
        """Returns the request.

        Raises:
            ValueError: counts contradict each other.
        """
        prompt_tokens = self.prompt_tokens or len(self.prompt_token_ids)
        if self.prompt_token_ids and (self.prefix or prompt_tokens != len(self.prompt_token_ids)):
            raise ValueError(
                "prompt_token_ids is the whole prompt: omit prefix, and prompt_tokens or make it equal"
            )
        if not prompt_tokens:
            raise ValueError("prompt_tokens or prompt_token_ids is missing")
        if (shared := sum(count for _, count in self.prefix)) > prompt_tokens:
            raise ValueError(f"prefix has {shared} tokens, more than the {prompt_tokens} of prompt_tokens")
        return SimulatedRequest(
            self.arrival_s, prompt_tokens, self.output_tokens, tuple(self.prefix), self.tenant,
            self.priority, tuple(self.prompt_token_ids), self.session,
        )  # fmt: skip


class _MooncakeLine(BaseModel):
    """A line of a Mooncake trace; times are milliseconds."""

    timestamp: float = Field(ge=0, allow_inf_nan=False)
    input_length: _Count
    output_length: _Count
    hash_ids: list[int] = []
    type: Literal["text", "image", "video", "search", "file"] = "text"

    def request(self) -> SimulatedRequest:
        """Returns the request. Equal ids at the start of two prompts are equal blocks of 512 tokens."""
        left, prefix = self.input_length, []
        for hash_id in self.hash_ids:
            if left > 0:
                prefix.append((str(hash_id), min(left, _MOONCAKE_BLOCK)))
                left -= _MOONCAKE_BLOCK
        return SimulatedRequest(self.timestamp * 1e-3, self.input_length, self.output_length, tuple(prefix))


def read_trace(path: Path, most: int | None = None) -> list[SimulatedRequest]:
    """Returns the first requests of a trace in the order of their arrival; the first arrives at 0.

    The names of the first line's fields or columns tell the format. Rows of CSV files without a prompt or
    an answer, which are failed requests, are left out.

    Args:
        path: the file.
        most: requests to read; None: all.

    Raises:
        ConfigurationRefused: the file cannot be read; the message names the line.
    """
    try:
        with path.open(newline="", encoding="utf-8") as file:
            requests = list(islice(_read(path, file), most))
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a text file"
        raise ConfigurationRefused(f"--trace {path}: {reason}") from error
    except csv.Error as error:
        raise ConfigurationRefused(f"--trace {path}: not a CSV file: {error}") from error
    if not requests:
        raise ConfigurationRefused(f"--trace {path}: no requests")
    start_s = min(one.arrival_s for one in split_turns(requests)[0])
    return retimed(requests, lambda arrival_s: arrival_s - start_s)


def _read(path: Path, file: Iterable[str]) -> Iterator[SimulatedRequest]:
    lines = enumerate(file, start=1)
    number, first = next(((number, line) for number, line in lines if line.strip()), (0, ""))
    if not first:
        return
    if first.lstrip().startswith("{"):
        model = _MooncakeLine if '"input_length"' in first else _Line
        yield _parsed(path, number, lambda: model.model_validate_json(first).request())
        for number, line in lines:
            if line.strip():
                yield _parsed(path, number, lambda: model.model_validate_json(line).request())  # noqa: B023
        return
    columns = next(csv.reader([first.removeprefix("\ufeff")]))
    read = next((read for needed, read in _TABLES if needed <= set(columns)), None)
    if read is None:
        known = "; ".join(", ".join(sorted(needed)) for needed, _ in _TABLES)
        raise ConfigurationRefused(
            f"--trace {path}: neither JSON lines nor a CSV file with known columns ({known})"
        )
    rows = csv.DictReader((line for _, line in lines), columns)
    for row in rows:
        request = _parsed(path, number + rows.line_num, lambda: read(row))  # noqa: B023
        if request.prompt_tokens and request.output_tokens:
            yield request


def _parsed(path: Path, number: int, read: Callable[[], SimulatedRequest]) -> SimulatedRequest:
    try:
        return read()
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        reason = f"{where}: {first['msg']}" if where else first["msg"]
    except (ValueError, TypeError) as error:
        reason = str(error)
    raise ConfigurationRefused(f"--trace {path}, line {number}: {reason}") from None


def _azure(row: Mapping[str, Any]) -> SimulatedRequest:
    """Reads a row of the Azure LLM inference traces of 2023 and 2024."""
    time = datetime.fromisoformat(row["TIMESTAMP"] or "")
    if time.tzinfo is None:
        time = time.replace(tzinfo=UTC)
    return SimulatedRequest(time.timestamp(), _whole(row, "ContextTokens"), _whole(row, "GeneratedTokens"))


def _burst_gpt(row: Mapping[str, Any]) -> SimulatedRequest:
    """Reads a row of BurstGPT; each model is a tenant."""
    return SimulatedRequest(
        _seconds(row, "Timestamp"), _whole(row, "Request tokens"), _whole(row, "Response tokens"),
        tenant=row["Model"] or "",
    )  # fmt: skip


def _whole(row: Mapping[str, Any], column: str) -> int:
    text = (row[column] or "").strip()
    if not text.isdecimal() or len(text) > len(str(_MOST_TOKENS)) or int(text) > _MOST_TOKENS:
        raise ValueError(f"{column}: must be a whole number up to {_MOST_TOKENS}, not {text[:20]!r}")
    return int(text)


def _seconds(row: Mapping[str, Any], column: str) -> float:
    text = row[column] or ""
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        raise ValueError(f"{column}: must be a number of seconds from 0, not {text[:20]!r}")
    return seconds


_TABLES: Final = (
    (frozenset({"TIMESTAMP", "ContextTokens", "GeneratedTokens"}), _azure),
    (frozenset({"Timestamp", "Model", "Request tokens", "Response tokens"}), _burst_gpt),
)
