"""Schemas of arrays and objects."""

import json
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeAlias

from worker_svc.grammars.lowering.json_scalars import count, refuse, shown
from worker_svc.grammars.lowering.limits import PARAM
from worker_svc.grammars.lowering.regex import lower_regex

Lower: TypeAlias = Callable[[Any, str], Any]
"""Lowers a subschema, given where it stands."""

OBJECT_KEYWORDS: Final = frozenset({
    "properties", "required", "additionalProperties", "patternProperties", "propertyNames", "minProperties",
    "maxProperties", "unevaluatedProperties",
})  # fmt: skip
# What describes values by more than a type.
_VALUES: Final = frozenset({"enum", "const", "$ref", "anyOf", "oneOf", "allOf"})
# As null is a value that somebody wrote.
_ABSENT: Final = object()


def array(node: dict[str, Any], where: str, lower: Lower) -> Any:
    """A schema of arrays, as xgrammar enforces it.

    Raises:
        InvalidArgument: naming what cannot be enforced.
    """
    low, high = count(node, "minItems", where), count(node, "maxItems", where)
    if node.get("uniqueItems", False) is not False and (high is None or high > 1):
        refuse(where, "has uniqueItems, which cannot be enforced; leave it out")
    prefix, rest = node.get("prefixItems", []), _first(node, ("items", "unevaluatedItems"))
    if isinstance(rest, list):  # draft 7
        if "prefixItems" in node:
            refuse(where, "has items as a list beside prefixItems; write prefixItems alone")
        prefix, rest = rest, _first(node, ("additionalItems",))
    elif "additionalItems" in node and node["additionalItems"] is not True:
        refuse(where, "has additionalItems without a list of items; write items")
    if not isinstance(prefix, list):
        refuse(where, "has prefixItems that are not a list")
    if rest is _ABSENT:
        # As with properties: what is listed is all there is.
        rest = not prefix
    lowered: dict[str, Any] = {"type": "array"}
    if prefix:
        lowered["prefixItems"] = [
            lower(item, f"{where}.prefixItems[{index}]") for index, item in enumerate(prefix)
        ]
    lowered["items"] = False if rest is False else (lower(rest, f"{where}.items") or True)
    if low is not None:
        lowered["minItems"] = low
    if high is not None:
        lowered["maxItems"] = high
    if rest is False and not prefix and low:
        refuse(where, "has minItems and no items that are allowed")
    return lowered


def mapping(node: dict[str, Any], where: str, lower: Lower) -> Any:
    """A schema of objects, as xgrammar enforces it.

    Raises:
        InvalidArgument: naming what cannot be enforced.
    """
    low, high = count(node, "minProperties", where), count(node, "maxProperties", where)
    for name in ("patternProperties", "propertyNames"):
        if name in node:
            return _open_mapping(name, node, where, high, lower)
    properties, required = _listed(node, where)
    rest = _first(node, ("additionalProperties", "unevaluatedProperties"))
    if rest is _ABSENT:
        rest = not properties
    missing = [name for name in required if name not in properties]
    if missing and rest is False:
        refuse(where, f"requires {missing[0]!r}, which is not among its properties")
    if rest is not False and (low or 0) > max(1, len(set(required))):
        refuse(where, "has minProperties and allows further properties, which cannot be enforced together")
    # One that nothing matches is simply not there.
    every = {
        name: schema
        for name, schema in {**properties, **dict.fromkeys(missing, rest)}.items()
        if schema is not False or name in required
    }
    if rest is not False and (
        escaped := [name for name in every if json.dumps(name, ensure_ascii=False)[1:-1] != name]
    ):
        refuse(
            where,
            f"has the property {shown(escaped[0])}, which JSON has to escape, and allows further ones, which cannot be"
            " enforced together; add additionalProperties: false",
        )
    lowered: dict[str, Any] = {"type": "object"}
    if every:
        lowered["properties"] = {name: lower(schema, f"{where}.{name}") for name, schema in every.items()}
    if required:
        lowered["required"] = list(dict.fromkeys(required))
    if rest is not False and False in properties.values():
        refuse(where, "forbids a property and allows further ones, which cannot be enforced together")
    lowered["additionalProperties"] = rest is not False and (
        lower(rest, f"{where}.additionalProperties") or True
    )
    if low:
        lowered["minProperties"] = low
    if high is not None:
        lowered["maxProperties"] = high
    return lowered


def _listed(node: dict[str, Any], where: str) -> tuple[dict[str, Any], list[str]]:
    """An object's properties, and the names of those that it must have."""
    properties, required = node.get("properties", {}), node.get("required", [])
    if not isinstance(properties, dict):
        refuse(where, "has properties that are not an object")
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        refuse(where, "has a required that is not a list of names")
    return properties, required


def _open_mapping(name: str, node: dict[str, Any], where: str, high: int | None, lower: Lower) -> Any:
    """One whose keys are described instead of listed."""
    allowed = {"type", name, "maxProperties"} | (
        {"additionalProperties"} if name == "propertyNames" else set()
    )
    closed = name == "patternProperties" and node.get("additionalProperties") is False
    others = [
        key
        for key in node
        if key in OBJECT_KEYWORDS - allowed and not (key == "additionalProperties" and closed)
    ]
    if others:
        refuse(where, f"has {others[0]} beside {name}, which cannot be enforced together")
    lowered: dict[str, Any] = {"type": "object"}
    if high is not None:
        lowered["maxProperties"] = high
    value = node[name]
    if not isinstance(value, dict):
        refuse(where, f"has {name} that is not an object")
    if name == "patternProperties":
        if len(value) != 1:
            refuse(where, "has several patternProperties, of which a key might match two; write one")
        ((pattern, schema),) = value.items()
        lowered[name] = {
            lower_regex(pattern, PARAM, in_json=True): lower(schema, f"{where}.{pattern}") or True
        }
        lowered["additionalProperties"] = False
        return lowered
    # Keys are texts, whether it says so or not.
    described = value if _VALUES & value.keys() else {"type": "string", **value}
    names = lower(described, f"{where}.propertyNames")
    if names.get("type") != "string" and not all(isinstance(each, str) for each in names.get("enum", [0])):
        refuse(where, "has propertyNames that are not a schema of texts")
    rest = node.get("additionalProperties", True)
    if rest is False:
        refuse(where, "has propertyNames and no properties that are allowed")
    if names != {"type": "string"}:
        lowered[name] = names
    lowered["additionalProperties"] = lower(rest, f"{where}.additionalProperties") or True
    return lowered


def _first(node: dict[str, Any], names: Sequence[str]) -> Any:
    """The value of the first keyword that is there."""
    return next((node[name] for name in names if name in node), _ABSENT)
