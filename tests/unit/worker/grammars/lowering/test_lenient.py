"""A lenient schema is enforced as far as possible, and says what is not."""

import contextlib
import json
import random
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


VALUES: dict[str, tuple[Any, ...]] = {
    "type": ("string", "integer", "object", "array", ["string", "null"], "str"), "required": (["a"], ["a", "b"], 1),
    "minLength": (0, 2, 200_000), "minItems": (0, 2, -1), "minProperties": (0, 3), "maximum": (1, 2.5, 1e20, "1"),
    "multipleOf": (2, 0.1, 0), "pattern": ("a+", "^(?!x)", "("), "format": ("date", "colour"), "uniqueItems": (True, False),
    "enum": ([1, "a"], []), "const": ("a", None), "$ref": ("#", "#/$defs/a", "#/nope", "https://a.b"), "mood": ("bad",),
}  # fmt: skip
NESTED = ("items", "additionalProperties", "propertyNames", "not", "contains")
LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
NAMED = ("properties", "patternProperties", "$defs")


def made_up(dice: random.Random, depth: int) -> Any:
    """Returns a schema of random keywords, most of which do not fit together."""
    if depth == 0 or dice.random() < 0.1:
        return dice.choice((True, False, {}, {"type": "null"}, {"type": "string"}, 5))
    schema: dict[str, Any] = {}
    for name in dice.sample([*VALUES, *NESTED, *LISTS, *NAMED], dice.randint(0, 4)):
        if name in VALUES:
            schema[name] = dice.choice(VALUES[name])
        elif name in NESTED:
            schema[name] = made_up(dice, depth - 1)
        elif name in LISTS:
            schema[name] = [made_up(dice, depth - 1) for _ in range(dice.randint(0, 2))]
        else:
            schema[name] = {key: made_up(dice, depth - 1) for key in dice.sample(["a", "b", "a\n"], 2)}
    return schema


def test_every_schema_is_lowered_or_refused() -> None:
    """No mixture of keywords keeps the lowering from its end; what a strict one takes, it takes unchanged."""
    dice, taken = random.Random(0), 0
    for _ in range(2000):
        schema = made_up(dice, 3)
        with contextlib.suppress(InvalidArgument):
            found = lowered(schema)
            taken += 1
            with contextlib.suppress(InvalidArgument):
                _, text = lower(Spec("json_schema", json.dumps(schema)))
                assert found == (json.loads(text), [])
    assert taken > 1000
