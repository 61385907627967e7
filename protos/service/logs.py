"""Structured logs: a JSON object per line, with the request's id on every line about a request.

:func:`bind_request` keeps the request id in a context variable, so it follows awaits and tasks. Between
services it travels in the messages, because one stream carries many requests.
"""

import contextlib
import logging
import os
import sys
from contextlib import AbstractContextManager
from typing import Annotated, Any, Literal, TextIO, cast

import structlog
from pydantic import BeforeValidator

LogFormat = Literal["json", "console"]
# Python's other names of levels, which vLLM's variable takes, also in upper case.
_LEVELS = {"warn": "warning", "critical": "error", "fatal": "error", "notset": "debug"}
LogLevel = Annotated[
    Literal["debug", "info", "warning", "error"],
    BeforeValidator(lambda value: _LEVELS.get(str(value).lower(), str(value).lower())),
]


_STDOUT, _STDERR = 1, 2
# A full disk, and a stream that is closed while the process ends.
_UNWRITABLE = (OSError, ValueError)


class _UnfailingStream:
    """Writes to a stream, and drops unwritable text: a full disk must not cost a request."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Writes or drops a text."""
        with contextlib.suppress(*_UNWRITABLE):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Flushes the stream if it can be written."""
        with contextlib.suppress(*_UNWRITABLE):
            self._stream.flush()


def configure(service: str, *, level: LogLevel = "info", log_format: LogFormat = "json") -> None:
    """Sends the logs of this process to standard error, and warnings of libraries that use ``logging``.

    Every line names the service. Unwritable lines, such as to a full disk, are dropped.
    """
    stream = _UnfailingStream(sys.stderr)
    shared: list[structlog.types.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,
    ]
    renderer: structlog.types.Processor = structlog.processors.JSONRenderer()
    if log_format == "console":
        shared.append(_escape)
        renderer = structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())
    structlog.configure(
        processors=[*shared, renderer],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.PrintLoggerFactory(cast("TextIO", stream)),
        cache_logger_on_first_use=True,
    )
    structlog.contextvars.bind_contextvars(service=service)
    handler = logging.StreamHandler(stream)
    handler.setFormatter(structlog.stdlib.ProcessorFormatter(foreign_pre_chain=shared, processor=renderer))
    logging.basicConfig(
        handlers=[handler], level=max(logging.WARNING, getattr(logging, level.upper())), force=True
    )


def reserve_stdout() -> None:
    """Keeps standard output for this process's prints: native libraries then write to standard error.

    torch_rbln's library logs to standard output. A `sys.stdout` that a caller has replaced stays.
    """
    original = sys.__stdout__
    if original is None or sys.stdout is not original:
        return
    original.flush()
    own = os.dup(_STDOUT)
    os.dup2(_STDERR, _STDOUT)
    sys.stdout = os.fdopen(own, "w", encoding=original.encoding, errors=original.errors)


def _escape(_: object, __: str, entry: structlog.types.EventDict) -> structlog.types.EventDict:
    """Escapes control characters, such as cursor movements: clients choose their own ids."""
    for name, value in entry.items():
        if isinstance(value, str) and name != "exception" and not value.isprintable():
            entry[name] = value.encode("unicode_escape").decode()
    return entry


def get_logger(**bound: Any) -> structlog.typing.FilteringBoundLogger:
    """Returns a logger with these fields on every line."""
    logger: structlog.typing.FilteringBoundLogger = structlog.get_logger(**bound)
    return logger


def bind_request(request_id: str) -> AbstractContextManager[Any]:
    """Adds ``request_id`` to every line logged within the ``with`` block."""
    return structlog.contextvars.bound_contextvars(request_id=request_id)


def request_id() -> str:
    """Returns the id bound by :func:`bind_request`; empty outside of a request."""
    return str(structlog.contextvars.get_contextvars().get("request_id", ""))
