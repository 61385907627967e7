"""What a request may ask its output to match, before a compiler sees it."""

import json
import re
import time
from typing import Any

import pytest

from protos.errors import InvalidArgument
from protos.limits import MAX_GRAMMAR_BYTES
from worker_svc.grammars.lowering.regex import lower_regex
from worker_svc.grammars.spec import Spec, lower


def lowered(schema: Any) -> Any:
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
def test_a_schema_comes_out_as_what_is_enforced(schema: Any, result: Any) -> None:
    """Types are made explicit, lengths become expressions, references get a home of their own."""
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
        ({"minlength": 1}, "minlength"), ({"$ref": "http://a/b"}, "only references"), ({"$ref": "#/a"}, "leads nowhere"),
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
        ({"type": "number", "minimum": True}, "not a number"), ({"type": "string", "minLength": -1}, "integer from 0"),
        ({"type": "string", "minLength": 3, "maxLength": 2}, "above"), ({"type": "string", "maxLength": 10**9}, "at most"),
    ],
)  # fmt: skip
def test_what_cannot_be_enforced_is_refused(schema: Any, why: str) -> None:
    """By the keyword's name and its place, in one line."""
    with pytest.raises(InvalidArgument) as caught:
        lowered(schema)
    assert why in caught.value.message
    assert caught.value.param == "structured_output"
    assert "\n" not in caught.value.message


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        (Spec("json_schema", "{"), "not valid JSON"), (Spec("json_schema", '{"minimum": NaN, "type": "number"}'), "not a number"),
        (Spec("json_schema", '{"minimum": 1e999, "type": "number"}'), "not a number"),
        (Spec("regex", ""), "empty"), (Spec("regex", "a\0"), "NUL"), (Spec("regex", "(?<=a)b"), "looks ahead"),
        (Spec("regex", "a{40000000}"), "repeat less"), (Spec("regex", "(a{1000}){1000}"), "repeat less"), (Spec("regex", "\\Aab\\Z"), "has .A,"),
        (Spec("regex", "\\Qa\\E"), "has .Q,"), (Spec("regex", "(?i)a"), "kind"), (Spec("regex", "a{3,2}"), "minimum"), (Spec("regex", "(a"), "not closed"),
        (Spec("regex", "a)"), "not opened"), (Spec("regex", "a**"), "nothing to repeat"), (Spec("regex", "[]"), "empty class"), (Spec("regex", "a\\"), "ends with"),
        (Spec("regex", "\\ud83d"), "not a character"), (Spec("json_schema", '{"type": "string", "pattern": "(a{30000}){300}"}'), "repeat less"),
        (Spec("regex", "a$b"), "anchor"), (Spec("grammar", " "), "empty"), (Spec("grammar", "start: 'a'"), "Lark"),
        (Spec("choice", "[]"), "at least one"), (Spec("choice", '[""]'), "empty string"), (Spec("choice", '"a"'), "list"),
        (Spec("structural_tag", "[]"), "JSON object"), (Spec("structural_tag", '{"structures": [1]}'), "begin"),
        (Spec("structural_tag", json.dumps({"type": "structural_tag", "format": {
            "type": "json_schema", "json_schema": {"not": {}}}})), "not"),
        (Spec("structural_tag", json.dumps({"type": "structural_tag", "format": {"type": "tag", "begin": "<f>", "end": "</f>",
            "json_schema": {}, "content": {"type": "json_schema", "json_schema": {"not": {}}}}})), "not"),
        (Spec("structural_tag", json.dumps({"type": "structural_tag", "json_schema": {}, "format": {
            "type": "regex", "json_schema": {}, "pattern": "(?!a)[ab]"}})), "looks ahead"),
    ],
)  # fmt: skip
def test_other_kinds_are_refused_as_well(spec: Spec, why: str) -> None:
    """Texts that are no such thing, and parts that would be ignored."""
    with pytest.raises(InvalidArgument, match=why):
        lower(spec)


@pytest.mark.parametrize(
    "spec",
    [
        Spec("json_schema", '{"a":' * 200_000), Spec("json_schema", "[" * 200_000), Spec("regex", "(" * 100_000),
        Spec("regex", "|" * 100_000), Spec("regex", "a" * (MAX_GRAMMAR_BYTES + 1)), Spec("grammar", "root ::= " + "(" * 100_000),
        Spec("grammar", "root ::= " + '"a" |' * 40_000), Spec("grammar", "root ::= " + "x" * 1_000_000),
        Spec("regex", "a{10000000}"), Spec("regex", "(" * 60 + "a{9}" + "){9}" * 60), Spec("regex", "(a|" * 65 + "b" + ")" * 65),
        Spec("regex", "a{99999999999999999999}"), Spec("json_schema", '{"type": "string", "pattern": "(a{30000}){300}"}'),
        Spec("choice", json.dumps(["x"] * 60_000)), Spec("json_schema", json.dumps({"enum": list(range(30_000))})),
        Spec("json_schema", json.dumps({"properties": {f"p{i}": {"type": "null"} for i in range(5000)}})),
        Spec("structural_tag", '{"a":' * 50_000), Spec("structural_tag", json.dumps({"a": [{"b": 1}] * 20_000})),
        Spec("json_schema", json.dumps({"oneOf": [{"type": "object"}] * 10_000})),
        Spec("json_schema", '"' + '\\"' * 100_000 + "\\"), Spec("json_schema", '{"$ref": "#' + "/a" * 100_000 + '"}'),
    ],
    ids=lambda spec: f"{spec.kind}-{spec.text[:12]}-{len(spec.text)}",
)  # fmt: skip
def test_hostile_specs_are_refused_at_once(spec: Spec) -> None:
    """Size, depth and branches are bounded before anything is compiled."""
    started = time.perf_counter()
    with pytest.raises(InvalidArgument):
        lower(spec)
    assert time.perf_counter() - started < 1.0


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
def test_what_json_would_have_to_escape_is_refused(pattern: str, place: str) -> None:
    """However it is spelled, and wherever the expression stands."""
    if place == "pattern":
        schema: Any = {"type": "string", "pattern": pattern}
    else:
        schema = {place: {pattern: {}} if place == "patternProperties" else {"pattern": pattern}}
    with pytest.raises(InvalidArgument, match="quote or a backslash"):
        lowered(schema)


@pytest.mark.parametrize(
    "escape",
    [r"\012", r"\00", r"\07", r"\12", r"\x4", r"\x", r"\u12", r"\u{}", r"\u{g}", r"\c1", r"\c", r"\q", r"\B", r"\é", "\\\u0663"],
)  # fmt: skip
@pytest.mark.parametrize("form", ["{}", "[{}]", "[^{}]", "[!-{}]", "[{}-~]", "[a{}]", "a{}"])
def test_escapes_that_are_unknown_cut_off_or_octal_are_refused(escape: str, form: str) -> None:
    """In classes and outside, in JSON and not: none becomes the letters or digits that it is spelled with."""
    pattern = form.format(escape)
    with pytest.raises(InvalidArgument, match="cannot be enforced"):
        lower(Spec("regex", pattern))
    with pytest.raises(InvalidArgument, match="cannot be enforced"):
        lowered({"type": "string", "pattern": pattern})


@pytest.mark.parametrize(
    ("pattern", "text", "inside"),
    [
        (r"[^\0-\x1f]", r"[^\x00-\x1f]", r"[^\x00-\x1f]"),
        (r"[^\0]", r"[^\x00]", r"[^\x00]"),
        (r"[\0-9]", r"[\x01-9]", None),
        (r"[\0a]", "[a]", None),
        (r"[\\0]", r"[0\\]", None),
        (r"[\0]", None, None),
    ],
)
def test_the_escaped_zero_of_a_class_is_no_digit(pattern: str, text: str | None, inside: str | None) -> None:
    """It is NUL, which no text has and JSON would have to escape; None where what is left cannot be enforced."""
    for expected, in_json in ((text, False), (inside, True)):
        if expected is None:
            with pytest.raises(InvalidArgument):
                lower_regex(pattern, in_json=in_json)
        else:
            same = lower_regex(expected, in_json=in_json)
            assert lower_regex(pattern, in_json=in_json) == same


def test_sets_of_characters_lose_what_json_would_have_to_escape() -> None:
    """And what readers disagree on: whether a rare space is white."""
    wide = {"type": "string", "pattern": "^[ -~][^a].$"}
    assert lowered(wide)["pattern"] == (
        r"^[ -!#-,\-.-\[\]_-~\^]"
        r"[ -!#-,\-.-\[\]_-`b-~\x7f-\u{d7ff}\u{e000}-\u{10ffff}\^]"
        r"[ -!#-,\-.-\[\]_-~\x7f-\u{2027}\u{202a}-\u{d7ff}\u{e000}-\u{10ffff}\^]$"
    )
    rare = lowered({"type": "string", "pattern": "\\S"})["pattern"]
    assert not any(
        re.fullmatch(re.sub(r"\\u\{(.*?)\}", lambda hit: chr(int(hit[1], 16)), rare), char)
        for char in "\u2028\u3000\ufeff \x85"
    )


def test_schemas_that_refer_to_one_another_take_no_time_that_grows_with_their_square() -> None:
    """Long chains, and a oneOf of the same long enums in many places: each definition is looked at once."""
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


def test_what_is_never_closed_is_read_once_and_refused() -> None:
    started = time.thread_time()
    with pytest.raises(InvalidArgument, match="not closed"):
        lower(Spec("regex", "[" * 200_000 + "$a"))
    assert time.thread_time() - started < 1.0


@pytest.mark.parametrize(
    "spec",
    [Spec("grammar", "root ::= " + "[" * 200_000), Spec("grammar", 'root ::= "' + '\\"' * 100_000 + "\\")],
)
def test_what_is_never_closed_is_read_once(spec: Spec) -> None:
    """It is the compiler's to refuse; getting there takes no time that grows with the square of the size."""
    started = time.perf_counter()
    lower(spec)
    assert time.perf_counter() - started < 1.0


def test_choices_become_literals() -> None:
    """Quotes, backslashes and control characters are escaped; each text counts once."""
    assert lower(Spec("choice", json.dumps(["a", 'b"\\\n', "a", "é"]))) == (
        "ebnf",
        'root ::= "a" | "b\\"\\\\\\u000a" | "é"',
    )


def test_the_tag_of_older_clients_is_understood() -> None:
    """Structures and triggers come out in today's form, their schemas lowered."""
    tag = {"structures": [{"begin": "<f>", "schema": {"properties": {}}, "end": "</f>"}], "triggers": ["<f"]}
    _, text = lower(Spec("structural_tag", json.dumps(tag)))
    (inner,) = json.loads(text)["format"]["tags"]
    assert inner["content"] == {
        "type": "json_schema",
        "json_schema": {"type": "object", "additionalProperties": True},
        "max_whitespace_cnt": 8,
    }


@pytest.mark.parametrize(("asked", "got"), [(None, 8), (3, 3), (500, 8), (True, 8)])
def test_a_tags_schema_has_white_space_up_to_a_bound(asked: object, got: int) -> None:
    """A client may ask for less."""
    form = {"type": "json_schema", "json_schema": True, "max_whitespace_cnt": asked}
    _, text = lower(Spec("structural_tag", json.dumps({"type": "structural_tag", "format": form})))
    assert json.loads(text)["format"]["max_whitespace_cnt"] == got


def test_keys_that_are_described_by_values_have_no_type_added() -> None:
    """Nobody wrote it, so nobody is told that it stands beside something."""
    keys: Any = {"propertyNames": {"const": "a"}}
    assert json.loads(lower(Spec("json_schema", json.dumps(keys)))[1])["propertyNames"] == {"enum": ["a"]}
    for keys in (
        {"propertyNames": {"$ref": "#/$defs/x"}, "$defs": {"x": {"type": "string"}}},
        {"propertyNames": {"anyOf": [{}]}},
    ):
        with pytest.raises(InvalidArgument, match="propertyNames that are not a schema of strings"):
            lower(Spec("json_schema", json.dumps(keys)))


def test_the_key_tells_specs_apart() -> None:
    """Equal specs share a compiled grammar; the kind counts."""
    assert Spec("regex", "a").key == Spec("regex", "a").key
    assert Spec("regex", "a").key != Spec("grammar", "a").key
