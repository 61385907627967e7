"""JSON Schema (2020-12, and what draft 7 writes differently) in the part of it that xgrammar 0.2.8 enforces to the letter.

xgrammar ignores keywords that it does not know, many combinations of those that it does, and whatever stands beside ``$ref``, ``const``,
``enum`` or a composition. So a schema is rewritten: each keyword either comes out in a form whose meaning it keeps (a length becomes an
expression, a format one of :mod:`~worker_svc.grammars.formats`) or is refused by name. What the result allows, the schema allows; it may
allow less: an object with ``properties`` has no others unless ``additionalProperties`` is given, as with OpenAI's strict schemas.
"""

import math
from dataclasses import dataclass
from typing import Any, Final, NoReturn

from protos.errors import InvalidArgument
from worker_svc.grammars.formats import FORMATS
from worker_svc.grammars.one_of import are_disjoint, resolve
from worker_svc.grammars.regex import check_regex

PARAM: Final = "structured_output"

_ANNOTATIONS: Final = frozenset({
    "title", "description", "default", "example", "examples", "$comment", "$schema", "deprecated", "readOnly", "writeOnly",
    "contentEncoding", "contentMediaType", "contentSchema", "discriminator", "$defs", "definitions",
})  # fmt: skip
_BY_TYPE: Final[dict[str, frozenset[str]]] = {
    "string": frozenset({"minLength", "maxLength", "pattern", "format"}),
    "integer": frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}),
    "number": frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}),
    "boolean": frozenset(),
    "null": frozenset(),
    "array": frozenset({
        "items", "prefixItems", "additionalItems", "minItems", "maxItems", "uniqueItems", "unevaluatedItems",
    }),
    "object": frozenset({
        "properties", "required", "additionalProperties", "patternProperties", "propertyNames", "minProperties",
        "maxProperties", "unevaluatedProperties",
    }),
}  # fmt: skip
# In place of a type, and with nothing but annotations beside them.
_ALONE: Final = ("$ref", "anyOf", "oneOf", "allOf")
# Characters that stand in a JSON string as they are.
_CHARACTER: Final = r'[^"\\\x00-\x1f\x7f]'
# Beyond this, or with more decimals, a bound as an expression is no longer exact.
_LARGEST_BOUND: Final = 1e15
_DECIMALS: Final = 6
MAX_LENGTH: Final = 100_000


@dataclass
class Limits:
    """How much of a schema is left to be compiled; shared by all schemas of one request."""

    subschemas: int = 4000
    values: int = 10_000
    """Of ``enum``."""


def lower_schema(schema: Any, limits: Limits) -> Any:
    """A schema that xgrammar enforces and that allows nothing which ``schema`` forbids.

    Raises:
        InvalidArgument: naming the first keyword that cannot be enforced, and where it stands.
    """
    return _Lowering(schema, limits).run()


class _Lowering:
    def __init__(self, schema: Any, limits: Limits) -> None:
        self._root = schema
        self._limits = limits
        self._wanted: dict[str, str] = {}
        """Definitions that are referred to, by reference: the names under which they come out."""
        self._queue: list[str] = []

    def run(self) -> Any:
        if not isinstance(self._root, dict | bool):
            _refuse("$", "must be an object (or true)")
        lowered = self._lower(self._root, "$")
        definitions = {}
        while self._queue:
            reference = self._queue.pop()
            definitions[self._wanted[reference]] = self._lower(resolve(self._root, reference), reference)
        return {**lowered, "$defs": definitions} if definitions else lowered

    def _lower(self, node: Any, where: str) -> Any:
        self._limits.subschemas -= 1
        if self._limits.subschemas < 0:
            _refuse(where, "is one subschema too many; describe less of the output")
        if node is True or node == {}:
            return {}
        if node is False:
            _refuse(where, "is false, which nothing matches; leave the property out")
        if not isinstance(node, dict):
            _refuse(where, "must be a schema: an object, or true")
        keys = {
            key
            for key in node
            if key not in _ANNOTATIONS and not key.startswith("x-") and (key != "$id" or where != "$")
        }
        if not keys:
            return {}
        for name in _ALONE:
            if name in keys:
                others = sorted(keys - {name})
                if others:
                    _refuse(
                        where,
                        f"has {others[0]} beside {name}, which cannot be enforced together; move it inside",
                    )
                return self._alone(name, node[name], where)
        if "const" in keys or "enum" in keys:
            return self._values(node, keys, where)
        return self._typed(node, keys, where)

    # ---- instead of a type ---------------------------------------------------------------------------------------------------------

    def _alone(self, name: str, value: Any, where: str) -> Any:
        if name == "$ref":
            return {"$ref": f"#/$defs/{self._definition(value, where)}"}
        if not isinstance(value, list) or not value:
            _refuse(where, f"has a {name} that is not a list of at least one schema")
        if name == "allOf" and len(value) > 1:
            _refuse(where, "has an allOf of several schemas, which cannot be enforced; merge them into one")
        if name == "oneOf" and not are_disjoint(self._root, value):
            _refuse(
                where,
                "has a oneOf whose schemas may overlap, which cannot be enforced; use anyOf, different types, or a required"
                " property with a different const in each",
            )
        branches = [self._lower(branch, f"{where}.{name}[{index}]") for index, branch in enumerate(value)]
        return branches[0] if name == "allOf" else {"anyOf": branches}

    def _definition(self, reference: Any, where: str) -> str:
        """The name under which what a reference means comes out."""
        if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
            _refuse(
                where,
                f"has the $ref {reference!r}; only references into the schema itself (#/$defs/…) are followed",
            )
        try:
            target = resolve(self._root, reference)
        except LookupError:
            _refuse(where, f"has the $ref {reference!r}, which leads nowhere")
        if reference not in self._wanted:
            self._refuse_circle(target, reference)
            self._wanted[reference] = f"d{len(self._wanted)}"
            self._queue.append(reference)
        return self._wanted[reference]

    def _refuse_circle(self, target: Any, reference: str) -> None:
        """A definition that is itself before it consumes anything means nothing."""
        open_, seen = [target], {reference}
        while open_:
            node = open_.pop()
            if not isinstance(node, dict):
                continue
            for name in ("anyOf", "oneOf", "allOf"):
                if isinstance(node.get(name), list):
                    open_ += node[name]
            to = node.get("$ref")
            if not isinstance(to, str):
                continue
            if to == reference:
                _refuse(reference, "refers to itself without an object or array in between")
            if to not in seen:
                seen.add(to)
                try:
                    open_.append(resolve(self._root, to))
                except LookupError:
                    continue  # told when that reference's turn comes

    def _values(self, node: dict[str, Any], keys: set[str], where: str) -> Any:
        others = keys - {"const", "enum", "type"}
        if others:
            _refuse(where, f"has {min(others)} beside const or enum; list the values that are meant")
        values = [node["const"]] if "const" in keys else node["enum"]
        if not isinstance(values, list) or not values:
            _refuse(where, "has an enum that is not a list of at least one value")
        if "const" in keys and "enum" in keys:
            _refuse(where, "has both const and enum; keep one")
        if "type" in keys:
            types = self._types(node["type"], where)
            if not all(any(_is_a(value, name) for name in types) for value in values):
                _refuse(where, "has a const or an enum with a value that is not of its type")
        self._limits.values -= len(values)
        if self._limits.values < 0:
            _refuse(where, "has too many enum values; describe less of the output")
        return {"enum": values}

    # ---- types ---------------------------------------------------------------------------------------------------------------------

    def _types(self, value: Any, where: str) -> list[str]:
        types = value if isinstance(value, list) else [value]
        if not types or not all(isinstance(name, str) and name in _BY_TYPE for name in types):
            _refuse(
                where, f"has the type {value!r}; it must be one of {', '.join(_BY_TYPE)}, or a list of them"
            )
        return types

    def _typed(self, node: dict[str, Any], keys: set[str], where: str) -> Any:
        asked = keys - {"type"}
        if "type" in keys:
            types = self._types(node["type"], where)
        else:
            families = [name for name, words in _BY_TYPE.items() if asked & words and name != "integer"]
            if len(families) != 1:
                unknown = sorted(asked - frozenset[str]().union(*_BY_TYPE.values()))
                _refuse(where, f"has {unknown[0]}, which cannot be enforced" if unknown else "needs a type")
            types = families
        served = frozenset[str]().union(*(_BY_TYPE[name] for name in types))
        if unserved := sorted(asked - served):
            known = any(unserved[0] in words for words in _BY_TYPE.values())
            why = f"which says nothing about the type {types[0]}" if known else "which cannot be enforced"
            _refuse(where, f"has {unserved[0]}, {why}; leave it out")
        lower = {"string": self._string, "integer": self._number, "number": self._number,
                 "array": self._array, "object": self._object}  # fmt: skip
        if "number" in types:
            types = [name for name in types if name != "integer"]  # every integer is a number
        branches = [
            lower[name]({**node, "type": name}, where) if name in lower else {"type": name}
            for name in dict.fromkeys(types)
        ]
        return branches[0] if len(branches) == 1 else {"anyOf": branches}

    def _string(self, node: dict[str, Any], where: str) -> Any:
        low, high = self._count(node, "minLength", where), self._count(node, "maxLength", where)
        bounded = low is not None or high is not None
        if sum((bounded, "pattern" in node, "format" in node)) > 1:
            _refuse(
                where, "has more than one of pattern, format and lengths; write the lengths into the pattern"
            )
        if "pattern" in node:
            if not isinstance(node["pattern"], str):
                _refuse(where, "has a pattern that is no text")
            check_regex(node["pattern"], PARAM, in_json=True)
            return {"type": "string", "pattern": node["pattern"]}
        if "format" in node:
            pattern = FORMATS.get(node["format"]) if isinstance(node["format"], str) else None
            if pattern is None:
                _refuse(where, f"has the format {node['format']!r}; served are {', '.join(sorted(FORMATS))}")
            return {"type": "string", "pattern": f"^{pattern}$"}
        if not bounded:
            return {"type": "string"}
        if (high if high is not None else low or 0) < (low or 0):
            _refuse(where, "has a minLength above its maxLength")
        return {"type": "string", "pattern": f"^{_CHARACTER}{{{low or 0},{'' if high is None else high}}}$"}

    def _number(self, node: dict[str, Any], where: str) -> Any:
        integer = node["type"] == "integer"
        if "multipleOf" in node and not (integer and node["multipleOf"] == 1):
            _refuse(
                where, "has multipleOf, which cannot be enforced; leave it out, or list values in an enum"
            )
        lowered: dict[str, Any] = {"type": node["type"]}
        for key in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"):
            if key not in node:
                continue
            name, bound = key, node[key]
            if isinstance(bound, bool) or not isinstance(bound, int | float) or not math.isfinite(bound):
                _refuse(where, f"has a {name} that is no number")
            if abs(bound) > _LARGEST_BOUND or round(bound, _DECIMALS) != bound:
                _refuse(
                    where,
                    f"has the {name} {bound!r}; bounds are enforced up to 1e15 and with {_DECIMALS} decimals",
                )
            lower = "inimum" in name
            if integer and bound != int(bound):
                # Between two integers there is none, exclusive or not.
                name, bound = ("minimum", math.ceil(bound)) if lower else ("maximum", math.floor(bound))
            if name in lowered:
                bound = max(bound, lowered[name]) if lower else min(bound, lowered[name])
            lowered[name] = int(bound) if bound == int(bound) else bound
        return lowered

    def _array(self, node: dict[str, Any], where: str) -> Any:
        low, high = self._count(node, "minItems", where), self._count(node, "maxItems", where)
        if node.get("uniqueItems", False) is not False and (high is None or high > 1):
            _refuse(where, "has uniqueItems, which cannot be enforced; leave it out")
        prefix, rest = node.get("prefixItems", []), node.get("items", node.get("unevaluatedItems"))
        if isinstance(rest, list):  # draft 7
            if "prefixItems" in node:
                _refuse(where, "has items as a list beside prefixItems; write prefixItems alone")
            prefix, rest = rest, node.get("additionalItems")
        elif "additionalItems" in node and node["additionalItems"] is not True:
            _refuse(where, "has additionalItems without a list of items; write items")
        if not isinstance(prefix, list):
            _refuse(where, "has prefixItems that are not a list")
        if rest is None:
            # As with properties: what is listed is all there is.
            rest = not prefix
        lowered: dict[str, Any] = {"type": "array"}
        if prefix:
            lowered["prefixItems"] = [
                self._lower(item, f"{where}.prefixItems[{index}]") for index, item in enumerate(prefix)
            ]
        lowered["items"] = False if rest is False else (self._lower(rest, f"{where}.items") or True)
        if low is not None:
            lowered["minItems"] = low
        if high is not None:
            lowered["maxItems"] = high
        if rest is False and not prefix and low:
            _refuse(where, "has minItems and no items that are allowed")
        return lowered

    def _object(self, node: dict[str, Any], where: str) -> Any:
        low, high = self._count(node, "minProperties", where), self._count(node, "maxProperties", where)
        for name in ("patternProperties", "propertyNames"):
            if name in node:
                return self._open_object(name, node, where, high)
        properties, required = self._listed(node, where)
        rest = node.get("additionalProperties", node.get("unevaluatedProperties"))
        if rest is None:
            rest = not properties
        missing = [name for name in required if name not in properties]
        if missing and rest is False:
            _refuse(where, f"requires {missing[0]!r}, which is not among its properties")
        if rest is not False and (low or 0) > max(1, len(set(required))):
            _refuse(
                where, "has minProperties and allows further properties, which cannot be enforced together"
            )
        # One that nothing matches is simply not there.
        every = {
            name: schema
            for name, schema in {**properties, **dict.fromkeys(missing, rest)}.items()
            if schema is not False or name in required
        }
        lowered: dict[str, Any] = {"type": "object"}
        if every:
            lowered["properties"] = {
                name: self._lower(schema, f"{where}.{name}") for name, schema in every.items()
            }
        if required:
            lowered["required"] = list(dict.fromkeys(required))
        if rest is not False and False in properties.values():
            _refuse(where, "forbids a property and allows further ones, which cannot be enforced together")
        lowered["additionalProperties"] = rest is not False and (
            self._lower(rest, f"{where}.additionalProperties") or True
        )
        if low:
            lowered["minProperties"] = low
        if high is not None:
            lowered["maxProperties"] = high
        return lowered

    def _listed(self, node: dict[str, Any], where: str) -> tuple[dict[str, Any], list[str]]:
        """An object's properties, and the names of those that it must have."""
        properties, required = node.get("properties", {}), node.get("required", [])
        if not isinstance(properties, dict):
            _refuse(where, "has properties that are not an object")
        if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
            _refuse(where, "has a required that is not a list of names")
        return properties, required

    def _open_object(self, name: str, node: dict[str, Any], where: str, high: int | None) -> Any:
        """One whose keys are described instead of listed."""
        allowed = {"type", name, "maxProperties"} | (
            {"additionalProperties"} if name == "propertyNames" else set()
        )
        closed = name == "patternProperties" and node.get("additionalProperties") is False
        others = [
            key
            for key in node
            if key in _BY_TYPE["object"] - allowed and not (key == "additionalProperties" and closed)
        ]
        if others:
            _refuse(where, f"has {others[0]} beside {name}, which cannot be enforced together")
        lowered: dict[str, Any] = {"type": "object"}
        if high is not None:
            lowered["maxProperties"] = high
        value = node[name]
        if not isinstance(value, dict):
            _refuse(where, f"has {name} that is not an object")
        if name == "patternProperties":
            if len(value) != 1:
                _refuse(where, "has several patternProperties, of which a key might match two; write one")
            ((pattern, schema),) = value.items()
            check_regex(pattern, PARAM, in_json=True)
            lowered[name] = {pattern: self._lower(schema, f"{where}.{pattern}") or True}
            lowered["additionalProperties"] = False
            return lowered
        names = self._lower(
            {"type": "string", **value} if "enum" not in value else value, f"{where}.propertyNames"
        )
        if names.get("type") != "string" and not all(
            isinstance(each, str) for each in names.get("enum", [0])
        ):
            _refuse(where, "has propertyNames that are not a schema of texts")
        rest = node.get("additionalProperties", True)
        if rest is False:
            _refuse(where, "has propertyNames and no properties that are allowed")
        if names != {"type": "string"}:
            lowered[name] = names
        lowered["additionalProperties"] = self._lower(rest, f"{where}.additionalProperties") or True
        return lowered

    def _count(self, node: dict[str, Any], name: str, where: str) -> int | None:
        value = node.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or value != int(value) or value < 0:
            _refuse(where, f"has a {name} that is not an integer from 0")
        if value > MAX_LENGTH:
            _refuse(where, f"has the {name} {value}; at most {MAX_LENGTH} can be counted")
        return int(value)


def _is_a(value: Any, name: str) -> bool:
    if isinstance(value, bool) or value is None:
        return name == ("null" if value is None else "boolean")
    if isinstance(value, int | float):
        return name == "number" or (name == "integer" and value == int(value))
    kinds: dict[str, type] = {"string": str, "array": list, "object": dict}
    return name in kinds and isinstance(value, kinds[name])


def _refuse(where: str, what: str) -> NoReturn:
    shown = where if len(where) <= 80 else f"{where[:80]}…"
    raise InvalidArgument(f"the JSON schema at {shown} {what}", param=PARAM)
