"""Why sequences end."""

import enum


class FinishReason(enum.Enum):
    """Why a sequence ended."""

    STOP = enum.auto()
    """At an end token or a stop token."""
    LENGTH = enum.auto()
    """At its length limit, or the context's."""
    ABORT = enum.auto()
    """The client aborted it, or went away."""
