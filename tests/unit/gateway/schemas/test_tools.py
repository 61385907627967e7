"""Tools in a chat request: validation, and the form that templates get."""

import json
from typing import Any

import pytest

from gateway.schemas.base import parse
from gateway.schemas.chat import ChatCompletionRequest
from protos.errors import InvalidArgument
from tests.support.gateway.tool_requests import USER, chat, function
from tests.support.gateway.tool_templates import TIME


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"tools": {}}, "tools", "list"),
        ({"tools": [5]}, "tools[0]", "object"),
        ({"tools": [{}]}, "tools[0].function", "is required"),
        ({"tools": [{"type": "web_search", "function": {"name": "f"}}]}, "tools[0].type", "only tools of type 'function'"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name", "is required"),
        ({"tools": [function(name="a b")]}, "tools[0].function.name", "64 letters"),
        ({"tools": [function(name='a"b')]}, "tools[0].function.name", "64 letters"),
        ({"tools": [function(name="")]}, "tools[0].function.name", "64 letters"),
        ({"tools": [function(name="x" * 65)]}, "tools[0].function.name", "64 letters"),
        ({"tools": [function(parameters=[])]}, "tools[0].function.parameters", "object"),
        ({"tools": [function(parameters={"type": "string"})]}, "tools[0].function.parameters", "schema of an object"),
        ({"tools": [function(parameters={"properties": {"a": {"$ref": "http://a.test/s"}}})]}, "tools[0].function.parameters", "never fetched"),
        ({"tools": [function(parameters={"$defs": {"a": {"$dynamicRef": "file:///etc/passwd"}}})]}, "tools[0].function.parameters", "never fetched"),
        ({"tools": [function(parameters={"items": [{"$ref": "s.json#/a"}]})]}, "tools[0].function.parameters", "never fetched"),
        ({"tools": [function(parameters={"not": {"$ref": "http://["}})]}, "tools[0].function.parameters", "never fetched"),
        ({"tools": [function(strict="yes")]}, "tools[0].function.strict", "boolean"),
        ({"tools": [TIME, TIME]}, "tools", "two tools named 'get_time'"),
        ({"tool_choice": "required"}, "tool_choice", "needs 'tools'"),
        ({"tool_choice": "any", "tools": [TIME]}, "tool_choice", '"required"'),
        ({"tool_choice": 5, "tools": [TIME]}, "tool_choice", '"required"'),
        ({"tool_choice": {"type": "allowed_tools"}, "tools": [TIME]}, "tool_choice", '"required"'),
        ({"tool_choice": {"type": "function"}, "tools": [TIME]}, "tool_choice", '"required"'),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}, "tools": [TIME]}, "tool_choice", "'f', which is not among"),
        ({"parallel_tool_calls": "no"}, "parallel_tool_calls", "boolean"),
        ({"tools": [{"type": "custom"}]}, "tools[0]", "needs 'custom'"),
        ({"tools": [{"type": "custom", "custom": {}}]}, "tools[0]", "custom.name"),
        ({"tools": [{"type": "custom", "custom": {"name": "f", "format": "text"}}]}, "tools[0]", "custom.format"),
        ({"tool_choice": {"type": "custom", "custom": {"name": "f"}}, "tools": [TIME]}, "tool_choice", "'f', which is not among"),
    ],
)  # fmt: skip
def test_an_invalid_tool_is_refused_by_name(fields: dict[str, Any], param: str, words: str) -> None:
    """The error is one line with the place and what to change."""
    with pytest.raises(InvalidArgument, match=words) as caught:
        chat(**fields)
    assert caught.value.param == param
    assert "\n" not in caught.value.message


@pytest.mark.parametrize(
    "schema",
    [
        {"$defs": {"a": {}}, "properties": {"a": {"$ref": "#/$defs/a"}}},
        {"$id": "https://a.test/s", "$defs": {"a": {"$id": "a"}}, "properties": {"a": {"$ref": "https://a.test/a#"}}},
        {"$schema": "http://a.test/draft", "properties": {"$ref": {"const": {"$ref": "http://a.test/s"}}}},
    ],
)  # fmt: skip
def test_references_within_a_tools_schema_are_served(schema: dict[str, Any]) -> None:
    """They are named by pointer or by `$id`; values and names of properties are no references."""
    assert chat(tools=[function(parameters=schema)]).tools[0].function.parameters == schema


def test_neutral_values() -> None:
    """Values that clients send out of habit change nothing."""
    habits: list[dict[str, Any]] = [
        {"tools": None}, {"tools": []}, {"tool_choice": "auto"}, {"tool_choice": None, "parallel_tool_calls": None},
    ]  # fmt: skip
    for fields in habits:
        assert chat(**fields).tools == []
    index = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"index": 0, "id": "a", "function": {"name": "f"}}],
    }
    (_, turn) = parse(ChatCompletionRequest, json.dumps({"messages": [*USER, index]}).encode()).messages
    assert turn.for_template()["tool_calls"] == [
        {"id": "a", "type": "function", "function": {"name": "f", "arguments": {}}}
    ]


@pytest.mark.parametrize(
    ("written", "seen"),
    [('{"a": 1}', {"a": 1}), ({"a": 1}, {"a": 1}), ("", {}), (None, {}), ('{"a": ', {}), ("[1]", {}), ("5", {}), ('{"a": {"b": []}}', {"a": {"b": []}})],
)  # fmt: skip
def test_earlier_arguments_are_objects(written: Any, seen: dict[str, Any]) -> None:
    """Templates need an object: a model's broken arguments become an empty one, as in vLLM."""
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": written}}
    body = chat(messages=[*USER, {"role": "assistant", "tool_calls": [call]}])
    assert body.messages[1].for_template()["tool_calls"][0]["function"]["arguments"] == seen
