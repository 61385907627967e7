"""Writes calls exactly as an entry of the table of formats says."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, assert_never

from gateway.parsers.formats import Elements, Format, JsonObject, LooseObject, NamedJson, Python, Tagged


class Call(NamedTuple):
    """A call of a tool."""

    name: str
    arguments: Mapping[str, Any]


def write(form: Format, calls: Sequence[Call]) -> str:
    """Returns the text of an answer that consists of the calls alone."""
    texts = [
        _numbered(form.begin, number) + _call(form, call, number) + _numbered(form.end, number)
        for number, call in enumerate(calls)
    ]
    if form.wraps_each:
        return form.separator.join(form.opening + text + form.closing for text in texts)
    body = form.separator.join(texts)
    return form.opening + (f"[{body}]" if form.listed else body) + form.closing


def _numbered(text: str, number: int) -> str:
    return text.replace("{0}", str(number)).replace("{1}", str(number + 1))


def _call(form: Format, call: Call, number: int) -> str:
    name, arguments = call
    match form.call:
        case JsonObject() as kind:
            first = _numbered(kind.first, number)
            return f'{{{first}"{kind.name}": "{name}", "{kind.arguments[0]}": {_json(arguments)}}}'
        case NamedJson() as kind:
            given = f"{kind.id_mark}{number}" if kind.id_is_number else ""
            return f"{kind.prefix}{name}{given}{kind.between}{_json(arguments)}"
        case Tagged() as kind:
            values = [
                kind.key + key + _key_end(kind, value) + _plain(value) + kind.value_end
                for key, value in arguments.items()
            ]
            return name + _numbered(kind.name_end, number) + "".join(values)
        case Python():
            return f"{name}({', '.join(f'{key}={_python(value)}' for key, value in arguments.items())})"
        case LooseObject() as kind:
            return name + _loose(arguments, kind.quote)
        case Elements() as kind:
            return name + kind.name_end + _elements(arguments, kind.prefix)
        case _:
            assert_never(form.call)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else _json(value)


def _key_end(kind: Tagged, value: Any) -> str:
    if isinstance(value, str) or not kind.json_key_ends:
        return kind.key_end
    names = {bool: "boolean", int: "number", float: "number", list: "array", dict: "object"}
    of_type = [text for text in kind.json_key_ends if names.get(type(value), "null") in text]
    return (of_type or kind.json_key_ends)[0]


def _python(value: Any) -> str:
    """Returns a literal of Python, in whose texts only what JSON escapes is escaped."""
    match value:
        case str():
            return "'" + _json(value)[1:-1].replace('\\"', '"').replace("'", "\\'") + "'"
        case list():
            return f"[{', '.join(map(_python, value))}]"
        case dict():
            return f"{{{', '.join(f'{_python(key)}: {_python(item)}' for key, item in value.items())}}}"
    return repr(value)


def _loose(value: Any, quote: str) -> str:
    match value:
        case str():
            return quote + value + quote
        case list():
            return "[" + ",".join(_loose(item, quote) for item in value) + "]"
        case dict():
            return "{" + ",".join(f"{key}:{_loose(item, quote)}" for key, item in value.items()) + "}"
    return _json(value)


def _elements(value: Any, prefix: str) -> str:
    match value:
        case dict():
            inner = [*value.items()]
        case list():
            inner = [("item", item) for item in value]
        case _:
            return _plain(value)
    return "".join(f"{prefix}<{key}>{_elements(item, prefix)}{prefix}</{key}>" for key, item in inner)
