"""What a lowered schema lets through, the schema lets through: every text of a pool that the grammar accepts is valid JSON and validates."""

import itertools
import json
from functools import cache
from typing import Any

import pytest
import xgrammar
from jsonschema import Draft202012Validator

from protos.errors import InvalidArgument
from worker_svc.grammars.nursery import MAX_WHITESPACE
from worker_svc.grammars.spec import Spec, lower

pytestmark = pytest.mark.property
CHECKER = Draft202012Validator.FORMAT_CHECKER

A: dict[str, Any] = {"type": "integer"}
SCHEMAS: tuple[Any, ...] = (
    True, {"type": ["string", "null"]}, {"type": "string"}, A, {"type": "number"}, {"type": "boolean"}, {"type": "array"}, {"type": "object"},
    {"const": {"a": 1}}, {"enum": [1, "x", None, [1], {"a": 2}, 1.5, "a\nb", 'a"b']}, {"minLength": 2}, {"maxLength": 1},
    {"type": "string", "minLength": 2, "maxLength": 3}, {"pattern": "^a"}, {"type": "string", "pattern": "^[^x]{2}$"}, {"pattern": "^.{2,3}$"},
    {"pattern": "^a|b$"}, {"pattern": "a$"}, {"pattern": "^\\S+$"}, {"pattern": "^\\d{2}$"}, {"minimum": 5}, {"type": "integer", "minimum": 3},
    {"type": "integer", "maximum": 3}, {"type": "integer", "exclusiveMinimum": 3}, {"type": "integer", "minimum": -5, "maximum": 120},
    {"type": "integer", "minimum": 2.5}, {"type": "integer", "minimum": 3, "exclusiveMinimum": 5}, {"type": "integer", "multipleOf": 1},
    {"type": "number", "minimum": 3}, {"type": "number", "exclusiveMaximum": 3}, {"type": "number", "minimum": -1.5, "maximum": 2.25},
    {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1}, {"type": "number", "minimum": 0.1}, {"type": "number", "maximum": -0.001},
    {"type": ["integer", "string"], "minimum": 3, "minLength": 2}, {"items": A}, {"type": "array", "minItems": 2}, {"maxItems": 1},
    {"items": {"type": "string"}, "minItems": 1, "maxItems": 2}, {"prefixItems": [A, {"type": "string"}]}, {"prefixItems": [A], "items": False},
    {"prefixItems": [A], "items": {"type": "string"}, "minItems": 2, "maxItems": 3}, {"items": [A, {"type": "string"}]},
    {"items": [A], "additionalItems": {"type": "null"}}, {"items": False}, {"prefixItems": [A], "unevaluatedItems": False},
    {"properties": {"a": A}}, {"properties": {"a": A}, "additionalProperties": True}, {"properties": {"a": A}, "additionalProperties": {"type": "string"}},
    {"additionalProperties": A}, {"additionalProperties": False}, {"required": ["a"]}, {"properties": {"a": A, "b": A}, "required": ["a"]},
    {"properties": {"a": A}, "required": ["b"], "additionalProperties": True}, {"required": ["b"], "additionalProperties": A},
    {"minProperties": 1}, {"maxProperties": 1}, {"properties": {"a": {}, "b": {}}, "minProperties": 1}, {"properties": {"a": {}, "b": {}}, "maxProperties": 1},
    {"properties": {"a": {}, "b": {}}, "required": ["a"], "maxProperties": 1}, {"properties": {"a": {}, "b": False}},
    {"patternProperties": {"^x": A}}, {"patternProperties": {"x": A}, "maxProperties": 1}, {"propertyNames": {"pattern": "^x"}},
    {"propertyNames": {"maxLength": 1}}, {"propertyNames": {"enum": ["a", "b"]}, "additionalProperties": A}, {"properties": {"a": {}}, "unevaluatedProperties": False},
    {"anyOf": [A, {"type": "string", "maxLength": 1}]}, {"oneOf": [A, {"type": "string"}]}, {"allOf": [A]},
    {"oneOf": [{"properties": {"a": {"const": 1}, "b": A}, "required": ["a"], "type": "object"}, {"properties": {"a": {"const": 2}}, "required": ["a"], "type": "object"}]},
    {"$ref": "#/$defs/a", "$defs": {"a": A}}, {"type": "array", "items": {"$ref": "#"}}, {"$ref": "#/$defs/a%20b", "$defs": {"a b": A}},
    {"$defs": {"n": {"type": "object", "properties": {"a": {"$ref": "#/$defs/n"}, "b": A}, "required": ["b"]}}, "$ref": "#/$defs/n"},
    {"properties": {'a"b': A, "": A}, "required": ["a\"b"]},
    *({"type": "string", "format": name} for name in (
        "date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "uri-reference", "json-pointer",
        "relative-json-pointer")),
)  # fmt: skip

TEXTS = (
    "", "a", "b", "aa", "aaa", "ab", "ba", "x", "xa", "12", "a b", "é", "日本", "a\nb", '"', "\\", "\0", "🙂", 'a"b', "\t", "2020-01-01", "2020-13-45",
    "2021-02-29", "2020-02-29", "2020-02-30", "1900-02-29", "12:00:00Z", "25:00:00Z", "23:59:60Z", "12:00:00+25:00", "2020-01-01T12:00:00Z",
    "2021-02-29T12:00:00Z", "P1D", "P", "PT", "P1DT", "P1Y2D", "1.2.3.4", "256.1.1.1", "01.2.3.4", "::1", "::", "1::2::3", "12345::", ":::",
    "1:2:3:4:5:6:7:8", "a.com", "-a.com", "a-.com", "a" * 64 + ".com", "a@b.c", "@b", "a@", "a b@c", "http://a", "http://a b", "/a/b", "~0", "/~2", "/~1",
    "0/a", "0", "01#", "1#", "-", "550e8400-e29b-41d4-a716-446655440000", "%zz",
)  # fmt: skip
NUMBERS = (
    "0", "-0", "1", "-1", "2", "3", "4", "5", "6", "9", "12", "99", "100", "119", "120", "121", "-4", "-5", "-6", "1.5", "2.25", "2.250", "2.26", "2.5", "0.5",
    "0.05", "0.0999", "0.1", "0.10", "0.11", "-0.001", "-0.0009", "0.001", "-1.5", "-1.51", "3.0", "2.9999", "1e0", "1E+2", "3e0", "30e-1", "1e400", "00", "+1",
    ".5", "5.", "1e", "03", "-", "1.0", "-0.0", "5e-1", "1000000", "0.000001",
)  # fmt: skip
VALUES = ("1", "2", "4", '"x"', '""', "null", "[]", '"bb"', '{"a":1}', "1.5")


@cache
def pool() -> tuple[tuple[str, Any, bool], ...]:
    """Texts, what they mean as JSON, and whether they do."""
    texts = [json.dumps(text) for text in TEXTS] + [json.dumps(text, ensure_ascii=False) for text in TEXTS]
    texts += [
        *NUMBERS,
        "true",
        "false",
        "null",
        "[]",
        "{}",
        "[ ]",
        '{"a" 1}',
        '{"a": 1,}',
        "[1,]",
        "[[]]",
        "[[[]], []]",
    ]
    texts += [
        '"a\nb"',
        '"a"b"',
        '"\\x"',
        '"\\u12"',
        '"\t"',
        '"a\x01"',
        '"\\u0041"',
        '"\\ud83d\\ude42"',
        '"\\n\\n"',
        '{"a": 1, "a": 2}',
    ]
    texts += [
        '{"b": 1, "a": {"b": 2}}',
        '{"a": {"b": "x"}, "b": 1}',
        '{"a": {"b": 2}, "b": 1}',
        '{"a\\"b": 1}',
        '{\n  "a": 1\n}',
        '{"a":1}',
    ]
    for count in (1, 2, 3):
        texts += [
            "[" + ", ".join(each) + "]"
            for each in itertools.product(VALUES[: 10 if count < 3 else 4], repeat=count)
        ]
    for keys in [
        *itertools.permutations(("a", "b", "xa", "x", "c"), 1),
        *itertools.permutations(("a", "b", "xa", "x", "c"), 2),
    ]:
        for values in itertools.product(VALUES[:5], repeat=len(keys)):
            texts.append(
                "{" + ", ".join(f'"{key}": {value}' for key, value in zip(keys, values, strict=True)) + "}"
            )
    read = []
    for text in dict.fromkeys(texts):
        try:
            read.append((text, json.loads(text), True))
        except ValueError:
            read.append((text, None, False))
    return tuple(read)


@cache
def compiler() -> xgrammar.GrammarCompiler:
    """For a vocabulary of single bytes: texts are matched, not tokens."""
    info = xgrammar.TokenizerInfo(
        [bytes([byte]) for byte in range(256)], xgrammar.VocabType.RAW, stop_token_ids=[0]
    )
    return xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)


@pytest.mark.parametrize("schema", SCHEMAS, ids=lambda schema: json.dumps(schema)[:60])
def test_what_the_grammar_accepts_is_valid(schema: Any) -> None:
    """Keyword by keyword, over a pool of a thousand texts."""
    _, text = lower(Spec("json_schema", json.dumps(schema)))
    grammar = compiler().compile_json_schema(text, max_whitespace_cnt=MAX_WHITESPACE)
    matcher = xgrammar.GrammarMatcher(grammar)
    validator = Draft202012Validator(_modern(schema), format_checker=CHECKER)
    accepted = 0
    for candidate, value, is_json in pool():
        matcher.reset()
        if matcher.accept_string(candidate) and matcher.is_completed():
            accepted += 1
            assert is_json, candidate
            assert validator.is_valid(value), candidate
    assert accepted, "nothing in the pool is allowed"


@pytest.mark.parametrize("number", range(300))
def test_every_case_of_the_end_to_end_test_is_served(number: int) -> None:
    """None of the schemas that SmolLM2 generates under is refused."""
    from tests.structured_cases import schema

    try:
        lower(Spec("json_schema", json.dumps(schema(number))))
    except InvalidArgument as error:
        pytest.fail(error.message)


def _modern(schema: Any) -> Any:
    """Draft 7's lists of items as 2020-12 has them."""
    if isinstance(schema, dict) and isinstance(schema.get("items"), list):
        rest = {"items": schema["additionalItems"]} if "additionalItems" in schema else {}
        return {"prefixItems": schema["items"], **rest}
    return schema
