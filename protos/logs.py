"""Structured logs: one JSON object a line, with the request's id on every line that belongs to it.

The request id is bound with :func:`bind_request` and kept in a context variable, so it follows awaits and tasks. Between services it
travels in the messages themselves (``request_id``), because one stream carries many requests.
"""

import logging
import sys
from contextlib import AbstractContextManager
from typing import Any, Literal

import structlog

LogFormat = Literal["json", "console"]
LogLevel = Literal["debug", "info", "warning", "error"]


def configure(service: str, *, level: LogLevel = "info", log_format: LogFormat = "json") -> None:
    """Sends this process' logs to standard error; also those of libraries that use ``logging``, from WARNING on.

    Args:
        service: "gateway", "scheduler" or "worker"; on every line.
        level: least severe level that is written.
        log_format: "json" for machines, "console" for people.
    """
    shared: list[structlog.types.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,
    ]
    renderer: structlog.types.Processor = (
        structlog.processors.JSONRenderer()
        if log_format == "json"
        else structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())
    )
    structlog.configure(
        processors=[*shared, renderer],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
    structlog.contextvars.bind_contextvars(service=service)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(structlog.stdlib.ProcessorFormatter(foreign_pre_chain=shared, processor=renderer))
    logging.basicConfig(
        handlers=[handler], level=max(logging.WARNING, getattr(logging, level.upper())), force=True
    )


def get_logger(**bound: Any) -> structlog.typing.FilteringBoundLogger:
    """A logger with these fields on every line."""
    logger: structlog.typing.FilteringBoundLogger = structlog.get_logger(**bound)
    return logger


def bind_request(request_id: str) -> AbstractContextManager[Any]:
    """Puts ``request_id`` on every line logged within the ``with`` block."""
    return structlog.contextvars.bound_contextvars(request_id=request_id)
