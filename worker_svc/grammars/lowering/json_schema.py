"""JSON Schema (2020-12, and what draft 7 writes differently) in the part of it that xgrammar 0.2.8 enforces to the letter.

xgrammar ignores keywords that it does not know, many combinations of those that it does, and whatever stands beside ``$ref``, ``const``,
``enum`` or a composition. So a schema is rewritten: each keyword either comes out in a form whose meaning it keeps (a length becomes an
expression, a format one of :mod:`~worker_svc.grammars.lowering.formats`) or is refused by name. What the result allows, the schema allows; it may
allow less: an object with ``properties`` has no others unless ``additionalProperties`` is given, as with OpenAI's strict schemas.
"""

from dataclasses import dataclass
from typing import Any, Final

from worker_svc.grammars.lowering.json_containers import OBJECT_KEYWORDS, array, mapping
from worker_svc.grammars.lowering.json_scalars import number, refuse, shown, string
from worker_svc.grammars.lowering.one_of import Exclusion
from worker_svc.grammars.lowering.references import References

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
    "object": OBJECT_KEYWORDS,
}  # fmt: skip
# In place of a type, and with nothing but annotations beside them.
_ALONE: Final = ("$ref", "anyOf", "oneOf", "allOf")


@dataclass
class Limits:
    """How much of a schema is left to be compiled; shared by all schemas of one request."""

    subschemas: int = 4000
    values: int = 10_000
    """Of ``enum``."""
    comparisons: int = 200_000
    """Of values, to see whether the schemas of a ``oneOf`` exclude one another."""


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
        self._references = References(schema)
        self._exclusion = Exclusion(self._references)
        self._wanted: dict[str, str] = {}
        """Definitions that are referred to, by reference: the names under which they come out."""
        self._queue: list[str] = []

    def run(self) -> Any:
        if not isinstance(self._root, dict | bool):
            refuse("$", "must be an object (or true)")
        lowered = self._lower(self._root, "$")
        definitions = {}
        while self._queue:
            reference = self._queue.pop()
            definitions[self._wanted[reference]] = self._lower(self._references.resolve(reference), reference)
        return {**lowered, "$defs": definitions} if definitions else lowered

    def _lower(self, node: Any, where: str) -> Any:
        self._limits.subschemas -= 1
        if self._limits.subschemas < 0:
            refuse(where, "is one subschema too many; describe less of the output")
        if node is True or node == {}:
            return {}
        if node is False:
            refuse(where, "is false, which nothing matches; leave the property out")
        if not isinstance(node, dict):
            refuse(where, "must be a schema: an object, or true")
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
                    refuse(
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
            refuse(where, f"has a {name} that is not a list of at least one schema")
        if name == "allOf" and len(value) > 1:
            refuse(where, "has an allOf of several schemas, which cannot be enforced; merge them into one")
        if name == "oneOf" and not self._exclude(value, where):
            refuse(
                where,
                "has a oneOf whose schemas may overlap, which cannot be enforced; use anyOf, different types, or a required"
                " property with a different const in each",
            )
        branches = [self._lower(branch, f"{where}.{name}[{index}]") for index, branch in enumerate(value)]
        return branches[0] if name == "allOf" else {"anyOf": branches}

    def _definition(self, reference: Any, where: str) -> str:
        """The name under which what a reference means comes out."""
        if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
            refuse(
                where,
                f"has the $ref {shown(reference)}; only references into the schema itself (#/$defs/…) are followed",
            )
        try:
            self._references.resolve(reference)
        except LookupError:
            refuse(where, f"has the $ref {shown(reference)}, which leads nowhere")
        if reference not in self._wanted:
            if (circle := self._references.circle(reference)) is not None:
                refuse(circle, "refers to itself without an object or array in between")
            self._wanted[reference] = f"d{len(self._wanted)}"
            self._queue.append(reference)
        return self._wanted[reference]

    def _exclude(self, branches: list[Any], where: str) -> bool:
        """Whether no value matches two of the schemas."""
        left = self._limits.comparisons
        disjoint, spent = self._exclusion.are_disjoint(branches, left)
        self._limits.comparisons = left - spent
        if spent > left:
            refuse(where, "has a oneOf of too many schemas and values to see whether they overlap; use anyOf")
        return disjoint

    def _values(self, node: dict[str, Any], keys: set[str], where: str) -> Any:
        others = keys - {"const", "enum", "type"}
        if others:
            refuse(where, f"has {min(others)} beside const or enum; list the values that are meant")
        values = [node["const"]] if "const" in keys else node["enum"]
        if not isinstance(values, list) or not values:
            refuse(where, "has an enum that is not a list of at least one value")
        if "const" in keys and "enum" in keys:
            refuse(where, "has both const and enum; keep one")
        if "type" in keys:
            types = self._types(node["type"], where)
            if not all(any(_is_a(value, name) for name in types) for value in values):
                refuse(where, "has a const or an enum with a value that is not of its type")
        self._limits.values -= len(values)
        if self._limits.values < 0:
            refuse(where, "has too many enum values; describe less of the output")
        return {"enum": values}

    # ---- types ---------------------------------------------------------------------------------------------------------------------

    def _types(self, value: Any, where: str) -> list[str]:
        types = value if isinstance(value, list) else [value]
        if not types or not all(isinstance(name, str) and name in _BY_TYPE for name in types):
            refuse(
                where,
                f"has the type {shown(value)}; it must be one of {', '.join(_BY_TYPE)}, or a list of them",
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
                refuse(where, f"has {unknown[0]}, which cannot be enforced" if unknown else "needs a type")
            types = families
        served = frozenset[str]().union(*(_BY_TYPE[name] for name in types))
        if unserved := sorted(asked - served):
            known = any(unserved[0] in words for words in _BY_TYPE.values())
            why = f"which says nothing about the type {types[0]}" if known else "which cannot be enforced"
            refuse(where, f"has {unserved[0]}, {why}; leave it out")
        if "number" in types:
            types = [name for name in types if name != "integer"]  # every integer is a number
        branches = [self._of_type({**node, "type": name}, name, where) for name in dict.fromkeys(types)]
        return branches[0] if len(branches) == 1 else {"anyOf": branches}

    def _of_type(self, node: dict[str, Any], name: str, where: str) -> Any:
        match name:
            case "string":
                return string(node, where)
            case "integer" | "number":
                return number(node, where)
            case "array":
                return array(node, where, self._lower)
            case "object":
                return mapping(node, where, self._lower)
            case _:
                return {"type": name}


def _is_a(value: Any, name: str) -> bool:
    if isinstance(value, bool) or value is None:
        return name == ("null" if value is None else "boolean")
    if isinstance(value, int | float):
        return name == "number" or (name == "integer" and value == int(value))
    kinds: dict[str, type] = {"string": str, "array": list, "object": dict}
    return name in kinds and isinstance(value, kinds[name])
