"""Closes the objects of plain schemas, as vLLM's engine does: a small model would add properties without end.

JSON Schema allows unlisted properties unless ``additionalProperties`` says otherwise. An answer without them
satisfies the schema as well, so closing an object only narrows the answers.
"""

from collections.abc import Mapping
from typing import Any, Final

BY_NAME: Final = frozenset({
    "$defs", "definitions", "dependencies", "dependentSchemas", "patternProperties", "properties",
})  # fmt: skip
"""Keywords whose values are schemas by name."""
SCHEMAS: Final = frozenset({
    "additionalItems", "additionalProperties", "allOf", "anyOf", "contains", "else", "if", "items", "not", "oneOf", "prefixItems",
    "propertyNames", "then", "unevaluatedItems", "unevaluatedProperties",
})  # fmt: skip
"""Keywords with a schema or a list of schemas. Values of other keywords (``enum``, ``const``) are data."""
# Keywords that join several schemas on one value: a closed one would exclude the properties of the others.
_JOINING: Final = frozenset({
    "$dynamicRef", "allOf", "dependentRequired", "dependentSchemas", "dependencies", "if", "not", "oneOf", "unevaluatedProperties",
})  # fmt: skip
# Keywords beside which an object's own list of properties is not the whole of them.
_OPEN: Final = frozenset({
    "$ref", "additionalProperties", "anyOf", "maxProperties", "minProperties", "patternProperties", "propertyNames",
})  # fmt: skip


def closed(schema: Any) -> Any:
    """Returns a schema whose plain objects allow their listed properties only.

    Nothing changes where schemas are joined or negated anywhere in the document.
    """
    return schema if _joins(schema) else _closed(schema)


def _joins(schema: Any) -> bool:
    if isinstance(schema, list):
        return any(map(_joins, schema))
    if not isinstance(schema, Mapping):
        return False
    return not _JOINING.isdisjoint(schema) or any(_joins(each) for each in _subschemas(schema))


def _subschemas(schema: Mapping[str, Any]) -> list[Any]:
    named = [item for key in BY_NAME if isinstance(schema.get(key), Mapping) for item in schema[key].values()]
    return [*named, *(schema[key] for key in SCHEMAS if key in schema)]


def _closed(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_closed(item) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    result: dict[str, Any] = {}
    for keyword, value in schema.items():
        if keyword in SCHEMAS:
            result[keyword] = _closed(value)
        elif keyword in BY_NAME and isinstance(value, Mapping):
            result[keyword] = {name: _closed(item) for name, item in value.items()}
        else:
            result[keyword] = value
    listed, required = schema.get("properties"), schema.get("required", ())
    if (
        isinstance(listed, Mapping)
        and listed
        and _OPEN.isdisjoint(schema)
        and isinstance(required, list | tuple)
        and all(name in listed for name in required if isinstance(name, str))
    ):
        result["additionalProperties"] = False
    return result
