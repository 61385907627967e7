"""Lowers JSON Schema (2020-12, and draft 7's spellings) to the subset that xgrammar 0.2.8 enforces exactly.

xgrammar ignores keywords that it does not know, many combinations of known ones, and anything beside `$ref`,
`const`, `enum` or a composition. So each keyword is either rewritten to a form that xgrammar enforces (a
length becomes an expression, a format one of `formats`) or refused by name. The result never allows more than
the schema. It may allow less: an object with `properties` has no others unless `additionalProperties` is
given, as in OpenAI's strict schemas.
"""

from dataclasses import dataclass
from typing import Any, Final

from worker_svc.grammars.lowering.json_containers import OBJECT_KEYWORDS, lower_array, lower_object
from worker_svc.grammars.lowering.json_scalars import lower_number, lower_string
from worker_svc.grammars.lowering.one_of import DisjointnessChecker
from worker_svc.grammars.lowering.references import References
from worker_svc.grammars.lowering.refusals import refuse_schema, shown

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
# These replace a type; only annotations may stand beside them.
_STANDALONE: Final = ("$ref", "anyOf", "oneOf", "allOf")
_COMPOSITIONS: Final = frozenset(_STANDALONE) - {"$ref"}
# These say more about a value than a composition beside them.
_DESCRIPTIONS: Final = frozenset({"properties", "items", "prefixItems", "const", "enum"})
_KNOWN: Final = _ANNOTATIONS.union({"type", "const", "enum"}, _STANDALONE, *_BY_TYPE.values())
# Keywords of JSON Schema that cannot be enforced. A schema's other words are annotations.
_UNSERVED: Final = frozenset({
    "$anchor", "$dynamicAnchor", "$dynamicRef", "$id", "$recursiveAnchor", "$recursiveRef", "contains", "dependencies",
    "dependentRequired", "dependentSchemas", "else", "if", "maxContains", "minContains", "not", "then",
    "unevaluatedProperties",
})  # fmt: skip


@dataclass
class SchemaBudget:
    """Remaining size budget, shared by all schemas of one request."""

    subschemas: int = 4000
    """Subschemas that may still be lowered."""
    values: int = 10_000
    """`enum` values that may still be listed."""
    comparisons: int = 200_000
    """Values that may still be compared to decide whether the schemas of a `oneOf` are disjoint."""


def lower_schema(schema: Any, budget: SchemaBudget) -> Any:
    """Returns a schema that xgrammar enforces and that allows nothing `schema` forbids.

    Args:
        schema: the client's.
        budget: bounds the effort.

    Raises:
        InvalidArgument: names the first keyword that cannot be enforced, and its path.
    """
    return _Lowering(schema, budget).run()


class _Lowering:
    def __init__(self, schema: Any, budget: SchemaBudget) -> None:
        self._root = schema
        self._budget = budget
        self._references = References(schema)
        self._disjointness = DisjointnessChecker(self._references)
        self._definition_names: dict[str, str] = {}
        """Name of each referenced definition in the result, by reference."""
        self._queue: list[str] = []
        """References to definitions that are not lowered yet."""

    def run(self) -> Any:
        """Lowers the root and every definition that it refers to."""
        if not isinstance(self._root, dict | bool):
            refuse_schema("$", "must be an object (or true)")
        lowered = self._lower(self._root, "$")
        definitions = {}
        while self._queue:
            reference = self._queue.pop()
            definitions[self._definition_names[reference]] = self._lower(
                self._references.resolve(reference), reference
            )
        return {**lowered, "$defs": definitions} if definitions else lowered

    def _lower(self, node: Any, where: str) -> Any:
        self._budget.subschemas -= 1
        if self._budget.subschemas < 0:
            refuse_schema(where, "exceeds the limit on subschemas; describe less of the output")
        if node is True or node == {}:
            return {}
        if node is False:
            refuse_schema(where, "is false, which nothing matches; omit the property")
        if not isinstance(node, dict):
            refuse_schema(where, "must be a schema: an object, or true")
        keys = {key for key in node if not _is_annotation(key, where)}
        if not keys:
            return {}
        for name in _STANDALONE:
            if name in keys:
                others = sorted(keys - {name})
                if others:
                    refuse_schema(
                        where,
                        f"has {others[0]} beside {name}, which cannot be enforced together; move it inside",
                        *(others if _says_more(name, node) else sorted(keys & _COMPOSITIONS)),
                    )
                return self._standalone(name, node[name], where)
        if "const" in keys or "enum" in keys:
            return self._values(node, keys, where)
        return self._typed(node, keys, where)

    def _standalone(self, name: str, value: Any, where: str) -> Any:
        """Lowers a reference or a composition."""
        if name == "$ref":
            return {"$ref": f"#/$defs/{self._definition(value, where)}"}
        if not isinstance(value, list) or not value:
            refuse_schema(where, f"has a {name} that is not a list of at least one schema")
        if name == "allOf" and len(value) > 1:
            refuse_schema(
                where, "has an allOf of several schemas, which cannot be enforced; merge them into one", name
            )
        if name == "oneOf" and not self._are_disjoint(value, where):
            refuse_schema(
                where,
                "has a oneOf with schemas that may overlap, which cannot be enforced; use anyOf,"
                " different types, or a"
                " required property with a different const in each",
                name,
                replacement={"anyOf": value},
            )
        branches = [self._lower(branch, f"{where}.{name}[{index}]") for index, branch in enumerate(value)]
        return branches[0] if name == "allOf" else {"anyOf": branches}

    def _definition(self, reference: Any, where: str) -> str:
        """Returns the name in the result of the definition that `reference` points to."""
        if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
            refuse_schema(
                where,
                f"has the $ref {shown(reference)}; only references into the schema itself (#/$defs/…) are"
                " followed",
                *(("$ref",) if isinstance(reference, str) else ()),
            )
        try:
            self._references.resolve(reference)
        except LookupError:
            refuse_schema(where, f"has the $ref {shown(reference)}, which leads nowhere")
        if reference not in self._definition_names:
            if (cycle := self._references.find_cycle(reference)) is not None:
                refuse_schema(cycle, "refers to itself without an object or array in between")
            self._definition_names[reference] = f"d{len(self._definition_names)}"
            self._queue.append(reference)
        return self._definition_names[reference]

    def _are_disjoint(self, branches: list[Any], where: str) -> bool:
        """Whether no value matches two of the schemas; charges the comparison budget."""
        left = self._budget.comparisons
        disjoint, spent = self._disjointness.are_disjoint(branches, left)
        self._budget.comparisons = left - spent
        if spent > left:
            refuse_schema(
                where,
                "has a oneOf with too many schemas and values to check for overlap; use anyOf",
                "oneOf",
                replacement={"anyOf": branches},
            )
        return disjoint

    def _values(self, node: dict[str, Any], keys: set[str], where: str) -> Any:
        """Lowers a `const` or an `enum`."""
        others = keys - {"const", "enum", "type"}
        if others:
            refuse_schema(
                where,
                f"has {min(others)} beside const or enum; list only the allowed values",
                *sorted(others),
            )
        values = [node["const"]] if "const" in keys else node["enum"]
        if not isinstance(values, list) or not values:
            refuse_schema(where, "has an enum that is not a list of at least one value")
        if "const" in keys and "enum" in keys:
            refuse_schema(where, "has both const and enum; keep one", "enum")
        if "type" in keys:
            types = self._types(node["type"], where)
            fitting = [value for value in values if any(_has_type(value, name) for name in types)]
            if len(fitting) < len(values):
                refuse_schema(where, "has a const or an enum with a value that is not of its type")
            values = fitting
        self._budget.values -= len(values)
        if self._budget.values < 0:
            refuse_schema(where, "has too many enum values; describe less of the output")
        return {"enum": values}

    def _types(self, value: Any, where: str) -> list[str]:
        """Returns the value of the `type` keyword as a list."""
        types = value if isinstance(value, list) else [value]
        if not types or not all(isinstance(name, str) and name in _BY_TYPE for name in types):
            refuse_schema(
                where,
                f"has the type {shown(value)}; it must be one of {', '.join(_BY_TYPE)}, or a list of them",
            )
        return types

    def _typed(self, node: dict[str, Any], keys: set[str], where: str) -> Any:
        """Lowers a schema with a type, or with keywords that imply one."""
        keywords = keys - {"type"}
        if "type" in keys:
            types = self._types(node["type"], where)
        else:
            families = [name for name, words in _BY_TYPE.items() if keywords & words and name != "integer"]
            if len(families) != 1:
                unknown = sorted(keywords - frozenset[str]().union(*_BY_TYPE.values()))
                refuse_schema(
                    where,
                    f"has {unknown[0]}, which cannot be enforced" if unknown else "needs a type",
                    *sorted(keywords),
                )
            types = families
        supported = frozenset[str]().union(*(_BY_TYPE[name] for name in types))
        if unsupported := sorted(keywords - supported):
            known = any(unsupported[0] in words for words in _BY_TYPE.values())
            why = f"which does not apply to the type {types[0]}" if known else "which cannot be enforced"
            refuse_schema(where, f"has {unsupported[0]}, {why}; omit it", *unsupported)
        if "number" in types:
            types = [name for name in types if name != "integer"]  # every integer is a number
        branches = [self._lower_type({**node, "type": name}, name, where) for name in dict.fromkeys(types)]
        return branches[0] if len(branches) == 1 else {"anyOf": branches}

    def _lower_type(self, node: dict[str, Any], name: str, where: str) -> Any:
        match name:
            case "string":
                return lower_string(node, where)
            case "integer" | "number":
                return lower_number(node, where)
            case "array":
                return lower_array(node, where, self._lower)
            case "object":
                return lower_object(node, where, self._lower)
            case _:
                return {"type": name}


def _says_more(name: str, node: dict[str, Any]) -> bool:
    """Whether a reference or composition says more about a value than the keywords beside it."""
    if name == "allOf" and isinstance(node[name], list) and len(node[name]) > 1:
        return False  # it cannot be enforced even alone
    return name == "$ref" or not node.keys() & _DESCRIPTIONS


def _is_annotation(key: str, where: str) -> bool:
    return key in _ANNOTATIONS or key not in _KNOWN | _UNSERVED or (key == "$id" and where == "$")


def _has_type(value: Any, name: str) -> bool:
    """Whether a JSON value has the type `name`."""
    if isinstance(value, bool) or value is None:
        return name == ("null" if value is None else "boolean")
    if isinstance(value, int | float):
        return name == "number" or (name == "integer" and value == int(value))
    kinds: dict[str, type] = {"string": str, "array": list, "object": dict}
    return name in kinds and isinstance(value, kinds[name])
