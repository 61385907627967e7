"""``response_format`` and ``structured_outputs`` as wire messages, with plain objects closed."""

import json
from typing import Any

import orjson
import pytest

from gateway.openai.completions import CompletionRequest
from gateway.schemas.base import parse
from gateway.schemas.chat import ChatCompletionRequest
from gateway.schemas.structured import MAX_TEXT, closed
from protos.errors import InvalidArgument, Unsupported
from protos.triptych.v1 import common_pb2 as pb

SCHEMA = {"type": "object", "properties": {"b": {}, "a": {}}, "additionalProperties": False}


def chat(**fields: Any) -> ChatCompletionRequest:
    return parse(
        ChatCompletionRequest, orjson.dumps({"messages": [{"role": "user", "content": "x"}], **fields})
    )


@pytest.mark.parametrize(
    ("fields", "wire"),
    [
        ({}, None), ({"response_format": None}, None), ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, pb.StructuredOutput(json_object=True)),
        ({"response_format": {"type": "json_schema", "json_schema": {
            "name": "n", "description": "d", "strict": True, "schema": SCHEMA}}},
         pb.StructuredOutput(json_schema=orjson.dumps(SCHEMA).decode())),
        ({"response_format": {"type": "structural_tag", "format": {"type": "any_text"}}},
         pb.StructuredOutput(structural_tag='{"type":"structural_tag","format":{"type":"any_text"}}')),
        ({"structured_outputs": {"json": SCHEMA}}, pb.StructuredOutput(json_schema=orjson.dumps(SCHEMA).decode())),
        ({"structured_outputs": {"json": "{}"}}, pb.StructuredOutput(json_schema="{}")),
        ({"structured_outputs": {"regex": "a+", "disable_any_whitespace": False}}, pb.StructuredOutput(regex="a+")),
        ({"structured_outputs": {"choice": ["a", "b"]}}, pb.StructuredOutput(choice=pb.Choices(values=["a", "b"]))),
        ({"structured_outputs": {"grammar": "root ::= x"}}, pb.StructuredOutput(grammar="root ::= x")),
        ({"structured_outputs": {"structural_tag": "{}"}}, pb.StructuredOutput(structural_tag="{}")),
        ({"structured_outputs": {"json_object": True}, "response_format": {"type": "text"}},
         pb.StructuredOutput(json_object=True)),
    ],
)  # fmt: skip
def test_constraints_reach_the_wire(fields: dict[str, Any], wire: pb.StructuredOutput | None) -> None:
    assert chat(**fields).constraint() == wire
    completion = parse(CompletionRequest, orjson.dumps({"prompt": "x", **fields}))
    assert completion.constraint() == wire


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "yaml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_object", "json_schema": {"name": "n", "schema": {}}}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "n"}}}, "response_format.json_schema.schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": []}}}, "response_format.json_schema.schema"),
        ({"response_format": {"type": "structural_tag"}}, "response_format.type"),
        ({"structured_outputs": {}}, "structured_outputs"), ({"structured_outputs": {"json_object": False}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "grammar": "b"}}, "structured_outputs"),
        ({"structured_outputs": {"regex": ""}}, "structured_outputs.regex"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"structured_outputs": {"choice": [1]}}, "structured_outputs.choice[0]"),
        ({"structured_outputs": {"regex": "a" * (MAX_TEXT + 1)}}, "structured_outputs.regex"),
        ({"structured_outputs": {"json": "{}"}, "response_format": {"type": "json_object"}}, "response_format"),
    ],
)  # fmt: skip
def test_an_invalid_constraint_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        chat(**fields)
    assert caught.value.param.startswith(param.split(".", maxsplit=1)[0])
    assert len(caught.value.message) < 500


def test_an_unsupported_option_is_refused() -> None:
    with pytest.raises(Unsupported, match="white space"):
        chat(structured_outputs={"regex": "a", "disable_any_whitespace": True})


def test_a_schema_too_deep_to_write_is_refused() -> None:
    schema: dict[str, Any] = {}
    for _ in range(600):
        schema = {"a": schema}
    body = json.dumps({"prompt": "x", "structured_outputs": {"json": schema}})
    with pytest.raises(InvalidArgument):
        parse(CompletionRequest, body.encode()).constraint()


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
