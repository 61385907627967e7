"""A lenient schema is enforced as far as possible, and says what is not."""

import json
import time
from typing import Any

import pytest

from protos.errors import InvalidArgument
from worker_svc.grammars.spec import Spec, lower

ANY_OBJECT = {"type": "object", "additionalProperties": True}


def lowered(schema: Any) -> tuple[Any, list[str]]:
    """Returns the schema that xgrammar would compile, and what it leaves out."""
    unenforced: list[str] = []
    _, text = lower(Spec("json_schema", json.dumps(schema), lenient=True), unenforced)
    return json.loads(text), unenforced


def both(one: Any, *names: str) -> dict[str, Any]:
    """Returns an object schema with the property `a`, and other keywords that must be left out."""
    return {"type": "object", "properties": {"a": one}, **{name: {} for name in names}}


@pytest.mark.parametrize(
    ("schema", "same_as", "unenforced"),
    [
        ({"sentiment": "str", "score": "float"}, {}, ["$: score", "$: sentiment"]),
        (both({}, "not", "if"), both({}), ["$: if", "$: not"]),
        (both({"type": "array", "uniqueItems": True, "contains": {}}), both({"type": "array"}), ["$.a: contains", "$.a: uniqueItems"]),
        (both({"type": "string", "format": "idn-email", "maxLength": 3}), both({"type": "string", "maxLength": 3}), ["$.a: format"]),
        ({"type": "string", "pattern": "^(?!x)", "minLength": 1}, {"type": "string", "minLength": 1}, ["$: pattern"]),
        ({"type": "string", "pattern": "a+", "format": "date", "minLength": 1}, {"type": "string", "pattern": "a+"}, ["$: format", "$: minLength"]),
        ({"type": "string", "minLength": 200_000}, {"type": "string"}, ["$: minLength"]),
        ({"type": "number", "multipleOf": 0.1, "minimum": 1e20}, {"type": "number"}, ["$: multipleOf", "$: minimum"]),
        ({"type": "integer", "multipleOf": 5, "minimum": 1}, {"type": "integer", "minimum": 1}, ["$: multipleOf"]),
        ({"type": "string", "minimum": 1}, {"type": "string"}, ["$: minimum"]),
        ({"minimum": 1, "minLength": 1}, {}, ["$: minLength", "$: minimum"]),
        ({"oneOf": [{"type": "string"}, {"const": "x"}]}, {"anyOf": [{"type": "string"}, {"const": "x"}]}, ["$: oneOf"]),
        ({"allOf": [both({}), both({})], "type": "object"}, {"type": "object"}, ["$: allOf"]),
        ({**both({}), "anyOf": [{"required": ["a"]}]}, both({}), ["$: anyOf"]),
        ({"anyOf": [{"type": "null"}], "minimum": 1}, {"anyOf": [{"type": "null"}]}, ["$: minimum"]),
        ({"$ref": "#/$defs/a", "minimum": 1, "$defs": {"a": {"type": "integer", "not": {}}}},
         {"$ref": "#/$defs/a", "$defs": {"a": {"type": "integer"}}}, ["$: minimum", "#/$defs/a: not"]),
        ({"$ref": "https://example.org/a"}, {}, ["$: $ref"]),
        ({"enum": ["a", "bb"], "minLength": 2}, {"enum": ["a", "bb"]}, ["$: minLength"]),
        ({"const": 1, "enum": [1]}, {"const": 1}, ["$: enum"]),
        ({"type": "string", "enum": ["a", None]}, {"enum": ["a"]}, []),
        ({"type": "object", "patternProperties": {"a": {}, "b": {}}}, {"type": "object"}, ["$: patternProperties"]),
        ({**both({}), "patternProperties": {"b": {}}}, both({}), ["$: patternProperties"]),
        ({"type": "object", "propertyNames": {"maxLength": 3}, "minProperties": 2}, {"type": "object", "propertyNames": {"maxLength": 3}}, ["$: minProperties"]),
        ({"type": "object", "additionalProperties": {"type": "null"}, "minProperties": 2}, {"type": "object", "additionalProperties": {"type": "null"}}, ["$: minProperties"]),
        ({**both({}), "required": ["b"]}, {**both({}), "required": ["b"], "additionalProperties": True}, []),
        ({"properties": {"a\n": {}}, "additionalProperties": True}, {"properties": {"a\n": {}}, "additionalProperties": False}, ["$: additionalProperties"]),
    ],
)  # fmt: skip
def test_what_cannot_be_enforced_is_left_out_and_named(
    schema: Any, same_as: Any, unenforced: list[str]
) -> None:
    """The rest of the schema is enforced as if the client had left the part out."""
    _, expected = lower(Spec("json_schema", json.dumps(same_as)))
    assert lowered(schema) == (json.loads(expected), unenforced)


@pytest.mark.parametrize(
    "schema",
    [
        "text", False, {"type": "str"}, {"type": "object", "properties": {"a": "str"}}, {"enum": []},
        {"type": "object", "required": ["a"], "properties": {}, "additionalProperties": False},
        {"$ref": "#"}, {"type": "string", "enum": [1]}, {"type": "string", "minLength": 3, "maxLength": 2}, {"type": "number", "minimum": "1"},
    ],
)  # fmt: skip
def test_what_is_no_schema_or_matches_nothing_is_refused(schema: Any) -> None:
    """Leniency does not repair mistakes."""
    with pytest.raises(InvalidArgument):
        lowered(schema)


def test_no_subschema_is_lowered_twice() -> None:
    """The effort does not double with every level that has something to leave out."""
    schema: dict[str, Any] = {"type": "null"}
    for _ in range(40):
        schema = {"type": "array", "items": schema, "uniqueItems": True, "minItems": 200_000, "not": {}}
    began = time.monotonic()
    _, unenforced = lowered(schema)
    assert time.monotonic() - began < 1
    assert len(unenforced) == 32


def test_leniency_is_part_of_a_constraint() -> None:
    """Lenient and strict constraints with one schema are different grammars."""
    assert Spec("json_schema", "{}").key != Spec("json_schema", "{}", lenient=True).key


def test_schemas_in_tags_are_lenient_too() -> None:
    """A structural tag reports what its schemas leave out."""
    unenforced: list[str] = []
    content = {"type": "json_schema", "json_schema": {"type": "array", "uniqueItems": True}}
    tag = {"type": "structural_tag", "format": {"type": "tag", "begin": "<", "content": content, "end": ">"}}
    lower(Spec("structural_tag", json.dumps(tag), lenient=True), unenforced)
    assert unenforced == ["$: uniqueItems"]
