"""Plain objects of schemas are closed, and only where that changes nothing else."""

from typing import Any

import pytest

from gateway.schemas.structured import closed

TEXT = {"type": "string"}


def test_plain_objects_allow_their_listed_properties_only() -> None:
    """At every depth: in properties, items, choices and definitions, whatever the properties are called."""
    inner = {"type": "object", "properties": {"not": TEXT}}
    schema = {
        "type": "object",
        "properties": {
            "a": inner,
            "b": {"type": "array", "items": inner},
            "c": {"anyOf": [inner, {"type": "null"}]},
        },
        "required": ["a"],
        "$defs": {"d": inner},
    }
    shut = {**inner, "additionalProperties": False}
    assert closed(schema) == {
        "type": "object",
        "properties": {
            "a": shut,
            "b": {"type": "array", "items": shut},
            "c": {"anyOf": [shut, {"type": "null"}]},
        },
        "required": ["a"],
        "$defs": {"d": shut},
        "additionalProperties": False,
    }


@pytest.mark.parametrize(
    "schema",
    [
        True,
        {"type": "object"},
        {"properties": {}},
        {"properties": {"a": TEXT}, "additionalProperties": TEXT},
        {"properties": {"a": TEXT}, "patternProperties": {"^x": TEXT}},
        {"properties": {"a": TEXT}, "minProperties": 2},
        {"properties": {"a": TEXT}, "required": ["b"]},
        {"properties": {"a": TEXT}, "$ref": "#/$defs/b", "$defs": {"b": True}},
        {"properties": {"a": TEXT}, "anyOf": [{"required": ["a"]}, {"required": ["b"]}]},
        {"allOf": [{"properties": {"a": TEXT}}, {"properties": {"b": TEXT}}]},
        {"properties": {"a": {"not": {"properties": {"b": TEXT}}}}},
        {"const": {"properties": {"a": TEXT}}},
    ],
)
def test_others_stay_as_they_are(schema: Any) -> None:
    """Where other keywords speak of further properties, or schemas are joined, nothing changes."""
    assert closed(schema) == schema
