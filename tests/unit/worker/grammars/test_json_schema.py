"""Schemas are enforced so that valid values are accepted and others are not, or refused by name."""

import json
import time
from typing import Any

import pytest

from protos.errors import InvalidArgument
from tests.support.worker.grammar_texts import accepts, compact, lowered, schema_spec

# What zod 4 writes for z.email() and z.iso.datetime().
ZOD_EMAIL = (
    r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$"
)
ZOD_DATETIME = (
    r"^(?:(?:\d\d[2468][048]|\d\d[13579][26]|\d\d0[48]|[02468][048]00|[13579][26]00)-02-29|\d{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12]\d|3[01])|"
    r"(?:0[469]|11)-(?:0[1-9]|[12]\d|30)|(?:02)-(?:0[1-9]|1\d|2[0-8])))T(?:(?:[01]\d|2[0-3]):[0-5]\d(?::[0-5]\d(?:\.\d+)?)?(?:Z))$"
)
LIST: dict[str, Any] = {
    "$defs": {"node": {
        "type": "object", "properties": {"value": {"type": "integer"}, "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}},
        "required": ["value", "next"], "additionalProperties": False,
    }},
    "$ref": "#/$defs/node",
}  # fmt: skip
A, S = {"type": "integer"}, {"type": "string"}
SHAPES = {"oneOf": [
    {"type": "object", "properties": {"kind": {"const": "circle"}, "r": A}, "required": ["kind", "r"]},
    {"type": "object", "properties": {"kind": {"const": "square"}, "w": A}, "required": ["kind", "w"]},
]}  # fmt: skip


def strings(**keywords: Any) -> dict[str, Any]:
    """Returns a schema of strings."""
    return {"type": "string", **keywords}


@pytest.mark.parametrize(
    ("schema", "valid", "invalid"),
    [
        # Expressions match anywhere.
        (strings(pattern="^https?://"), ["https://a.b", "http://"], ["ftp://", "a https://"]),
        (strings(pattern=r"\S"), ["a", " b ", "\n"[:0] + "x\n"], ["", " ", "\t"]),
        (strings(pattern="a|^b|c$"), ["xay", "bx", "xc"], ["xb", "cx", ""]),
        (strings(pattern="(^|,)foo($|,)"), ["foo", "a,foo,b", "foo,"], ["afoo", "food"]),
        (strings(pattern=r"a\x20b"), ["a b", "xa by"], ["ab"]), (strings(pattern=r"^\x411$"), ["A1"], ["\u0411", "A"]),
        (strings(pattern=r"^\u{1F600}$"), ["\U0001f600"], ["x"]), (strings(pattern=r"^\ud83d\ude00.$"), ["\U0001f600x"], ["x"]),
        (strings(pattern=r"^\p{Letter}\P{L}$"), ["é1", "a "], ["ab", "11"]),
        (strings(pattern="^a.$"), ["ab", 'a"', "a\\", "a\U0001f600"], ["a\n", "a"]), (strings(pattern=r"^[\\\"\n]+$"), ['"', "\\\n"], ["a", ""]),
        (strings(pattern=ZOD_EMAIL, format="email"), ["a.b@c.de"], ["a..b@c.de", ".a@b.cd", "a@b"]),
        (strings(pattern=ZOD_DATETIME, format="date-time"), ["2024-02-29T10:00:00Z"], ["2023-02-29T10:00:00Z", "2024-02-29T10:00:00+01:00"]),
        (strings(pattern=r"^(?=.*\d)(?=.*[a-z]).{4,}$"), ["ab1c", "1234x"], ["abcd", "1a"]),
        (strings(pattern="b", maxLength=3, minLength=2), ["ab", "bbb"], ["b", "aaa", "abcd"]),
        (strings(pattern="^[a-z]*$", **{"not": {"pattern": "^(foo|bar)$"}}), ["foob", "fo", ""], ["foo", "bar", "A"]),
        (strings(pattern=r"^{[a-z]+}$"), ["{ab}"], ["ab"]), (strings(pattern=r"^x{,3}$"), ["x{,3}"], ["xx"]), (strings(pattern=r"^[^]$"), ["a", "\n"], [""]),
        (strings(pattern=r"^[\w.-]+$", minLength=2, maxLength=3), ["a.", "a-b"], ["a", "abcd", "é1"]), (strings(pattern=r"^(?!foo).*$"), ["bar"], ["foobar"]),
        (strings(pattern=r"^P(?!$)(\d+D)?(T(?=\d)(\d+H)?)?$"), ["P1D", "PT1H"], ["P", "PT"]), (strings(pattern=""), ["", "x"], [1]),
        # Characters are counted as readers see them.
        (strings(minLength=1), ['"', "\\", "\n", "\U0001f600", "é"], [""]), (strings(maxLength=1), ["\U0001f600", "\x01", '"'], ["ab", "\n\n"]),
        (strings(minLength=2, maxLength=2), ["\U0001f600\U0001f600", '\\"'], ["\U0001f600", "abc"]),
        # Formats count where the type is said; unknown ones are annotations.
        (strings(format="uuid"), ["550e8400-e29b-41d4-a716-446655440000"], ["x"]), (strings(format="binary"), ["anything"], [1]),
        ({"format": "email"}, ["not an address", 3], []), (strings(format="date", minLength=10), ["2020-02-29"], ["2021-02-29"]),
        (strings(format="uri"), ["https://a.b:50051/p%20q?q=x+y&r=a/b#t:1", "mailto:a.b@c.de", "urn:isbn:0451450523"], ["http://a b", "a", "urn://x"]),
        (strings(format="uri-reference"), ["a/b.html#x", "/x?y", "#f", "https://x.y"], ["a b"]),
        # A pattern decides where the format's expression allows nothing of it, as for zod's times.
        (strings(format="time", pattern=r"^(?:[01]\d|2[0-3]):[0-5]\d(?::[0-5]\d)?$"), ["10:20", "10:20:30"], ["25:00", "10:20:30Z"]),
        (strings(format="uuid", pattern="^[0-9a-f-]+$"), ["550e8400-e29b-41d4-a716-446655440000"], ["5-5", "550E8400-e29b-41d4-a716-446655440000"]),
        # A null keyword is one that is not set.
        ({"type": "string", "enum": None, "anyOf": None, "not": None, "$ref": None, "const": "a"}, ["a"], ["b"]), ({"const": None, "contains": None}, [None], [1]),
        # Numbers are exact.
        ({"type": "integer", "minimum": -9007199254740991, "maximum": 9007199254740991},
         [0, 9007199254740991, -9007199254740991], [9007199254740992, -9007199254740992, 1.5, "1"]),
        ({"type": "integer", "exclusiveMinimum": 0.5, "exclusiveMaximum": 3}, [1, 2], [0, 3]), ({"type": "number", "minimum": 0}, [0, 0.5, 10], [-0.1, -1]),
        ({"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1}, [0.5, 0.001], [0, 1, 1.0, -0.5, 0.0]),
        ({"type": "number", "minimum": -1.5, "maximum": 2.25}, [-1.5, 0, 2.25, 2.2], [-1.51, 2.26, 3, -2]),
        ({"type": "integer", "minimum": 10**30}, [10**30, 10**31], [10**29, 10**30 - 1]), ({"type": "number", "maximum": -0.001}, [-0.001, -5], [0, -0.0001]),
        ({"multipleOf": 0.01}, [19.99, 3, "x"], [0.001]), ({"type": "integer", "multipleOf": 5, "minimum": 3}, [5, 100], [0, 6, -5]),
        ({"multipleOf": 1.5}, [4.5, -4.5, 0, -3], [4, -4]), ({"type": "integer", "multipleOf": 3, "minimum": -10, "maximum": 10}, [-9, 0, 9], [-12, 12, -10]),
        ({"type": "integer", "multipleOf": 5, "exclusiveMaximum": 0}, [-5, -100], [0, 5, -6]), ({"type": "integer", "multipleOf": 5, "exclusiveMinimum": 0}, [5], [0, -5]),
        ({"type": "integer", "minimum": 0, "maximum": 18446744073709551615}, [0, 18446744073709551615], [-1, 18446744073709551616]),
        ({"type": ["string", "null"], "format": "date"}, [None, "2024-02-29"], ["x", "2023-02-29"]),
        ({"type": "number", "not": {"type": "integer"}}, [1.5], [1, 2]), ({"type": "number", "not": {"minimum": 5}}, [4, -1, 4.5], [5, 6]),
        ({"enum": [19.99, "a", None, [1, {"b": 2}], 3]}, [19.99, "a", None, [1, {"b": 2}], 3], [19.9, "b", [1], {}]),
        ({"enum": ["a", 1, 2.5], "type": "string"}, ["a"], [1, 2.5]), ({"const": 1, "minimum": 0}, [1], [0, 2]),
        # Parts combine.
        ({"allOf": [{"properties": {"a": A}, "required": ["a"]}, {"properties": {"b": S}, "required": ["b"]}], "type": "object"},
         [{"a": 1, "b": "x"}], [{"a": 1}, {"a": "x", "b": "x"}, 3]),
        ({"$ref": "#/$defs/n", "minimum": 1, "$defs": {"n": A}}, [1, 2], [0, 1.5]),
        ({"allOf": [{"properties": {"a": A}}, {"additionalProperties": False, "properties": {"b": S}}], "type": "object"}, [{}, {"b": "x"}], [{"a": 1}]),
        ({"type": ["integer", "string"], "minimum": 3, "minLength": 2}, [3, "ab"], [2, "a", None]), ({"minLength": 1, "minimum": 2}, ["a", 2, None], ["", 1]),
        (SHAPES, [{"kind": "circle", "r": 1}, {"kind": "square", "w": 2, "r": "x"}], [{"kind": "circle", "w": 1}, {"kind": "x"}]),
        ({"oneOf": [A, {"type": "number", "minimum": 2}]}, [1, 2.5], [2, 1.5]), ({"oneOf": [{"minLength": 2}, {"maxLength": 3}], "type": "string"}, ["a", "abcd"], ["ab"]),
        ({"type": "object", "properties": {"a": S, "b": S}, "if": {"properties": {"a": {"const": "x"}}, "required": ["a"]},
          "then": {"required": ["b"]}, "else": {"properties": {"b": False}}},
         [{"a": "x", "b": "y"}, {"a": "y"}, {}], [{"a": "x"}, {"a": "y", "b": "y"}]),
        ({"not": S}, [1, None, {}], ["a"]), ({"not": {"enum": ["a", 1]}}, ["b", 2, None], ["a", 1]), ({"anyOf": [A, {"minLength": 2}]}, [1, "ab", None], ["a"]),
        # Objects.
        ({"type": "object", "properties": {'a"b': A, "é\n": A}, "required": ['a"b']}, [{'a"b': 1, "é\n": 2, "c": 3}], [{}, {'a"b': "x"}]),
        ({"type": "object", "properties": {"a": A}, "additionalProperties": False}, [{}, {"a": 1}], [{"b": 1}, {"a": "x"}]),
        ({"type": "object", "properties": {"a": A}, "required": ["b"], "additionalProperties": S}, [{"b": "x"}, {"a": 1, "b": "x", "c": "y"}], [{"a": 1}, {"b": 1}]),
        ({"type": "object", "properties": {"a": False}}, [{}, {"b": 1}], [{"a": 1}]), ({"required": ["a"]}, [{"a": 1, "b": 2}, 3], [{"b": 1}]),
        ({"type": "object", "patternProperties": {"^x": A, "y$": {"minimum": 5}}}, [{"x": 1, "y": 5, "z": "s"}, {"xy": 7}], [{"x": "s"}, {"xy": 3}, {"y": 4}]),
        ({"type": "object", "propertyNames": {"pattern": "^[a-z]+$", "maxLength": 3}}, [{"abc": 1}, {}], [{"abcd": 1}, {"A": 1}]),
        ({"type": "object", "propertyNames": {"enum": ["a", "b"]}, "additionalProperties": A}, [{"a": 1, "b": 2}], [{"c": 1}, {"a": "x"}]),
        ({"type": "object", "minProperties": 1}, [{"a": 1}], [{}]), ({"type": "object", "maxProperties": 1}, [{}, {"a": 1}], [{"a": 1, "b": 2}]),
        ({"type": "object", "properties": {"a": A, "b": A, "c": A}, "additionalProperties": False, "minProperties": 2}, [{"a": 1, "c": 2}], [{"a": 1}]),
        ({"type": "object", "properties": {"a": A, "b": A}, "dependentRequired": {"a": ["b"]}}, [{}, {"b": 1}, {"a": 1, "b": 1}], [{"a": 1}]),
        ({"type": "object", "dependentSchemas": {"a": {"required": ["b"], "properties": {"b": S}}}}, [{"b": "x", "a": 1}, {"b": 1}], [{"a": 1}, {"b": 2, "a": 1}]),
        ({"type": "object", "allOf": [{"properties": {"a": A}}], "properties": {"b": S}, "unevaluatedProperties": False}, [{"b": "x", "a": 1}], [{"c": 1}]),
        ({"type": "object", "not": {"required": ["a"]}}, [{}, {"b": 1}], [{"a": 1}]), ({"not": {"additionalProperties": A}}, [{"a": "x"}, {"b": 1, "a": "x"}], [{}, {"a": 1}, 3]),
        # Arrays.
        ({"type": "array", "prefixItems": [A, S], "items": False, "minItems": 1}, [[1], [1, "x"]], [[], [1, 2], [1, "x", 3]]),
        ({"prefixItems": [A]}, [[], [1], [1, "x"], 3], [["x"]]), ({"type": "array", "items": [A], "additionalItems": S}, [[1, "x"], []], [[1, 2]]),
        ({"type": "array", "contains": {"minimum": 5}, "items": A}, [[1, 5], [7]], [[1], []]), ({"contains": A, "maxContains": 1}, [[1, "x"], 3], [[1, 2], ["x"]]),
        ({"type": "array", "contains": A, "minContains": 2}, [[1, "x", 2]], [[1, "x"]]), ({"type": "array", "minItems": 2, "maxItems": 3}, [[1, 2], [1, 2, 3]], [[1], [1, 2, 3, 4]]),
        ({"type": "array", "items": {"enum": ["a", "b", "c"]}, "uniqueItems": True, "minItems": 1, "maxItems": 2}, [["a"], ["b", "a"]], [["a", "a"], [], ["a", "b", "c"]]),
        ({"type": "array", "uniqueItems": True, "maxItems": 1}, [[], [1]], [[1, 2]]), ({"prefixItems": [A], "unevaluatedItems": False}, [[1]], [[1, 2]]),
        # References and booleans.
        (LIST, [{"value": 1, "next": None}, {"value": 1, "next": {"value": 2, "next": None}}], [{"value": 1}, {"value": 1, "next": {}}]),
        ({"type": "array", "items": {"$ref": "#"}}, [[], [[], [[]]]], [[1]]), (True, [1, {}, "x"], []), ({}, [None], []),
        ({"$id": "https://a.test/s", "$defs": {"x": {"$anchor": "n", "type": "integer"}}, "$ref": "#n"}, [1], ["x"]),
        ({"$id": "https://a.test/s", "$defs": {"x": {"$id": "t", "type": "integer"}}, "items": {"$ref": "t"}}, [[1]], [["x"]]),
        ({"$defs": {"a b/c%": A}, "$ref": "#/$defs/a%20b~1c%25"}, [1], ["x"]),
        ({"$defs": {"a": {"properties": {"b": {"$ref": "#/$defs/b"}}}, "b": {"properties": {"a": {"$ref": "#/$defs/a"}}, "type": "object"}},
          "$ref": "#/$defs/a", "type": "object"}, [{}, {"b": {"a": {"b": {}}}}], [{"b": 1}]),
        # Unknown keywords are annotations, as is everything that describes.
        ({"type": "integer", "x-order": 1, "title": "t", "examples": ["a"], "minlength": 3}, [1], ["a"]),
    ],
    ids=lambda value: json.dumps(value)[:60],
)  # fmt: skip
def test_values_are_accepted_if_they_are_valid(schema: Any, valid: list[Any], invalid: list[Any]) -> None:
    is_accepted = accepts(schema_spec(schema))
    assert [value for value in valid if not is_accepted(compact(value))] == []
    assert [value for value in invalid if is_accepted(compact(value))] == []


@pytest.mark.parametrize(
    ("schema", "valid", "invalid"),
    [
        ('{"const": 18446744073709551615}', ["18446744073709551615"], ["1.8446744073709552e+19", "18446744073709551614"]),
        ('{"enum": [19.99, 1e400]}', ["19.99", "1E+400"], ["19.989999999999998", "Infinity"]),
        ('{"maximum": 1e400}', ["5"], []), ('{"type": "number", "minimum": 0}', ["-0", "0.0", "-0.0"], ["-0.1"]),
        ('{"type": "string", "maxLength": 1}', ['"\\ud83d\\ude00"', '"\\n"', '"\\u000a"'], ['"\\ud83d"', '"\n"']),
        ('{"type": "object", "properties": {"a": {"type": "integer"}}}', ['{"a": 1,\n "b": 2}', "{ }"],
         ['{"a": 1, "a": "x"}', '{"a": 1, "\\u0061": "x"}', '{"b": 1, "a": "x"}']),
        ('{"type": "integer"}', ["12"], ["01", "+1", "1e2", " 1"]),
    ],
)  # fmt: skip
def test_texts_are_accepted_as_json_writes_them(schema: str, valid: list[str], invalid: list[str]) -> None:
    """Numbers keep their digits, an escape is one character, and no listed name occurs twice."""
    is_accepted = accepts(schema_spec(schema))
    assert [text for text in valid if not is_accepted(text)] == []
    assert [text for text in invalid if is_accepted(text)] == []


@pytest.mark.parametrize(
    ("schema", "why"),
    [
        ({"type": "object", "properties": {"n": {"$ref": "#"}}, "required": ["n"], "additionalProperties": False}, "no finite"),
        ({"$defs": {"a": {"type": "array", "items": {"$ref": "#/$defs/b"}, "minItems": 1},
                    "b": {"properties": {"a": {"$ref": "#/$defs/a"}}, "required": ["a"], "type": "object"}}, "$ref": "#/$defs/a"}, "no finite"),
        (False, "no finite"), ({"not": {}}, "no finite"), ({"type": "string", "minLength": 3, "maxLength": 2}, "no finite"), ({"enum": []}, "no finite"),
        ({"allOf": [A, S]}, "no finite"), ({"properties": {"a": False}, "required": ["a"], "type": "object"}, "no finite"),
        (strings(pattern="^a$", minLength=2), "no finite"), ({"type": "integer", "minimum": 3, "maximum": 2}, "no finite"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"), ({"type": "object", "minProperties": 2}, "minProperties"),
        (strings(pattern="(?<=a)b"), "looks behind"), (strings(pattern=r"(a)\1"), r"\1"), (strings(pattern=r"\bword\b"), r"\b"),
        (strings(pattern=r"^\p{Script=Greek}+$"), r"\p"), (strings(pattern="(?i)a"), "group"), (strings(pattern="(^a)*"), "anchor"), (strings(pattern="["), "not closed"),
        ({"type": "array", "items": {"pattern": "a**", "type": "string"}}, "$.items"), ({"$ref": "http://a.test/b"}, "never fetched"),
        ({"type": "string", "$defs": {"unused": {"$ref": "file:///etc/passwd"}}}, "never fetched"),
        ({"items": {"$recursiveRef": "http://a.test/b"}}, "never fetched"), ({"$dynamicRef": "//a.test/b"}, "never fetched"),
        ({"$ref": "http://["}, "not a URI"), ({"$id": "http://[", "type": "string"}, "not a URI"),
        ({"$ref": "other.json"}, "never fetched"), ({"$ref": "#/a"}, "leads nowhere"), ({"$ref": "#a"}, "leads nowhere"), ({"$ref": 3}, "not a text"),
        ({"$ref": "#"}, "refers to itself"), ({"$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}]}}, "$ref": "#/$defs/a"}, "refers to itself"),
        ({"type": "strin"}, "strin"), ({"type": []}, "type"), (3, "must be an object"),
        ({"anyOf": []}, "at least one"), ({"properties": {"a": 3}}, "schema belongs"), ({"properties": []}, "properties"), ({"required": "a"}, "required"),
        ({"minLength": -1}, "minLength"), ({"minItems": 1.5}, "minItems"), ({"minimum": "1"}, "minimum"), ({"multipleOf": 0}, "multipleOf"),
        ({"enum": 3}, "enum"), ({"pattern": 3}, "pattern"), ({"type": "integer", "multipleOf": 123456789}, "multipleOf"),
        ({"type": "string", "not": {"format": "x"}, "pattern": "(a{1000}){1000}"}, "repeat less"), ({"oneOf": [S] * 200}, "oneOf"),
    ],
    ids=lambda value: json.dumps(value)[:60],
)  # fmt: skip
def test_other_schemas_are_refused_by_name(schema: Any, why: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        lowered(schema_spec(schema))
    assert why in caught.value.message
    assert caught.value.param == "structured_output"
    assert "\n" not in caught.value.message


def test_large_schemas_are_lowered_quickly() -> None:
    """Ten long strings share a definition, and so do many uses of one reference."""
    strings_100 = {f"p{i}": strings(maxLength=100) for i in range(10)}
    enums = {f"e{i}": {"enum": [i * 1000 + j for j in range(90)]} for i in range(25)}
    one = {"oneOf": [{"$ref": f"#/$defs/{name}"} for name in enums]}
    started = time.thread_time()
    accepts(schema_spec({"type": "object", "properties": strings_100, "required": list(strings_100)}))
    accepts(
        schema_spec(
            {"$defs": enums, "properties": {f"p{k}": {"type": "array", "items": one} for k in range(40)}}
        )
    )
    accepts(schema_spec({"type": "object", "properties": {f"p{i}": S for i in range(300)}}))
    assert time.thread_time() - started < 3.0
