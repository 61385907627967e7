"""Writes calls exactly as a format's entry says, and draws random tools with calls that match them."""

import json
import string
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, assert_never

from hypothesis import strategies as st

from gateway.parsers.formats import Elements, Format, JsonObject, LooseObject, NamedJson, Python, Tagged


class Call(NamedTuple):
    """A call of a tool."""

    name: str
    arguments: dict[str, Any]


Tools = Mapping[str, Mapping[str, Any]]
"""Schemas of arguments by tool."""


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
            return f'{{{kind.first}"{kind.name}": "{name}", "{kind.arguments[0]}": {_json(arguments)}}}'
        case NamedJson() as kind:
            given = f"{kind.id_mark}{number}" if kind.id_is_number else ""
            return f"{name}{given}{kind.between}{_json(arguments)}"
        case Tagged() as kind:
            values = [
                kind.key + key + _key_end(kind, value) + _plain(value) + kind.value_end
                for key, value in arguments.items()
            ]
            return name + _numbered(kind.name_end, number) + "".join(values)
        case Python():
            return f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"
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
    names = {bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}
    of_type = [text for text in kind.json_key_ends if names.get(type(value), "null") in text]
    return (of_type or kind.json_key_ends)[0]


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
            inner = value.items()
        case list():
            inner = (("item", item) for item in value)
        case _:
            return _plain(value)
    return "".join(f"{prefix}<{key}>{_elements(item, prefix)}{prefix}</{key}>" for key, item in inner)


def ends(form: Format) -> tuple[str, ...]:
    """Returns the texts that no string in a call can contain: they end it, and nothing escapes them."""
    match form.call:
        case Tagged() as kind:
            return (kind.value_end.strip(),)
        case LooseObject() as kind:
            return (kind.quote,)
        case Elements() as kind:
            return (kind.prefix,)
    return ()


_NAMES = ["f", "f2", "get_weather", "get", "search-web", "a.b"]
_IDENTIFIERS = ["f", "f2", "get_weather", "get"]
_PIECES = [
    *string.ascii_lowercase[:4], "5", "-1.5e3", "true", "null", "None", " ", "\n", "\n\n", "\t", '"', "'", "\\", "\\n", "/", "<", ">",
    "&", "&lt;", "{", "}", "[", "]", "(", ")", ",", ":", ";", "=", "|", "é", "漢", "🙂", "\u2028", "```", "</", "Paris, the \"City of Light\"",
]  # fmt: skip


class _Kind(NamedTuple):
    schema: dict[str, Any]
    values: st.SearchStrategy[Any]


def texts(form: Format) -> st.SearchStrategy[str]:
    """Strings with quotes, marks of the format, and other characters, as far as the format can write them."""
    marks = [text for text in (*form.texts(), *(text.strip() for text in form.texts())) if text]
    forbidden = ends(form)
    drawn = st.lists(st.sampled_from([*_PIECES, *marks]) | st.characters(codec="utf-8"), max_size=8)
    return drawn.map("".join).filter(
        lambda text: all((text + end).find(end) == len(text) for end in forbidden)
    )


def _kinds(form: Format, depth: int) -> st.SearchStrategy[_Kind]:
    text = texts(form)
    integers = st.integers(-(10**12), 10**12)
    numbers = integers.map(float) | st.floats(-1e9, 1e9, allow_nan=False)
    plain = [
        st.just(_Kind({"type": "string"}, text)),
        st.lists(text, min_size=1, max_size=3, unique=True).map(
            lambda values: _Kind({"type": "string", "enum": values}, st.sampled_from(values))
        ),
        st.just(_Kind({"type": "integer"}, integers)),
        st.just(_Kind({"type": "number"}, numbers)),
        st.just(_Kind({"type": "boolean"}, st.booleans())),
        st.just(_Kind({"anyOf": [{"type": "integer"}, {"type": "null"}]}, integers | st.none())),
        st.just(_Kind({"$ref": "#/$defs/text"}, text)),
        st.just(_Kind({"$ref": "#/$defs/count"}, st.integers(0, 9))),
    ]
    if depth == 0:
        return st.one_of(plain)
    inner = _kinds(form, depth - 1)
    return st.one_of(
        *plain,
        inner.map(
            lambda kind: _Kind({"type": "array", "items": kind.schema}, st.lists(kind.values, max_size=3))
        ),
        _objects(form, inner),
    )


@st.composite
def _objects(draw: Callable[..., Any], form: Format, kinds: st.SearchStrategy[_Kind]) -> _Kind:
    first = st.sampled_from(string.ascii_letters + "_")
    others = "" if isinstance(form.call, Python) else "-."
    rest = st.text(st.sampled_from(string.ascii_letters + string.digits + "_" + others), max_size=6)
    names = draw(st.lists(st.builds(str.__add__, first, rest), max_size=4, unique=True))
    members = {name: draw(kinds) for name in names if name not in ("if", "as", "in", "is", "or")}
    needed = [name for name in members if draw(st.booleans())]
    schema = {
        "type": "object",
        "properties": {name: kind.schema for name, kind in members.items()},
        "required": needed,
        "additionalProperties": False,
    }

    def present(drawn: dict[str, Any]) -> dict[str, Any]:
        return {name: drawn[name] for name in members if name in drawn}

    values = st.fixed_dictionaries(
        {name: members[name].values for name in needed},
        optional={name: kind.values for name, kind in members.items() if name not in needed},
    )
    return _Kind(schema, values.map(present))


@st.composite
def tools_and_calls(draw: Callable[..., Any], form: Format) -> tuple[Tools, list[Call]]:
    """Draws tools, and calls that match their schemas and that the format can write."""
    identifiers = isinstance(form.call, Python)
    names = draw(
        st.lists(
            st.sampled_from(_IDENTIFIERS if identifiers else _NAMES), min_size=1, max_size=3, unique=True
        )
    )
    kinds = {name: draw(_objects(form, _kinds(form, 2))) for name in names}
    definitions = {"text": {"type": "string"}, "count": {"type": "integer", "minimum": 0, "maximum": 9}}
    tools = {name: {**kind.schema, "$defs": definitions} for name, kind in kinds.items()}
    called = draw(st.lists(st.sampled_from(names), min_size=1, max_size=3))
    return tools, [Call(name, draw(kinds[name].values)) for name in called]
