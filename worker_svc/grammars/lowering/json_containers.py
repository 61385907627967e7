"""Lowers schemas of arrays and objects."""

import json
from collections.abc import Callable, Sequence
from typing import Any, Final, NoReturn, TypeAlias

from worker_svc.grammars.lowering.json_scalars import lower_pattern, read_count
from worker_svc.grammars.lowering.refusals import refuse_schema, shown

LowerSubschema: TypeAlias = Callable[[Any, str], Any]
"""Lowers a subschema, given the subschema and its path."""

OBJECT_KEYWORDS: Final = frozenset({
    "properties", "required", "additionalProperties", "patternProperties", "propertyNames", "minProperties",
    "maxProperties", "unevaluatedProperties",
})  # fmt: skip
# Keywords for properties that are not listed.
_REST: Final = ("additionalProperties", "unevaluatedProperties")
# Keywords that describe values without a type.
_TYPELESS: Final = frozenset({"enum", "const", "$ref", "anyOf", "oneOf", "allOf"})
# Marks an absent keyword; None would be a null written by the client.
_ABSENT: Final = object()


def lower_array(node: dict[str, Any], where: str, lower: LowerSubschema) -> Any:
    """Lowers a schema of arrays.

    Raises:
        InvalidArgument: names the keyword that cannot be enforced.
    """
    low, high = read_count(node, "minItems", where), read_count(node, "maxItems", where)
    if node.get("uniqueItems", False) is not False and (high is None or high > 1):
        refuse_schema(where, "has uniqueItems, which cannot be enforced; omit it", "uniqueItems")
    prefix, rest = node.get("prefixItems", []), _first(node, ("items", "unevaluatedItems"))
    if isinstance(rest, list):  # draft 7
        if "prefixItems" in node:
            refuse_schema(where, "has items as a list beside prefixItems; use prefixItems alone", "items")
        prefix, rest = rest, _first(node, ("additionalItems",))
    elif "additionalItems" in node and node["additionalItems"] is not True:
        refuse_schema(where, "has additionalItems without a list of items; use items", "additionalItems")
    if not isinstance(prefix, list):
        refuse_schema(where, "has prefixItems that are not a list")
    if rest is _ABSENT:
        # As with properties: listed items exclude further ones unless the schema allows them.
        rest = not prefix
    if rest is False and not prefix and low:
        refuse_schema(where, "has minItems but allows no items")
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
    return lowered


def lower_object(node: dict[str, Any], where: str, lower: LowerSubschema) -> Any:
    """Lowers a schema of objects.

    Raises:
        InvalidArgument: names the keyword that cannot be enforced.
    """
    low, high = read_count(node, "minProperties", where), read_count(node, "maxProperties", where)
    for name in ("patternProperties", "propertyNames"):
        if name in node:
            return _lower_described_keys(name, node, where, high, lower)
    properties, required = _listed(node, where)
    rest = _first(node, _REST)
    missing = [name for name in required if name not in properties]
    if rest is _ABSENT:
        rest = not properties
        if missing and properties:
            _refuse_missing(missing, where, "additionalProperties")
    elif missing and rest is False:
        _refuse_missing(missing, where)
    if rest is not False and (low or 0) > max(1, len(set(required))):
        refuse_schema(
            where,
            "has minProperties and allows further properties, which cannot be enforced together",
            "minProperties",
        )
    # An optional property with the schema false can never appear, so it is dropped.
    every = {
        name: schema
        for name, schema in {**properties, **dict.fromkeys(missing, rest)}.items()
        if schema is not False or name in required
    }
    if rest is not False:
        _check_open(properties, every, where)
    lowered: dict[str, Any] = {"type": "object"}
    if every:
        lowered["properties"] = {name: lower(schema, f"{where}.{name}") for name, schema in every.items()}
    if required:
        lowered["required"] = list(dict.fromkeys(required))
    lowered["additionalProperties"] = rest is not False and (
        lower(rest, f"{where}.additionalProperties") or True
    )
    if low:
        lowered["minProperties"] = low
    if high is not None:
        lowered["maxProperties"] = high
    return lowered


def _listed(node: dict[str, Any], where: str) -> tuple[dict[str, Any], list[str]]:
    """Returns an object schema's properties and the names that it requires."""
    properties, required = node.get("properties", {}), node.get("required", [])
    if not isinstance(properties, dict):
        refuse_schema(where, "has properties that are not an object")
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        refuse_schema(where, "has a required that is not a list of names")
    return properties, required


def _check_open(properties: dict[str, Any], every: dict[str, Any], where: str) -> None:
    """Refuses an object that allows further properties if they could not be told from some of its own.

    It can be enforced without further properties.
    """
    closing: dict[str, Any] = {"additionalProperties": False}
    escaped = [name for name in every if json.dumps(name, ensure_ascii=False)[1:-1] != name]
    if escaped:
        refuse_schema(
            where,
            f"has the property {shown(escaped[0])}, a name that JSON must escape,"
            " and allows further properties, which"
            " cannot be enforced together; add additionalProperties: false",
            *_REST,
            replacement=closing,
        )
    if False in properties.values():
        refuse_schema(
            where,
            "forbids a property and allows further ones, which cannot be enforced together",
            *_REST,
            replacement=closing,
        )


def _refuse_missing(missing: Sequence[str], where: str, *keywords: str) -> NoReturn:
    """Refuses requirements of names that are not listed; a schema that may allow them can be opened."""
    what = f"requires {missing[0]!r}, which is not among its properties"
    refuse_schema(where, what, *keywords, replacement={"additionalProperties": True})


def _lower_described_keys(
    name: str, node: dict[str, Any], where: str, high: int | None, lower: LowerSubschema
) -> Any:
    """Lowers an object schema with `patternProperties` or `propertyNames` instead of listed properties."""
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
        # Listed properties say more about the output than a description of names.
        dropped = [name] if "properties" in node else others
        refuse_schema(where, f"has {others[0]} beside {name}, which cannot be enforced together", *dropped)
    lowered: dict[str, Any] = {"type": "object"}
    if high is not None:
        lowered["maxProperties"] = high
    value = node[name]
    if not isinstance(value, dict):
        refuse_schema(where, f"has {name} that is not an object")
    if name == "patternProperties":
        if len(value) != 1:
            refuse_schema(
                where, "has several patternProperties, and a key might match two of them; use one", name
            )
        ((pattern, schema),) = value.items()
        lowered[name] = {lower_pattern(pattern, name): lower(schema, f"{where}.{pattern}") or True}
        lowered["additionalProperties"] = False
        return lowered
    # Keys are always strings, with or without a type.
    described = value if _TYPELESS & value.keys() else {"type": "string", **value}
    names = lower(described, f"{where}.propertyNames")
    if names.get("type") != "string" and not all(isinstance(each, str) for each in names.get("enum", [0])):
        refuse_schema(where, "has propertyNames that are not a schema of strings")
    rest = node.get("additionalProperties", True)
    if rest is False:
        refuse_schema(where, "has propertyNames but allows no properties", name)
    if names != {"type": "string"}:
        lowered[name] = names
    lowered["additionalProperties"] = lower(rest, f"{where}.additionalProperties") or True
    return lowered


def _first(node: dict[str, Any], names: Sequence[str]) -> Any:
    """Returns the value of the first keyword of `names` that `node` has, else `_ABSENT`."""
    return next((node[name] for name in names if name in node), _ABSENT)
