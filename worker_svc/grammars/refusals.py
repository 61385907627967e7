"""Errors for unenforceable constraints."""

from typing import Any, Final, NoReturn

from protos.errors import InvalidArgument

PARAM: Final = "structured_output"
"""The request parameter named by every refusal."""


def refusal(message: str) -> InvalidArgument:
    """Returns an error naming the request parameter."""
    return InvalidArgument(message, param=PARAM)


def refuse_schema(where: str, what: str) -> NoReturn:
    """Refuses a schema; `what` follows "the JSON schema at <where>".

    Raises:
        InvalidArgument: always.
    """
    raise refusal(f"the JSON schema at {shown(where, quoted=False, width=80)} {what}")


def shown(value: Any, *, quoted: bool = True, width: int = 40) -> str:
    """Returns `value` as it appears in an error message, cut to `width` characters."""
    text = repr(value) if quoted else str(value)
    return text if len(text) <= width else f"{text[:width]}…"
