"""Schemas of texts and numbers."""

import math
from typing import Any, Final, NoReturn

from worker_svc.grammars.lowering.formats import FORMATS
from worker_svc.grammars.lowering.limits import PARAM, refused
from worker_svc.grammars.lowering.regex import lower_regex

# Characters that stand in a JSON string as they are.
_CHARACTER: Final = r'[^"\\\x00-\x1f\x7f]'
# Beyond this, or with more decimals, a bound as an expression is no longer exact.
_LARGEST_BOUND: Final = 1e15
_DECIMALS: Final = 6
_BOUNDS: Final = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
# Beyond it xgrammar ignores multipleOf.
_LARGEST_FACTOR: Final = 1024
_MAX_LENGTH: Final = 100_000


def refuse(where: str, what: str) -> NoReturn:
    """Refuses a schema.

    Raises:
        InvalidArgument: always; it says what is wrong, and at which place.
    """
    shown = where if len(where) <= 80 else f"{where[:80]}…"
    raise refused(f"the JSON schema at {shown} {what}")


def shown(value: Any) -> str:
    """A value for a message, however long it is."""
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:40]}…"


def count(node: dict[str, Any], name: str, where: str) -> int | None:
    """A number of characters, items or properties; ``None`` if it is not given.

    Raises:
        InvalidArgument: if it is none that can be counted to.
    """
    if name not in node:
        return None
    value = node[name]
    if isinstance(value, bool) or not isinstance(value, int | float) or value != int(value) or value < 0:
        refuse(where, f"has a {name} that is not an integer from 0")
    if value > _MAX_LENGTH:
        refuse(where, f"has the {name} {shown(value)}; at most {_MAX_LENGTH} can be counted")
    return int(value)


def string(node: dict[str, Any], where: str) -> Any:
    """A schema of texts, as xgrammar enforces it: each of its keywords becomes an expression.

    Raises:
        InvalidArgument: naming what cannot be enforced.
    """
    low, high = count(node, "minLength", where), count(node, "maxLength", where)
    bounded = low is not None or high is not None
    if sum((bounded, "pattern" in node, "format" in node)) > 1:
        refuse(where, "has more than one of pattern, format and lengths; write the lengths into the pattern")
    if "pattern" in node:
        if not isinstance(node["pattern"], str):
            refuse(where, "has a pattern that is no text")
        return {"type": "string", "pattern": lower_regex(node["pattern"], PARAM, in_json=True)}
    if "format" in node:
        pattern = FORMATS.get(node["format"]) if isinstance(node["format"], str) else None
        if pattern is None:
            refuse(where, f"has the format {shown(node['format'])}; served are {', '.join(sorted(FORMATS))}")
        return {"type": "string", "pattern": lower_regex(f"^{pattern}$", PARAM, in_json=True)}
    if not bounded:
        return {"type": "string"}
    if (high if high is not None else low or 0) < (low or 0):
        refuse(where, "has a minLength above its maxLength")
    return {"type": "string", "pattern": f"^{_CHARACTER}{{{low or 0},{'' if high is None else high}}}$"}


def number(node: dict[str, Any], where: str) -> Any:
    """A schema of numbers, as xgrammar enforces it.

    Raises:
        InvalidArgument: naming what cannot be enforced.
    """
    integer = node["type"] == "integer"
    lowered: dict[str, Any] = {"type": node["type"], **_multiple(node, where)}
    for key in _BOUNDS:
        if key not in node:
            continue
        name, bound = key, node[key]
        if isinstance(bound, bool) or not isinstance(bound, int | float):
            refuse(where, f"has a {name} that is no number")
        if abs(bound) > _LARGEST_BOUND or round(bound, _DECIMALS) != bound:
            refuse(
                where,
                f"has the {name} {shown(bound)}; bounds are enforced up to 1e15 and with {_DECIMALS} decimals",
            )
        lower = "inimum" in name
        if integer and bound != int(bound):
            # Between two integers there is none, exclusive or not.
            name, bound = ("minimum", math.ceil(bound)) if lower else ("maximum", math.floor(bound))
        if name in lowered:
            bound = max(bound, lowered[name]) if lower else min(bound, lowered[name])
        lowered[name] = int(bound) if bound == int(bound) else bound
    return lowered


def _multiple(node: dict[str, Any], where: str) -> dict[str, int]:
    """``multipleOf``, where xgrammar does not ignore it."""
    if "multipleOf" not in node:
        return {}
    factor, integer = node["multipleOf"], node["type"] == "integer"
    if isinstance(factor, bool) or not isinstance(factor, int | float) or factor <= 0:
        refuse(where, "has a multipleOf that is no number above 0")
    if integer and factor == 1:
        return {}
    if not integer or factor != int(factor) or factor > _LARGEST_FACTOR:
        refuse(
            where,
            f"has the multipleOf {shown(factor)} for the type {node['type']}; enforced are integers up to {_LARGEST_FACTOR}"
            " for the type integer",
        )
    if bounds := [name for name in _BOUNDS if name in node]:
        refuse(
            where,
            f"has {bounds[0]} beside multipleOf, which cannot be enforced together; list the values in an enum",
        )
    return {"multipleOf": int(factor)}
