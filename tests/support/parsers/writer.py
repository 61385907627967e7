"""Draws random tools, with calls that match them and that a format can write."""

import string
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from hypothesis import strategies as st

from gateway.parsers.formats import Elements, Format, LooseObject, Python, Tagged
from gateway.parsers.writing import Call

Tools = Mapping[str, Mapping[str, Any]]
"""Schemas of arguments by tool."""


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
