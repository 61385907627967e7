"""JSON schemas in the notations of tool calls: texts that a style accepts, and styles that are refused."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from protos.errors import InvalidArgument
from tests.support.worker.grammar_texts import accepts, lowered
from worker_svc.grammars.spec import Spec

TAGGED = {"type": "tagged", "key": "<p=", "key_end": ">\n", "json_key_ends": [], "value_end": "\n</p>\n"}
MARKED = {**TAGGED, "key_end": " text>", "json_key_ends": [" number>", " other>"]}
STYLES: dict[str, dict[str, Any]] = {
    "tagged": TAGGED,
    "marked": MARKED,
    "python": {"type": "python"},
    "loose": {"type": "loose", "quote": "<|q|>"},
    "elements": {"type": "elements", "prefix": "#>"},
}
POINT = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}


def style(name: str, **properties: Any) -> Callable[[str], bool]:
    """Returns a check of texts for an object with these required properties."""
    schema = {
        "type": "object",
        "properties": properties,
        "required": [*properties],
        "additionalProperties": False,
    }
    return of_schema(name, schema)


def of_schema(name: str, schema: Any) -> Callable[[str], bool]:
    tag = {"type": "json_schema", "json_schema": schema, "style": STYLES[name]}
    return accepts(Spec("structural_tag", json.dumps({"type": "structural_tag", "format": tag})))


@pytest.mark.parametrize(
    ("name", "schema", "good", "bad"),
    [
        ("tagged", {"type": "string"}, ["<p=a>\nx\n</p>\n", "<p=a>\n\n</p>\n", "<p=a>\n<p=b>\n&\"\\\n\n\n</p>\n"],
         ["<p=a>\nx</p>\n", "<p=a>\nx</p>y\n</p>\n", "<p=a>\nx\n</p>\n\n</p>\n", "<p=b>\nx\n</p>\n"]),
        ("tagged", {"type": "integer"}, ["<p=a>\n-5\n</p>\n"], ["<p=a>\n5.5\n</p>\n", "<p=a>\nx\n</p>\n"]),
        ("tagged", {"type": ["boolean", "null"]}, ["<p=a>\ntrue\n</p>\n", "<p=a>\nnull\n</p>\n"], ["<p=a>\nx\n</p>\n"]),
        ("tagged", {"enum": ["x", "x\n", 5]}, ["<p=a>\nx\n</p>\n", "<p=a>\nx\n\n</p>\n", "<p=a>\n5\n</p>\n"],
         ["<p=a>\ny\n</p>\n", '<p=a>\n"x"\n</p>\n']),
        ("tagged", {"type": "string", "pattern": "^a+$", "maxLength": 3}, ["<p=a>\naaa\n</p>\n"],
         ["<p=a>\naaaa\n</p>\n", "<p=a>\nb\n</p>\n"]),
        ("tagged", POINT, ['<p=a>\n{"x": 1}\n</p>\n'], ["<p=a>\n{'x': 1}\n</p>\n", "<p=a>\n{}\n</p>\n"]),
        ("tagged", {"items": {"type": "string"}, "type": "array"}, ['<p=a>\n["</b>"]\n</p>\n'], ['<p=a>\n["</p>"]\n</p>\n']),
        ("marked", {"type": "string"}, ["<p=a text>5\n</p>\n"], ["<p=a number>5\n</p>\n"]),
        ("marked", {"type": "integer"}, ["<p=a number>5\n</p>\n", "<p=a other>5\n</p>\n"], ["<p=a text>5\n</p>\n"]),
        ("marked", {"type": ["integer", "string"]}, ["<p=a number>5\n</p>\n", "<p=a text>x\n</p>\n"], ["<p=a number>x\n</p>\n"]),
        ("python", {"type": "string"}, ["a='x'", 'a="it\'s"', r"a='\'\\\n\x07\u00e9'", "a=''"], ["a=x", "a='", "a='''", "a='\n'"]),
        ("python", {"type": ["boolean", "null"]}, ["a=True", "a=None"], ["a=true", "a=null"]),
        ("python", {"enum": ["it's", None, 1.5]}, [r"a='it\'s'", 'a="it\'s"', "a=None", "a=1.5"], ["a='x'", "a='it's'"]),
        ("python", POINT, ["a={'x': 1}", 'a={"x":1}'], ["a={x: 1}", "a={}"]),
        ("python", {"items": {"type": "boolean"}, "type": "array"}, ["a=[True, False]", "a=[]"], ["a=[true]", "a=(True)"]),
        ("loose", {"type": "string"}, ["{a:<|q|>x<|q|>}", '{a:<|q|>"},{\n<|<|q|>}'], ["{a:x}", "{a:<|q|>x<|q|>y<|q|>}", '{"a":<|q|>x<|q|>}']),
        ("loose", POINT, ["{a:{x:1}}"], ["{a:{}}", '{a:{"x":1}}']),
        ("loose", {"items": {"type": ["null", "string"]}, "type": "array"}, ["{a:[null,<|q|>,<|q|>]}", "{a:[]}"], ["{a:null}"]),
        ("elements", {"type": "string"}, ["#><a>x#></a>", "#><a>#></a>", "\n#><a><a>#</a>#></a>\n"], ["#><a>x#>y#></a>", "#><a>x#></b>"]),
        ("elements", POINT, ["#><a>#><x>1#></x>#></a>"], ["#><a>#><x>y#></x>#></a>", "#><a>#></a>"]),
        ("elements", {"items": POINT, "type": "array", "maxItems": 2},
         ["#><a>#></a>", "#><a>#><item>#><x>1#></x>#></item>#><item>#><x>2#></x>#></item>#></a>"],
         ["#><a>#><x>1#></x>#></a>", "#><a>#><item>1#></item>#></a>"]),
        ("elements", {"items": {"enum": ["x", 1]}, "type": "array", "uniqueItems": True},
         ["#><a>#><item>1#></item>#><item>x#></item>#></a>"], ["#><a>#><item>1#></item>#><item>1#></item>#></a>"]),
    ],
)  # fmt: skip
def test_values(name: str, schema: Any, good: list[str], bad: list[str]) -> None:
    """Each style accepts exactly the values of a schema, in its own notation."""
    accepted = style(name, a=schema)
    assert [text for text in good if not accepted(text)] == []
    assert [text for text in bad if accepted(text)] == []


TEXTS = {
    "tagged": ("<p={}>\n{}\n</p>\n", ""),
    "marked": ("<p={} text>{}\n</p>\n", ""),
    "python": ("{}='{}'", ", "),
    "loose": ("{}:<|q|>{}<|q|>", ","),
    "elements": ("#><{0}>{1}#></{0}>", ""),
}


def written(name: str, **members: str) -> str:
    form, comma = TEXTS[name]
    text = comma.join(form.format(*each) for each in members.items())
    return f"{{{text}}}" if name == "loose" else text


@pytest.mark.parametrize("name", STYLES)
def test_properties(name: str) -> None:
    """Properties come in the schema's order, others after them; required ones are there."""
    string = {"type": "string"}
    schema = {"type": "object", "properties": {"city": string, "c": string}, "required": ["c"]}
    accepted = of_schema(name, schema)
    for good in ({"city": "x", "c": "y"}, {"c": "y"}, {"c": "y", "country": "z", "ci": "<p"}):
        assert accepted(written(name, **good))
    for bad in ({}, {"city": "x"}, {"c": "y", "city": "x"}, {"c": "y", "c ": "x"}):
        assert not accepted(written(name, **bad))
    assert not of_schema(name, {**schema, "additionalProperties": False})(written(name, c="y", x="z"))
    assert of_schema(name, {"type": "object", "properties": {}})(written(name))


@pytest.mark.parametrize("name", STYLES)
def test_joined_and_recursive_schemas(name: str) -> None:
    """References and alternatives of whole objects are those of JSON."""
    schema = {
        "$defs": {
            "name": {"type": "string", "minLength": 2},
            "tree": {"properties": {"tree": {"$ref": "#"}}},
        },
        "oneOf": [{"required": ["a"]}, {"required": ["b"]}],
        "type": "object",
        "properties": {
            "a": {"$ref": "#/$defs/name"},
            "b": {"$ref": "#/$defs/name"},
            "c": {"$ref": "#/$defs/tree"},
        },
        "additionalProperties": False,
    }
    accepted = of_schema(name, schema)
    assert accepted(written(name, a="xy"))
    assert accepted(written(name, b="xy"))
    assert not accepted(written(name, b="x"))
    assert not accepted(written(name, a="xy", b="xy"))
    assert not accepted(written(name))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("qwen_xml", "has the style 'qwen_xml'"),
        (5, "has the style 5"),
        ({"type": "yaml"}, "has the style"),
        ({"type": ["loose"]}, "has the style"),
        ({"type": "loose"}, "needs, as texts: quote"),
        ({"type": "loose", "quote": ""}, "needs, as texts: quote"),
        ({"type": "loose", "quote": 5}, "needs, as texts: quote"),
        ({"type": "python", "quote": "x"}, "needs"),
        ({**TAGGED, "json_key_ends": [""]}, "json_key_ends"),
        ({**TAGGED, "json_key_ends": "x"}, "json_key_ends"),
    ],
)
def test_malformed_styles(given: Any, words: str) -> None:
    tag = {"type": "json_schema", "json_schema": {"type": "object"}, "style": given}
    with pytest.raises(InvalidArgument, match=words):
        lowered(Spec("structural_tag", json.dumps(tag)))


@pytest.mark.parametrize("name", STYLES)
def test_a_string_that_cannot_be_written(name: str) -> None:
    """The mark that ends a string is in none; a value that is nothing else leaves no text."""
    mark = {"loose": "<|q|>", "elements": "#>", "python": "'"}.get(name, "</p>")
    both = style(name, a={"enum": [f"x{mark}", "y"]})
    assert both(written(name, a="y"))
    if name == "python":
        assert both(written(name, a="x\\'"))
        return
    assert not both(written(name, a=f"x{mark}"))
    for schema in ({"const": f"x{mark}"}, {"type": "string", "pattern": mark.replace("|", "\\|")}):
        with pytest.raises(InvalidArgument, match="no finite value"):
            style(name, a=schema)
