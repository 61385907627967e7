"""Values that models write as plain text, typed by the schema of a tool."""

import ast
import json
import warnings
from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import unquote

from gateway.parsers.json_scan import is_value

Schema = Mapping[str, Any] | bool | None
"""A JSON schema; ``None``: none is known."""

# json.dumps would make another at each call.
_ENCODER: Final = json.JSONEncoder(ensure_ascii=False)
_ALL: Final = frozenset({"null", "boolean", "integer", "number", "string", "array", "object"})
_WORDS: Final = {word: word.lower() for word in ("true", "True", "TRUE", "false", "False", "FALSE")}
_NOTHING: Final = frozenset({"null", "None"})


def property_schema(schema: Schema, name: str, root: Schema) -> Schema:
    """Returns the schema of a member of objects of ``schema``; ``None`` if unknown.

    Args:
        schema: a schema of objects; it may refer to others.
        name: the member's name.
        root: the whole document, in which references are looked up.
    """
    others: Schema = None
    for part in _parts(schema, root):
        properties = part.get("properties")
        if isinstance(properties, Mapping) and name in properties:
            found: Schema = properties[name]
            return found
        if others is None and isinstance(part.get("additionalProperties"), Mapping):
            others = part["additionalProperties"]
    return others


def item_schema(schema: Schema, root: Schema) -> Schema:
    """Returns the schema of items of arrays of ``schema``; ``None`` if unknown.

    Args:
        schema: a schema of arrays; it may refer to others.
        root: the whole document, in which references are looked up.
    """
    items = (part.get("items") for part in _parts(schema, root))
    return next((found for found in items if isinstance(found, Mapping)), None)


def _parts(schema: Schema, root: Schema) -> list[Mapping[str, Any]]:
    """Returns a schema, the targets of its references, and its alternatives, each once."""
    parts: dict[int, Mapping[str, Any]] = {}
    pending = [schema]
    while pending:
        part = pending.pop(0)
        if isinstance(part, Mapping) and id(part) not in parts:
            parts[id(part)] = part
            pending += [_target(part.get("$ref"), root)]
            pending += [inner for key in ("anyOf", "oneOf", "allOf") for inner in _list(part.get(key))]
    return list(parts.values())


def _list(value: Any) -> list[Any]:
    """Returns the value, or nothing if it is no list, as in a schema that is not valid."""
    return value if isinstance(value, list) else []


def _target(reference: Any, root: Schema) -> Schema:
    if not isinstance(reference, str):
        return None
    target: Any = root
    for step in unquote(reference.removeprefix("#")).split("/")[1:]:
        key = step.replace("~1", "/").replace("~0", "~")
        if isinstance(target, list) and key.isdecimal() and int(key) < len(target):
            target = target[int(key)]
        else:
            target = target.get(key) if isinstance(target, Mapping) else None
    return target if isinstance(target, Mapping | bool) else None


def types(schema: Schema, root: Schema) -> frozenset[str]:
    """Returns the names of JSON's types that ``schema`` allows; all of them if it does not say."""
    return _types(schema, root, {}) or _ALL


def _types(schema: Schema, root: Schema, known: dict[int, frozenset[str]]) -> frozenset[str]:
    """Returns the types; none for a schema that refers to itself alone.

    Args:
        schema: the schema.
        root: the whole document.
        known: the results so far by a schema's identity, so that each is visited once.
    """
    if not isinstance(schema, Mapping):
        return _ALL
    if id(schema) in known:
        return known[id(schema)]
    known[id(schema)] = frozenset()
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
        if parts := _list(schema.get(key)):
            found &= frozenset().union(*(_types(part, root, known) for part in parts)) or _ALL
    for part in (*_list(schema.get("allOf")), _target(schema.get("$ref"), root)):
        found &= _types(part, root, known) or _ALL
    if schema.get("nullable") is True:
        found |= {"null"}
    known[id(schema)] = found
    return found


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
        with warnings.catch_warnings():
            # Python warns about "\\d"; for the model it is a backslash.
            warnings.simplefilter("ignore")
            value = ast.literal_eval(word)
        return json.dumps(value, ensure_ascii=False, allow_nan=False).encode().decode()
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return None
