"""Errors for constraints that cannot be enforced."""

from typing import Any, Final, NoReturn

from protos.errors import InvalidArgument

PARAM: Final = "structured_output"
"""The request parameter that every refusal names."""


def refusal(message: str) -> InvalidArgument:
    """Returns an error that names the request parameter."""
    return InvalidArgument(message, param=PARAM)


def refuse_schema(where: str, what: str) -> NoReturn:
    """Refuses a schema.

    Args:
        where: path of the offending subschema.
        what: the problem, worded to follow "the JSON schema at <where>".

    Raises:
        InvalidArgument: always.
    """
    path = where if len(where) <= 80 else f"{where[:80]}…"
    raise refusal(f"the JSON schema at {path} {what}")


def shown(value: Any) -> str:
    """Returns `value` as it appears in an error message, cut to 40 characters."""
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:40]}…"
