"""Errors for constraints that cannot be enforced."""

from collections.abc import Collection, Mapping
from typing import Any, Final, NoReturn

from protos.errors import InvalidArgument

PARAM: Final = "structured_output"
"""The request parameter that every refusal names."""


class SchemaRefusal(InvalidArgument):
    """A part of a schema cannot be enforced; says how the schema around it can be."""

    def __init__(self, message: str, keywords: Collection[str], replacement: Mapping[str, Any]) -> None:
        super().__init__(message, param=PARAM)
        self.keywords = keywords
        """Keywords of the subschema that are not enforced."""
        self.replacement = replacement
        """Keywords that take their place."""


def refusal(message: str) -> InvalidArgument:
    """Returns an error that names the request parameter."""
    return InvalidArgument(message, param=PARAM)


def refuse_schema(
    where: str, what: str, *keywords: str, replacement: Mapping[str, Any] | None = None
) -> NoReturn:
    """Refuses a schema.

    Args:
        where: path of the offending subschema.
        what: the problem, worded to follow "the JSON schema at <where>".
        keywords: the subschema can be enforced without these; none: it cannot be enforced at all.
        replacement: what the subschema needs in their place.

    Raises:
        SchemaRefusal: if it can be enforced without some keywords.
        InvalidArgument: if not.
    """
    message = f"the JSON schema at {short_path(where)} {what}"
    raise SchemaRefusal(message, keywords, replacement or {}) if keywords else refusal(message)


def short_path(where: str) -> str:
    """Returns the path of a subschema, cut to 80 characters."""
    return where if len(where) <= 80 else f"{where[:80]}…"


def shown(value: Any) -> str:
    """Returns `value` as it appears in an error message, cut to 40 characters."""
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:40]}…"
