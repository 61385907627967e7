"""A spec's size, depth and syntax are checked before a compiler sees it."""

import json
import time
from typing import Any

import pytest

from protos.errors import InvalidArgument
from protos.limits import MAX_GRAMMAR_BYTES
from tests.support.worker.grammar_texts import accepts, lowered
from worker_svc.grammars.spec import Spec


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        (Spec("json_schema", "{"), "not valid JSON"), (Spec("json_schema", '{"minimum": NaN, "type": "number"}'), "not a number"),
        (Spec("regex", ""), "empty"), (Spec("regex", "(?<=a)b"), "looks behind"),
        (Spec("regex", "a{40000000}"), "repeat less"), (Spec("regex", "(a{1000}){1000}"), "repeat less"), (Spec("regex", "\\Aab\\Z"), "has .A,"),
        (Spec("regex", "\\Qa\\E"), "has .Q,"), (Spec("regex", "(?i)a"), "kind"), (Spec("regex", "a{3,2}"), "minimum"), (Spec("regex", "(a"), "not closed"),
        (Spec("regex", "a)"), "not opened"), (Spec("regex", "a**"), "nothing to repeat"), (Spec("regex", "[]"), "empty class"), (Spec("regex", "a\\"), "ends with"),
        (Spec("regex", "\\ud83d"), "not a character"), (Spec("json_schema", '{"type": "string", "pattern": "(a{30000}){300}"}'), "repeat less"),
        (Spec("regex", "a$b"), "matches no"), (Spec("grammar", " "), "empty"), (Spec("grammar", "start: 'a'"), "Lark"),
        (Spec("choice", "[]"), "at least one"), (Spec("choice", '[""]'), "empty string"), (Spec("choice", '"a"'), "list"),
        (Spec("structural_tag", "[]"), "JSON object"), (Spec("structural_tag", '{"structures": [1]}'), "begin"),
        (Spec("structural_tag", json.dumps({"type": "structural_tag", "format": {
            "type": "json_schema", "json_schema": {"not": {}}}})), "matches no finite"),
        (Spec("structural_tag", json.dumps({"type": "structural_tag", "format": {"type": "tag", "begin": "<f>", "end": "</f>",
            "json_schema": {}, "content": {"type": "any_text"}}})), "json_schema"),
    ],
)  # fmt: skip
def test_invalid_specs_are_refused(spec: Spec, why: str) -> None:
    with pytest.raises(InvalidArgument, match=why):
        lowered(spec)


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
        Spec("grammar", "root ::= " + "[" * 200_000), Spec("grammar", 'root ::= "' + '\\"' * 100_000 + "\\"),
        Spec("json_schema", '"' + '\\"' * 100_000 + "\\"), Spec("json_schema", '{"$ref": "#' + "/a" * 100_000 + '"}'),
    ],
    ids=lambda spec: f"{spec.kind}-{spec.text[:12]}-{len(spec.text)}",
)  # fmt: skip
def test_hostile_specs_are_refused_quickly(spec: Spec) -> None:
    started = time.thread_time()
    with pytest.raises(InvalidArgument):
        lowered(spec)
    assert time.thread_time() - started < 1.0


@pytest.mark.parametrize(
    ("rules", "why"),
    [
        ("root ::= a", "define the rule 'a', in line 1"), ('a ::= "b"', "define the rule 'root'"), ("root ::= (", "not closed"),
        ('root ::= "a"\nroot ::= "b"', "twice, in line 2"), ('root ::= "a" ::=', "which is not GBNF"), ('root ::= "a', "which is not GBNF"),
        ("root ::= root", "no finite"), ("root ::= [z-a]", "before it begins"), ('root ::= "a"{3,2}', "minimum"), ('root ::= * "a"', "nothing to repeat"),
        ('root ::= "\\q"', "has .q"), ('root ::= "a" | )', "where a rule belongs"),
    ],
)  # fmt: skip
def test_malformed_gbnf_is_refused(rules: str, why: str) -> None:
    with pytest.raises(InvalidArgument, match=why) as caught:
        lowered(Spec("grammar", rules))
    assert "\n" not in caught.value.message


@pytest.mark.parametrize(
    ("rules", "valid", "invalid"),
    [
        ('root ::= [a-z]+ "end" # ends\n', ("abend", "endend"), ("end", "xen")),
        (r'root ::= "\x41b" [\u00e9\U0001F600]? | [^a-z] .*', ("Ab", "Ab\u00e9", "Ab\U0001f600", "\n", "Q\n\u20ac"), ("ab", "")),
        ('root ::= x{2,3} y\nx ::= "a"\n  | "b"\ny ::= ("c" root)?', ("ab", "abb", "abcaa", "bbbcab"), ("a", "abac", "aaaa")),
        ('root ::= root root | "ab" | ""', ("", "ababab"), ("aba",)), ('root ::= a-b.c_d\na-b.c_d ::= "[\\"\\\\]"', ('["\\]',), ("[",)),
        ('root ::= "a"{0} "b"{2,} "c"{1}', ("bbc", "bbbbc"), ("abbc", "bc")),
    ],
)  # fmt: skip
def test_gbnf_leaves_all_choices_open(rules: str, valid: tuple[str, ...], invalid: tuple[str, ...]) -> None:
    """Texts that begin alike are told apart later, and characters are read as written."""
    accepted = accepts(Spec("grammar", rules))
    assert [text for text in valid if not accepted(text)] == []
    assert [text for text in invalid if accepted(text)] == []


def test_choices_are_the_listed_texts() -> None:
    """Quotes, backslashes, control characters and texts that begin others are told apart."""
    accepted = accepts(Spec("choice", json.dumps(["a", 'b"\\\n', "a", "é", "ab"])))
    assert all(map(accepted, ("a", 'b"\\\n', "é", "ab")))
    assert not any(map(accepted, ("", "b", "aa", "abc")))


@pytest.mark.parametrize(
    ("form", "name"),
    [
        ({"type": "any_text", "max_tokens": 3}, "max_tokens"), ({"type": "any_text", "max_chars": -1}, "max_chars"),
        ({"type": "any_text", "max_chars": "3"}, "max_chars"), ({"type": "any_text", "max_chars": 10**9}, "max_chars"),
        ({"type": "json_schema", "json_schema": {"type": "object"}, "style": "qwen_xml"}, "style"),
        ({"type": "json_schema", "json_schema": {"type": "object"}, "any_order": True}, "any_order"),
        ({"type": "json_schema", "json_schema": {"type": "object"}, "max_whitespace_cnt": 0}, "max_whitespace_cnt"),
        ({"type": "json_schema", "json_schema": {"type": "object"}, "excludes": ["a"]}, "excludes"),
        ({"type": "regex", "pattern": "a", "excludes": ["a"]}, "excludes"), ({"type": "const_string", "value": "a", "max": 1}, "max"),
        ({"type": "triggered_tags", "triggers": ["<"], "tags": [{"begin": "<", "content": {"type": "regex", "pattern": "a"}, "end": ">", "at": 1}]}, "'at'"),
        ({"type": "tags_with_separator", "separator": ",", "at_least_one": "no",
          "tags": [{"type": "tag", "begin": "<", "content": {"type": "regex", "pattern": "a"}, "end": ">"}]}, "at_least_one"),
    ],
)  # fmt: skip
def test_unenforceable_fields_of_tags_are_refused_by_name(form: dict[str, Any], name: str) -> None:
    tag = {"type": "tag", "begin": "<", "content": form, "end": ">"}
    with pytest.raises(InvalidArgument, match=name):
        lowered(Spec("structural_tag", json.dumps({"format": tag, "type": "structural_tag"})))


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"tools": []}, "tools"), ({"format": {"type": "dispatch", "rules": [["a"]]}}, "pairs"),
        ({"format": {"type": "grammar", "grammar": "root ::= a"}}, "define the rule 'a'"),
        ({"format": {"type": "tags_with_separator", "separator": ",", "tags": [1]}}, "1 where a tag"),
        ({"format": {"type": "repeat", "min": 3, "max": 2, "content": {"type": "regex", "pattern": "a"}}}, "max"),
    ],
)  # fmt: skip
def test_unknown_fields_beside_the_format_are_refused(fields: dict[str, Any], name: str) -> None:
    """The outermost object has a format alone; a repeat has ordered bounds."""
    tag = {"type": "structural_tag", "format": {"type": "any_text"}, **fields}
    with pytest.raises(InvalidArgument, match=name):
        lowered(Spec("structural_tag", json.dumps(tag)))


SCHEMA = {"type": "json_schema", "json_schema": {"type": "integer"}}
LETTERS = {"type": "grammar", "grammar": "root ::= [^x]*"}
DIGITS = {"type": "regex", "pattern": "[0-9]{2}"}
OPTIONAL = {"properties": {"x": {"type": "string", "pattern": "^([A-Z][a-z]*)?$"}}, "required": ["x"]}
TAG = {
    "type": "tag",
    "begin": "<f>",
    "content": {"type": "json_schema", "json_schema": OPTIONAL},
    "end": "</f>",
}


@pytest.mark.parametrize(
    ("tag", "valid", "invalid"),
    [
        ({"type": "tag", "begin": "<f>", "content": LETTERS, "end": "</f>"}, ("<f></f>", "<f></a</f>", "<f></f></f>"), ("<f>x</f>", "<f></f")),
        ({"type": "sequence", "elements": [DIGITS, LETTERS, SCHEMA]}, ("12ab3", "12-4", "123"), ("1a3", "12x3", "12ab")),
        ({"type": "dispatch", "rules": [["<a>", DIGITS], ["<b>", SCHEMA]]}, ("", "hi<a>12 you<b>3 <a>45"), ("<a>1", "<b>z")),
        ({"type": "dispatch", "rules": [["<a>", DIGITS]], "loop": False}, ("", "hi", "hi<a>12"), ("<a>12 ", "<a>1")),
        ({"type": "any_text", "max_chars": 3}, ("", "aé€"), ("abcd",)),
        ({"type": "any_text", "max_chars": 3, "excludes": ["b"]}, ("aaa",), ("ab", "aaaa")),
        ({"type": "any_text", "max_chars": 0}, ("",), ("a",)),
        ({"type": "tag", "begin": "<", "content": {"type": "any_text", "max_chars": 3}, "end": "</>"},
         ("<</>", "<ab€</>"), ("<abcd</>", "<abc")),
        ({"type": "tag", "begin": "<", "content": {"type": "any_text", "max_chars": 3}, "end": ["!", "?"]},
         ("<abc!", "<abc?"), ("<abcd?",)),
        ({"type": "any_tokens", "max_tokens": 3}, ("", "abc"), ("abcd",)),
        ({"type": "any_text", "max_chars": None, "max_tokens": None}, ("a" * 50,), ()),
        ({"structures": [{"begin": "<f>", "schema": {"properties": {}}, "end": "</f>"}], "triggers": ["<f"]},
         ("hello", "a<f>{}</f> b", '<f>{"a":1}</f><f>2</f>'), ("a<f", "<f>{</f>", "<f>{}")),
        ({"type": "triggered_tags", "triggers": ["<f"], "tags": [TAG], "excludes": ["zz"]},
         ('hi <f>{"x": "Abc"}</f> yo', 'a"b\\ [c]', '<f>{"x": "A"}</f><f>{"x": "B"}</f>'), ('hi <f>{"x": "abc"}</f>', "zz", "<f>x", "a<f")),
        ({"type": "tags_with_separator", "tags": [TAG], "separator": '\n;"', "at_least_one": True, "stop_after_first": False},
         ('<f>{"x": "A"}</f>\n;"<f>{"x": "B"}</f>',), ('<f>{"x": "A"}</f>\n;"<f>{"x": "b"}</f>', '<f>{"x": "A"}</f><f>{"x": "B"}</f>', "")),
        ({"type": "sequence", "elements": [
            {"type": "optional", "content": {"type": "tag", "begin": "<t>", "content": {"type": "any_text"}, "end": "</t>"}},
            {"type": "regex", "pattern": "\\n{0,2}"}, {"type": "regex", "pattern": "[a-z]+"}, {"type": "const_string", "value": "z!"}]},
         ("<t>a</b</t>\n\nabz!", "abzz!", "\nzz!"), ("<t>a</t>\n\n\naz!", "<t>a", "ab!", "z!z!")),
        ({"type": "or", "elements": [{"type": "repeat", "min": 1, "max": 2, "content": {"type": "const_string", "value": "ab"}}, TAG]},
         ("ab", "abab", '<f>{"x":""}</f>'), ("", "ababab", "<f>")),
        ({"type": "triggered_tags", "triggers": ["<f"], "tags": [TAG], "at_least_one": True, "stop_after_first": True},
         ('<f>{"x": "A"}</f>',), ("", "a", '<f>{"x": "A"}</f>b')),
    ],
)  # fmt: skip
def test_tags_are_enforced(tag: dict[str, Any], valid: tuple[str, ...], invalid: tuple[str, ...]) -> None:
    """Parts end where the next one begins. The tokens here are bytes; the older form is read, too."""
    form = tag if "structures" in tag else {"type": "structural_tag", "format": tag}
    accepted = accepts(Spec("structural_tag", json.dumps(form)))
    assert [text for text in valid if not accepted(text)] == []
    assert [text for text in invalid if accepted(text)] == []
