"""Schemas are rewritten to forms that xgrammar enforces, or refused by keyword and place."""

import json
import time
from typing import Any

import pytest

from protos.errors import InvalidArgument
from worker_svc.grammars.spec import Spec, lower


def lowered(schema: Any) -> Any:
    """Returns the schema that xgrammar would compile."""
    source, text = lower(Spec("json_schema", json.dumps(schema)))
    assert source == "json"
    return json.loads(text)


@pytest.mark.parametrize(
    ("schema", "result"),
    [
        ({"type": "string", "maxLength": 3}, {"type": "string", "pattern": '^[^"\\\\\\x00-\\x1f\\x7f]{0,3}$'}),
        ({"title": "t", "properties": {"a": {}}, "required": ["a"]},
         {"type": "object", "properties": {"a": {}}, "required": ["a"], "additionalProperties": False}),
        ({"type": "object", "required": ["b"]},
         {"type": "object", "properties": {"b": {}}, "required": ["b"], "additionalProperties": True}),
        ({"type": "array", "minItems": 2}, {"type": "array", "items": True, "minItems": 2}),
        ({"type": "array", "items": [{"type": "null"}], "additionalItems": False},
         {"type": "array", "prefixItems": [{"type": "null"}], "items": False}),
        ({"type": "integer", "minimum": 2.5, "exclusiveMaximum": 7.5}, {"type": "integer", "minimum": 3, "maximum": 7}),
        ({"type": ["integer", "number"]}, {"type": "number"}),
        ({"type": ["string", "null"]}, {"anyOf": [{"type": "string"}, {"type": "null"}]}),
        ({"const": 3}, {"enum": [3]}),
        ({"oneOf": [{"type": "string"}, {"type": "null"}]}, {"anyOf": [{"type": "string"}, {"type": "null"}]}),
        ({"allOf": [{"type": "null"}], "description": "d"}, {"type": "null"}),
        ({"$ref": "#/definitions/a~1b", "definitions": {"a/b": {"type": "null"}}},
         {"$ref": "#/$defs/d0", "$defs": {"d0": {"type": "null"}}}),
        ({"type": "array", "items": {"$ref": "#"}},
         {"type": "array", "items": {"$ref": "#/$defs/d0"},
          "$defs": {"d0": {"type": "array", "items": {"$ref": "#/$defs/d0"}}}}),
        (True, {}),
    ],
)  # fmt: skip
def test_schemas_are_rewritten_to_enforceable_forms(schema: Any, result: Any) -> None:
    """Types become explicit, lengths become patterns, and references point to renamed definitions."""
    assert lowered(schema) == result


@pytest.mark.parametrize(
    ("schema", "why"),
    [
        ({"not": {"type": "string"}}, "has not,"), ({"if": {}, "then": {}}, "cannot be enforced"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"), ({"type": "array", "contains": {}}, "contains"),
        ({"type": "number", "multipleOf": 2}, "multipleOf"), ({"type": "object", "dependentRequired": {}}, "dependentRequired"),
        ({"type": "string", "format": "idn-email"}, "idn-email"), ({"type": "string", "pattern": "a", "maxLength": 2}, "more than one"),
        ({"type": "string", "pattern": "^(?!x)"}, "looks ahead"), ({"type": "string", "pattern": "a^b"}, "anchor"),
        ({"type": "string", "pattern": "\\t"}, "control"), ({"type": "string", "pattern": '"'}, "quote"),
        ({"type": "string", "pattern": "[\\x00-z]"}, "control"), ({"type": "string", "pattern": 3}, "not a string"),
        ({"allOf": [{"type": "string"}, {"minLength": 1}]}, "allOf"), ({"$ref": "#/$defs/a", "minimum": 1}, "beside"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "overlap"), ({"anyOf": []}, "at least one"),
        ({"type": "integer", "anyOf": [{"minimum": 1}]}, "beside anyOf"), ({"enum": ["a", 1], "type": "string"}, "of its type"),
        ({"enum": []}, "enum"), ({"const": 1, "minimum": 0}, "minimum beside"), ({"type": "strin"}, "strin"),
        ({"minLength": 1, "minimum": 2}, "needs a type"), ({"type": "string", "minimum": 2}, "does not apply"),
        ({"$ref": "http://a/b"}, "only references"), ({"$ref": "#/a"}, "leads nowhere"),
        ({"$ref": "#"}, "refers to itself"), ({"$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}]}}, "$ref": "#/$defs/a"}, "refers to itself"),
        ({"$dynamicRef": "#a"}, "$dynamicRef"), ({"type": "object", "properties": {"a": {"$anchor": "x"}}}, "$anchor"),
        ({"properties": {"a": False}, "required": ["a"]}, "false"), (False, "false"), (3, "must be an object"),
        ({"properties": {"a": {}}, "required": ["b"]}, "requires 'b'"),
        ({"patternProperties": {"a": {}}, "properties": {"b": {}}}, "beside patternProperties"),
        ({"patternProperties": {"a": {}, "b": {}}}, "several"), ({"propertyNames": {"pattern": "a"}, "required": ["b"]}, "beside"),
        ({"type": "object", "minProperties": 2, "additionalProperties": True}, "minProperties"),
        ({"type": "number", "minimum": 1e300}, "bounds"), ({"type": "number", "minimum": 0.12345678}, "decimals"),
        ({"type": "integer", "multipleOf": 2, "minimum": 3}, "beside multipleOf"), ({"type": "integer", "multipleOf": 2000}, "up to 1024"),
        ({"type": "integer", "multipleOf": 1.5}, "multipleOf 1.5"), ({"type": "integer", "multipleOf": 0}, "above 0"),
        ({"type": "integer", "minimum": 10**400}, "bounds"), ({"type": "string", "maxLength": 10**400}, "at most"),
        ({"$ref": "#/$defs/a/" + "9" * 5000, "$defs": {"a": [1]}}, "leads nowhere"), ({"$ref": "#/$defs/a/7", "$defs": {"a": [1]}}, "leads nowhere"),
        ({"type": "string", "minLength": None}, "minLength"), ({"type": "array", "items": None}, "must be a schema"),
        ({"type": "object", "additionalProperties": None}, "must be a schema"),
        ({"properties": {'a"b': {}}, "additionalProperties": True}, "must escape"), ({"properties": {"a\nb": {}}, "additionalProperties": {}}, "escape"),
        ({"oneOf": [{"const": [1]}, {"const": [1.0]}]}, "overlap"), ({"oneOf": [{"const": {"a": 1}}, {"const": {"a": 1.0}}]}, "overlap"),
        ({"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/a"}]}}, "$ref": "#/$defs/a"}, "itself"),
        ({"type": "number", "minimum": True}, "not a number"), ({"type": "string", "minLength": -1}, "non-negative integer"),
        ({"type": "string", "minLength": 3, "maxLength": 2}, "above"), ({"type": "string", "maxLength": 10**9}, "at most"),
    ],
)  # fmt: skip
def test_unenforceable_schemas_are_refused(schema: Any, why: str) -> None:
    """The error names the keyword and the parameter in one line."""
    with pytest.raises(InvalidArgument) as caught:
        lowered(schema)
    assert why in caught.value.message
    assert caught.value.param == "structured_output"
    assert "\n" not in caught.value.message


@pytest.mark.parametrize(
    "pattern",
    [
        '^["]$',
        "^[\\x22]$",
        "^\\u0022$",
        "^\\u{22}$",
        "^\\x22$",
        "^[\\\\]$",
        "^\\x5c$",
        "a\\\\",
        '[a"]',
        "[\\x5c-z]",
    ],
)
@pytest.mark.parametrize("place", ["pattern", "patternProperties", "propertyNames"])
def test_patterns_that_require_escaped_characters_are_refused(pattern: str, place: str) -> None:
    """A pattern in JSON cannot require a quote or a backslash, however it is spelled."""
    if place == "pattern":
        schema: Any = {"type": "string", "pattern": pattern}
    else:
        schema = {place: {pattern: {}} if place == "patternProperties" else {"pattern": pattern}}
    with pytest.raises(InvalidArgument, match="quote or a backslash"):
        lowered(schema)


def test_references_are_lowered_in_linear_time() -> None:
    """Each definition is processed once, in long chains and in a oneOf that many places repeat."""
    chain = {str(i): {"$ref": f"#/$defs/{i + 1}"} for i in range(1900)} | {"1900": {"type": "null"}}
    enums = {f"e{i}": {"enum": [i * 1000 + j for j in range(90)]} for i in range(60)}
    one = {"oneOf": [{"$ref": f"#/$defs/{name}"} for name in enums]}
    started = time.thread_time()
    lowered({"$defs": chain, "$ref": "#/$defs/0"})
    lowered({"$defs": enums, "properties": {f"p{k}": {"type": "array", "items": one} for k in range(40)}})
    assert time.thread_time() - started < 1.0
    huge = {f"e{i}": {"enum": [i * 500 + j for j in range(500)]} for i in range(64)}
    with pytest.raises(InvalidArgument, match="too many"):
        lowered({"$defs": huge, "oneOf": [{"$ref": f"#/$defs/{name}"} for name in huge]})


def test_property_names_with_values_get_no_type() -> None:
    """A type that the client did not write must not cause a conflict with the keywords beside it."""
    keys: Any = {"propertyNames": {"const": "a"}}
    assert json.loads(lower(Spec("json_schema", json.dumps(keys)))[1])["propertyNames"] == {"enum": ["a"]}
    for keys in (
        {"propertyNames": {"$ref": "#/$defs/x"}, "$defs": {"x": {"type": "string"}}},
        {"propertyNames": {"anyOf": [{}]}},
    ):
        with pytest.raises(InvalidArgument, match="propertyNames that are not a schema of strings"):
            lower(Spec("json_schema", json.dumps(keys)))
