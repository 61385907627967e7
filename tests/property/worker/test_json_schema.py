"""A grammar accepts no text that its schema or expression would reject."""

import itertools
import json
import random
import re
from functools import cache
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from protos.errors import InvalidArgument
from tests.support.worker.grammar_texts import accepts, schema_spec
from tests.support.worker.structured_cases import schema
from worker_svc.grammars.json_schema import FORMATS
from worker_svc.grammars.spec import Spec

pytestmark = pytest.mark.property
CHECKER = Draft202012Validator.FORMAT_CHECKER

A: dict[str, Any] = {"type": "integer"}
SCHEMAS: tuple[Any, ...] = (
    True, {"type": ["string", "null"]}, {"type": "string"}, A, {"type": "number"}, {"type": "boolean"}, {"type": "array"}, {"type": "object"},
    {"const": {"a": 1}}, {"enum": [1, "x", None, [1], {"a": 2}, 1.5, "a\nb", 'a"b']}, {"minLength": 2}, {"maxLength": 1},
    {"type": "string", "minLength": 2, "maxLength": 3}, {"pattern": "^a"}, {"type": "string", "pattern": "^[^x]{2}$"}, {"pattern": "^.{2,3}$"},
    {"pattern": "^a|b$"}, {"pattern": "a$"}, {"pattern": "^\\S+$"}, {"pattern": "^\\d{2}$"}, {"minimum": 5}, {"type": "integer", "minimum": 3},
    {"type": "integer", "maximum": 3}, {"type": "integer", "exclusiveMinimum": 3}, {"type": "integer", "minimum": -5, "maximum": 120},
    {"type": "integer", "minimum": 2.5}, {"type": "integer", "minimum": 3, "exclusiveMinimum": 5}, {"type": "integer", "multipleOf": 1}, {"type": "integer", "multipleOf": 5},
    {"type": "integer", "multipleOf": 3}, {"type": "integer", "multipleOf": 1000.0}, {"pattern": "^([a-z][a-z]*)?$"}, {"pattern": "^(a(b)*|x)?$"},
    {"patternProperties": {"^(x(a)*)?$": A}}, {"propertyNames": {"pattern": "^(a|b|x(a){0,2})$"}},
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
    """Returns texts, their values as JSON, and whether they are JSON at all."""
    texts = [json.dumps(text) for text in TEXTS] + [json.dumps(text, ensure_ascii=False) for text in TEXTS]
    texts += [
        *NUMBERS, "true", "false", "null", "[]", "{}", "[ ]", '{"a" 1}', '{"a": 1,}', "[1,]", "[[]]", "[[[]], []]",
        '"a\nb"', '"a"b"', '"\\x"', '"\\u12"', '"\t"', '"a\x01"', '"\\u0041"', '"\\ud83d\\ude42"', '"\\n\\n"', '{"a": 1, "a": 2}',
        '{"b": 1, "a": {"b": 2}}', '{"a": {"b": "x"}, "b": 1}', '{"a": {"b": 2}, "b": 1}', '{"a\\"b": 1}', '{\n  "a": 1\n}', '{"a":1}',
    ]  # fmt: skip
    for count in (1, 2, 3):
        values = itertools.product(VALUES[: 10 if count < 3 else 4], repeat=count)
        texts += ["[" + ", ".join(each) + "]" for each in values]
    names = ("a", "b", "xa", "x", "c")
    for keys in (*itertools.permutations(names, 1), *itertools.permutations(names, 2)):
        for entries in itertools.product(VALUES[:5], repeat=len(keys)):
            texts.append("{" + ", ".join(f'"{key}": {value}' for key, value in zip(keys, entries, strict=True)) + "}")  # fmt: skip
    read = []
    for text in dict.fromkeys(texts):
        try:
            read.append((text, json.loads(text), True))
        except ValueError:
            read.append((text, None, False))
    return tuple(read)


@pytest.mark.parametrize("schema", SCHEMAS, ids=lambda schema: json.dumps(schema)[:60])
def test_accepted_texts_satisfy_the_schema(schema: Any) -> None:
    is_accepted = accepts(schema_spec(schema))
    validator = Draft202012Validator(_modern(schema), format_checker=CHECKER)
    accepted = 0
    for candidate, value, is_json in pool():
        if is_accepted(candidate):
            accepted += 1
            assert is_json, candidate
            assert validator.is_valid(value), candidate
    assert accepted, "nothing in the pool is allowed"


def test_schemas_of_the_end_to_end_test_are_accepted() -> None:
    for number in range(300):
        try:
            accepts(schema_spec(schema(number)))
        except InvalidArgument as error:
            pytest.fail(f"schema {number}: {error.message}")


UNSAFE = '"\\'
SHORT = ["".join(text) for length in range(6) for text in itertools.product("ab", repeat=length)]


def expression(rng: random.Random, depth: int) -> str:
    """Returns a random expression over a and b with nested groups, alternatives and repetitions."""
    kind = rng.randrange(7) if depth else 0
    if kind <= 1:
        return rng.choice(("a", "b", "[ab]", "[^b]", "."))
    if kind <= 3:
        return expression(rng, depth - 1) + expression(rng, depth - 1)
    if kind == 4:
        return f"({expression(rng, depth - 1)}|{expression(rng, depth - 1)})"
    return f"(?:{expression(rng, depth - 1)})" + rng.choice(
        ("?", "*", "+", "{0,2}", "{1,2}", "{2}", "{1,}", "??")
    )


def flat(rng: random.Random) -> str:
    """Returns a random expression without groups or alternatives."""
    repeats = ("", "", "?", "*", "+", "{0,2}", "{1,2}", "{2}", "{1,}", "{0,3}", "{0}", "+?")
    pieces = (
        rng.choice(("a", "b", "[ab]", "[^b]", ".")) + rng.choice(repeats) for _ in range(rng.randint(1, 5))
    )
    return "".join(pieces)


@pytest.mark.parametrize(
    "start", [pytest.param(at, marks=pytest.mark.slow if at % 200 else ()) for at in range(0, 600, 50)]
)
def test_expressions_match_what_python_matches(start: int) -> None:
    """In JSON strings, as keys and alone, over all texts of two letters and up to five characters."""
    known = (
        ["([ab]|((([ab]|a)){1,2}|aaa))", "(a|a{1,2}|bb)", "(ab*)?", "((a[ab]{0,2}){2,}){0,2}"]
        if not start
        else []
    )
    for seed in range(start, start + 50):
        rng = random.Random(seed)
        pattern = known.pop() if known else expression(rng, 3 + seed % 3) if seed % 3 else flat(rng)
        expected = {text for text in SHORT if re.fullmatch(pattern, text)}
        whole = f"^(?:{pattern})$"
        inside = accepts(schema_spec({"type": "string", "pattern": whole}))
        keys = accepts(
            schema_spec({"patternProperties": {whole: {"type": "null"}}, "additionalProperties": False})
        )
        # Digits keep the complement from being empty, which is refused.
        outside = accepts(
            schema_spec({"type": "string", "not": {"allOf": [{"pattern": whole}, {"pattern": "^[ab]*$"}]}})
        )
        found = accepts(schema_spec({"type": "string", "pattern": f"({pattern})a"}))
        alone = accepts(Spec("regex", pattern))
        assert {text for text in SHORT if inside(f'"{text}"')} == expected, pattern
        assert {text for text in SHORT if not outside(f'"{text}"')} == expected, pattern
        assert {text for text in SHORT if keys(f'{{"{text}": null}}')} == expected, pattern
        assert {text for text in SHORT if alone(text)} == expected, pattern
        searched = {text for text in SHORT if re.search(f"({pattern})a", text)}
        assert {text for text in SHORT if found(f'"{text}"')} == searched, pattern


@pytest.mark.parametrize("name", FORMATS)
def test_formats_match_their_expressions(name: str) -> None:
    """Checked on every text of the pool, and on each text with a character omitted, doubled or replaced."""
    is_accepted = accepts(schema_spec({"type": "string", "format": name}))
    texts = {
        changed
        for text in TEXTS
        for at in range(len(text) + 1)
        for changed in (
            text,
            text[:at] + text[at + 1 :],
            text[:at] + text[at : at + 1] + text[at:],
            text[:at] + ":" + text[at:],
            text[:at] + "-" + text[at + 1 :],
        )
    }
    plain = [text for text in texts if text.isprintable() and not set(text) & {'"', "\\"}]
    for text in plain:
        assert is_accepted(f'"{text}"') == bool(re.fullmatch(FORMATS[name], text)), text


def charset(rng: random.Random) -> str:
    """Returns random content of a class, with characters that are special in classes."""

    def char() -> str:
        point = rng.choice((rng.randrange(0x21, 0x7F), rng.randrange(0xA1, 0x3FF), *map(ord, "-^][b")))
        if chr(point) in UNSAFE:
            return "z"
        return (
            chr(point) if chr(point).isalnum() else f"\\x{point:02x}" if point < 0x80 else f"\\u{point:04x}"
        )

    return "".join(char() for _ in range(rng.randint(1, 5)))


@pytest.mark.parametrize("seed", range(100))
def test_classes_match_what_python_matches(seed: int) -> None:
    """Negated or not, with any spelling; in JSON, some characters are escaped."""
    rng = random.Random(seed)
    pattern = f"[{rng.choice(('', '^'))}{charset(rng)}{rng.choice(('', 'a-f', '0-9', '!-~'))}]"
    inside = accepts(schema_spec({"type": "string", "pattern": pattern}))
    alone = accepts(Spec("regex", pattern))
    for char in map(chr, (*range(0x20, 0x400), 0x2028, 0xD7FF, 0xE000, 0xFFFF, 0x10000, 0x10FFFF)):
        matches = bool(re.fullmatch(pattern, char))
        assert alone(char) == matches, (pattern, char)
        assert inside(json.dumps(char, ensure_ascii=False)) == matches, (pattern, char)


CHARS = tuple(map(chr, (
    *range(1, 0x400), 0x661, 0x966, 0x1680, *range(0x2000, 0x2010), 0x2028, 0x2029, 0x202F, 0x205F, 0x2060, 0x3000, 0x3042, 0xFEFF, 0xFF11, 0x1D7D8, 0x10FFFF,
)))  # fmt: skip


@pytest.mark.parametrize("in_json", [False, True], ids=["alone", "inside"])
@pytest.mark.parametrize(
    "pattern",
    [
        r"\d", r"\D", r"\w", r"\W", r"\s", r"\S", r"[\d_]", r"[\D]", r"[\w-]", r"[\W7]", r"[\sa]", r"[\S]", r"[^\d]", r"[^\D]", r"[^\wé]", r"[^\W]",
        r"[^\s]", r"[^\Sa]", r"[^\0]", r"[^\0-\x1f]", r"[^\0-9]", r'[^\0"\\\x7f]', r"[^\b\t-\r]", r"\x41", r"\u00e9", r"\-", r"[\x41\-\u00e9]", r"[\.-\/]",
    ],
)  # fmt: skip
def test_escapes_match_what_python_matches(pattern: str, in_json: bool) -> None:
    """Escapes are ASCII, in classes and outside. Engines differ on rare spaces."""
    spaces = r"\s" in pattern.lower()
    spec = schema_spec({"type": "string", "pattern": pattern})
    is_accepted = accepts(spec if in_json else Spec("regex", pattern))
    for char in CHARS:
        matches = bool(re.fullmatch(pattern, char, 0 if spaces else re.ASCII))
        if spaces and not (char.isascii() and (char.isprintable() or char in "\t\n\v\f\r")):
            continue
        assert is_accepted(json.dumps(char, ensure_ascii=False) if in_json else char) == matches, (
            pattern,
            char,
        )


def _modern(schema: Any) -> Any:
    """Rewrites draft 7's lists of items to 2020-12."""
    if isinstance(schema, dict) and isinstance(schema.get("items"), list):
        rest = {"items": schema["additionalItems"]} if "additionalItems" in schema else {}
        return {"prefixItems": schema["items"], **rest}
    return schema
