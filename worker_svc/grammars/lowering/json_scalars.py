"""Lowers schemas of strings and numbers."""

import math
from typing import Any, Final

from protos.errors import InvalidArgument
from worker_svc.grammars.lowering.formats import FORMATS
from worker_svc.grammars.lowering.refusals import SchemaRefusal, refuse_schema, shown
from worker_svc.grammars.lowering.regex import lower_regex

# A character that a JSON string holds unescaped.
_CHARACTER: Final = r'[^"\\\x00-\x1f\x7f]'
# xgrammar turns bounds into expressions, which are inexact above this value or with more decimals.
_MAX_BOUND: Final = 1e15
_DECIMALS: Final = 6
_BOUNDS: Final = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
# xgrammar ignores a larger multipleOf.
_MAX_FACTOR: Final = 1024
_MAX_COUNT: Final = 100_000


def read_count(node: dict[str, Any], name: str, where: str) -> int | None:
    """Returns a number of characters, items or properties; `None` if the keyword is absent.

    Raises:
        InvalidArgument: the value is not an integer from 0 to 100,000.
    """
    if name not in node:
        return None
    value = node[name]
    if isinstance(value, bool) or not isinstance(value, int | float) or value != int(value) or value < 0:
        refuse_schema(where, f"has a {name} that is not a non-negative integer")
    if value > _MAX_COUNT:
        refuse_schema(where, f"has the {name} {shown(value)}; at most {_MAX_COUNT} is supported", name)
    return int(value)


def lower_string(node: dict[str, Any], where: str) -> Any:
    """Lowers a schema of strings; lengths and formats become patterns.

    Raises:
        InvalidArgument: names the keyword that cannot be enforced.
    """
    low, high = read_count(node, "minLength", where), read_count(node, "maxLength", where)
    lengths: list[str] = [name for name in ("minLength", "maxLength") if name in node]
    pattern = _pattern(node, where)
    others = [*(name for name in ("format",) if pattern is not None and name in node), *lengths]
    if pattern is None and "format" in node:
        pattern, others = _format(node["format"], where), lengths
    if pattern is not None and others:
        refuse_schema(
            where,
            "has more than one of pattern, format and lengths; write the lengths into the pattern",
            *others,
        )
    if pattern is not None:
        return {"type": "string", "pattern": pattern}
    if not lengths:
        return {"type": "string"}
    if (high if high is not None else low or 0) < (low or 0):
        refuse_schema(where, "has a minLength above its maxLength")
    return {"type": "string", "pattern": f"^{_CHARACTER}{{{low or 0},{'' if high is None else high}}}$"}


def lower_pattern(pattern: str, keyword: str) -> str:
    """Lowers the expression of strings in `keyword`.

    Raises:
        SchemaRefusal: the expression cannot be enforced.
    """
    try:
        return lower_regex(pattern, in_json=True)
    except InvalidArgument as error:
        raise SchemaRefusal(error.message, (keyword,), {}) from error


def _pattern(node: dict[str, Any], where: str) -> str | None:
    if "pattern" not in node:
        return None
    if not isinstance(node["pattern"], str):
        refuse_schema(where, "has a pattern that is not a string")
    return lower_pattern(node["pattern"], "pattern")


def _format(name: Any, where: str) -> str:
    pattern = FORMATS.get(name) if isinstance(name, str) else None
    if pattern is None:
        supported = ", ".join(sorted(FORMATS))
        refuse_schema(where, f"has the format {shown(name)}; supported formats: {supported}", "format")
    return lower_regex(f"^{pattern}$", in_json=True)


def lower_number(node: dict[str, Any], where: str) -> Any:
    """Lowers a schema of numbers or integers.

    Raises:
        InvalidArgument: names the keyword that cannot be enforced.
    """
    integer = node["type"] == "integer"
    lowered: dict[str, Any] = {"type": node["type"], **_multiple_of(node, where)}
    for key in _BOUNDS:
        if key not in node:
            continue
        name, bound = key, node[key]
        if isinstance(bound, bool) or not isinstance(bound, int | float):
            refuse_schema(where, f"has a {name} that is not a number")
        if abs(bound) > _MAX_BOUND or round(bound, _DECIMALS) != bound:
            refuse_schema(
                where,
                f"has the {name} {shown(bound)}; bounds may be up to 1e15 in size,"
                f" with at most {_DECIMALS} decimals",
                key,
            )
        lower = "inimum" in name
        if integer and bound != int(bound):
            # For integers, a fractional bound means the same inclusive or exclusive.
            name, bound = ("minimum", math.ceil(bound)) if lower else ("maximum", math.floor(bound))
        if name in lowered:
            bound = max(bound, lowered[name]) if lower else min(bound, lowered[name])
        lowered[name] = int(bound) if bound == int(bound) else bound
    return lowered


def _multiple_of(node: dict[str, Any], where: str) -> dict[str, int]:
    """Returns `multipleOf` if xgrammar enforces it, or nothing if it has no effect."""
    if "multipleOf" not in node:
        return {}
    factor, integer = node["multipleOf"], node["type"] == "integer"
    if isinstance(factor, bool) or not isinstance(factor, int | float) or factor <= 0:
        refuse_schema(where, "has a multipleOf that is not a number above 0")
    if integer and factor == 1:
        return {}
    if not integer or factor != int(factor) or factor > _MAX_FACTOR:
        refuse_schema(
            where,
            f"has the multipleOf {shown(factor)} for the type {node['type']};"
            f" only integers up to {_MAX_FACTOR}, for the"
            " type integer, can be enforced",
            "multipleOf",
        )
    if bounds := [name for name in _BOUNDS if name in node]:
        refuse_schema(
            where,
            f"has {bounds[0]} beside multipleOf, which cannot be enforced together;"
            " list the values in an enum",
            "multipleOf",
        )
    return {"multipleOf": int(factor)}
