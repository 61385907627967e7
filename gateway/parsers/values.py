"""Values that models write as plain text, typed by the schema of a tool."""

import ast
import json
from collections.abc import Mapping
from typing import Any, Final

from gateway.parsers.json_scan import is_value

Schema = Mapping[str, Any] | bool | None
"""A JSON schema; ``None``: none is known."""

# json.dumps would make another at each call.
_ENCODER: Final = json.JSONEncoder(ensure_ascii=False)
_ALL: Final = frozenset({"null", "boolean", "integer", "number", "string", "array", "object"})
_MAX_REFERENCES: Final = 32
_WORDS: Final = {"true": "true", "True": "true", "false": "false", "False": "false"}
_NOTHING: Final = frozenset({"null", "None"})


def property_schema(schema: Schema, name: str, root: Schema) -> Schema:
    """Returns the schema of a member of objects of ``schema``; ``None`` if unknown.

    Args:
        schema: a schema of objects; it may refer to others.
        name: the member's name.
        root: the whole document, in which references are looked up.
    """
    return _property(schema, name, root, 0)


def _property(schema: Schema, name: str, root: Schema, depth: int) -> Schema:
    if not isinstance(schema, Mapping) or depth > _MAX_REFERENCES:
        return None
    properties = schema.get("properties")
    if isinstance(properties, Mapping) and name in properties:
        found: Schema = properties[name]
        return found
    for part in _parts(schema, root):
        if (inner := _property(part, name, root, depth + 1)) is not None:
            return inner
    others = schema.get("additionalProperties")
    return others if isinstance(others, Mapping) else None


def item_schema(schema: Schema, root: Schema) -> Schema:
    """Returns the schema of items of arrays of ``schema``; ``None`` if unknown.

    Args:
        schema: a schema of arrays; it may refer to others.
        root: the whole document, in which references are looked up.
    """
    return _items(schema, root, 0)


def _items(schema: Schema, root: Schema, depth: int) -> Schema:
    if not isinstance(schema, Mapping) or depth > _MAX_REFERENCES:
        return None
    if isinstance(items := schema.get("items"), Mapping):
        return items
    found = (_items(part, root, depth + 1) for part in _parts(schema, root))
    return next((inner for inner in found if inner is not None), None)


def _parts(schema: Mapping[str, Any], root: Schema) -> list[Schema]:
    """Returns the schemas that ``schema`` consists of: its target and its alternatives."""
    parts = [part for key in ("anyOf", "oneOf", "allOf") for part in schema.get(key) or ()]
    reference = schema.get("$ref")
    if isinstance(reference, str):
        parts.append(_target(reference, root))
    return parts


def _target(reference: str, root: Schema) -> Schema:
    target: Any = root
    for step in reference.removeprefix("#").split("/")[1:]:
        key = step.replace("~1", "/").replace("~0", "~")
        target = target.get(key) if isinstance(target, Mapping) else None
    return target if isinstance(target, Mapping | bool) else None


def types(schema: Schema, root: Schema) -> frozenset[str]:
    """Returns the names of JSON's types that ``schema`` allows; all of them if it does not say."""
    return _types(schema, root, 0)


def _types(schema: Schema, root: Schema, depth: int) -> frozenset[str]:
    if not isinstance(schema, Mapping) or depth > _MAX_REFERENCES:
        return _ALL
    found = _ALL
    stated = schema.get("type")
    if isinstance(stated, str):
        found = frozenset({stated})
    elif isinstance(stated, list):
        found = frozenset(kind for kind in stated if isinstance(kind, str))
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(values, list) and stated is None:
        found = frozenset(map(_type_of, values))
    for key in ("anyOf", "oneOf"):
        if isinstance(parts := schema.get(key), list) and parts:
            found &= frozenset().union(*(_types(part, root, depth + 1) for part in parts))
    for part in schema.get("allOf") or ():
        found &= _types(part, root, depth + 1)
    if isinstance(reference := schema.get("$ref"), str):
        found &= _types(_target(reference, root), root, depth + 1)
    if schema.get("nullable") is True:
        found |= {"null"}
    return found or _ALL


def _type_of(value: Any) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "number"
        case str():
            return "string"
        case list():
            return "array"
    return "object"


def as_json(text: str, allowed: frozenset[str]) -> str:
    """Returns the JSON of a value written as plain text.

    Other types go before text, as in vLLM: with ``string`` and ``integer`` allowed, ``5`` is a number. A
    value of none of the allowed types is text.

    Args:
        text: the value; line breaks of the format are removed.
        allowed: names of JSON's types; see :func:`types`.
    """
    if allowed != {"string"}:
        word = text.strip()
        if "null" in allowed and word in _NOTHING:
            return "null"
        if "boolean" in allowed and word in _WORDS:
            return _WORDS[word]
        if allowed & {"integer", "number"} and (number := _number(word, allowed)):
            return number
        for kind, bracket in (("object", "{"), ("array", "[")):
            if kind in allowed and word.startswith(bracket) and (found := _container(word)):
                return found
    return quoted(text)


def quoted(text: str) -> str:
    """Returns a JSON string. Halves of surrogate pairs, which UTF-8 cannot encode, are replaced."""
    return _ENCODER.encode(text.encode(errors="replace").decode())


def _number(word: str, allowed: frozenset[str]) -> str | None:
    """Returns a number as it is written, but an integer without a fraction of zeros."""
    if not is_value(word) or word[0] not in "-0123456789":
        return None
    if "number" in allowed or word.lstrip("-").isdigit():
        return word
    whole, _, fraction = word.partition(".")
    return whole if fraction.strip("0") == "" else None


def _container(word: str) -> str | None:
    """Returns an object or array: JSON as it is written, or a Python literal as some templates show it."""
    if is_value(word):
        return word
    try:
        return json.dumps(ast.literal_eval(word), ensure_ascii=False, allow_nan=False).encode().decode()
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return None
