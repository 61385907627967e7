"""Responses requests as the chat requests that are answered in their place."""

from typing import Any

import orjson
import pytest

from gateway.responses_api.routes import ResponseAsChat, to_chat
from gateway.responses_api.schemas import ResponsesRequest
from gateway.schemas.base import IgnoredFields, parse
from gateway.text.chat_template import ChatTemplate
from protos.errors import InvalidArgument

FUNCTION = {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": True}
OTHER = {"type": "function", "name": "g"}


def request(**body: Any) -> ResponsesRequest:
    return parse(ResponsesRequest, orjson.dumps({"input": "hi", **body}), IgnoredFields())


ANY_ORDER = ChatTemplate("{{ messages }}", {})
ONE_SYSTEM = ChatTemplate(
    "{% for m in messages[1:] %}{% if m.role == 'system' %}{{ raise_exception('late') }}{% endif %}{% endfor %}",
    {},
)


def chat(template: ChatTemplate | None = None, **body: Any) -> ResponseAsChat:
    return to_chat(request(**body), template)


def turns(*items: dict[str, Any], **body: Any) -> list[dict[str, Any]]:
    return [message.for_template() for message in chat(input=[*items], **body).messages]


def reasoning(text: str) -> dict[str, Any]:
    content = [{"type": "reasoning_text", "text": text}]
    return {"type": "reasoning", "id": "rs_1", "summary": [], "content": content, "status": "completed"}


def said(text: str) -> dict[str, Any]:
    content = [{"type": "output_text", "text": text, "annotations": [], "logprobs": []}]
    return {"type": "message", "id": "msg_1", "status": "completed", "role": "assistant", "content": content}


def called(call_id: str, name: str = "f") -> dict[str, Any]:
    return {"type": "function_call", "id": "fc_1", "call_id": call_id, "name": name, "arguments": '{"a": 1}'}


def returned(call_id: str, output: Any = "1") -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": call_id, "output": output}


def test_system_messages_are_joined_for_templates_that_take_one() -> None:
    """Agents send instructions and, behind turns of the user, a developer's messages."""
    items = [{"role": "user", "content": "hi"}, {"role": "developer", "content": "Rule."}]
    for template, expected in (
        (ONE_SYSTEM, [("system", "Be brief.\nRule."), ("user", "hi")]),
        (ANY_ORDER, [("system", "Be brief."), ("user", "hi"), ("developer", "Rule.")]),
    ):
        found = chat(template, instructions="Be brief.", input=items).messages
        assert [(message.role, message.content) for message in found] == expected


def test_a_new_thought_or_text_begins_a_new_turn() -> None:
    found = turns(said("a"), said("b"), reasoning("c"), called("1"), reasoning("d"), said("e"))
    assert [(turn["content"], turn.get("reasoning")) for turn in found] == [
        ("a", None), ("b", None), ("", "c"), ("e", "d"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("given", "names", "expected"),
    [
        (None, ["f", "g"], None),
        ("none", ["f", "g"], "none"),
        ("required", ["f", "g"], "required"),
        ({"type": "function", "name": "g"}, ["f", "g"], ("g",)),
        (
            {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "g"}]},
            ["g"],
            "auto",
        ),
        (
            {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "mcp", "server_label": "x"}]},
            [],
            None,
        ),
    ],
)
def test_tools_and_the_choice_among_them(given: Any, names: list[str], expected: Any) -> None:
    """Tools that the choice does not allow are not shown to the model."""
    found = chat(tools=[{"type": "web_search"}, FUNCTION, OTHER], tool_choice=given)
    assert [tool.function.name for tool in found.tools] == names
    assert found.tool_choice == expected
    shown = {"name": "f", "parameters": {"type": "object"}, "strict": True}
    if "f" in names:
        assert found.tools[0].for_template() == {"type": "function", "function": shown}


GROUP: Any = {"type": "namespace", "name": "mcp", "tools": [FUNCTION, OTHER]}


@pytest.mark.parametrize(
    ("given", "names"),
    [
        ({"type": "function", "name": "f", "namespace": "mcp"}, None),
        ({"type": "function", "name": "mcp__f"}, None),
        ([{"type": "function", "name": "f", "namespace": "mcp"}], ["mcp__f"]),
        (
            [{"type": "namespace", "name": "mcp"}, {"type": "function", "name": "f"}],
            ["f", "mcp__f", "mcp__g"],
        ),
    ],
)
def test_a_choice_names_functions_of_namespaces(given: Any, names: list[str] | None) -> None:
    """The namespace may be a field of its own, part of the name, or allowed as a whole."""
    choice = given if names is None else {"type": "allowed_tools", "mode": "required", "tools": given}
    found = chat(tools=[FUNCTION, GROUP], tool_choice=choice)
    if names is None:
        assert found.tool_choice == ("mcp__f",)
    else:
        assert [tool.function.name for tool in found.tools] == names


def test_an_unknown_namespace_is_not_allowed_in_silence() -> None:
    """Otherwise the model would have no tools."""
    tools = [{"type": "namespace", "name": "other"}]
    with pytest.raises(InvalidArgument, match="'other', which is not among the namespaces"):
        chat(tools=[GROUP], tool_choice={"type": "allowed_tools", "mode": "auto", "tools": tools})


def test_parameters_reach_the_chat_request() -> None:
    found = chat(
        max_output_tokens=7, temperature=0.5, top_k=3, stop=["x"], truncation="auto", parallel_tool_calls=False,
        include=["message.output_text.logprobs"], top_logprobs=2, chat_template_kwargs={"a": 1}, stream=True, reasoning={"effort": "low", "summary": "auto"},
        stream_options={"include_obfuscation": False, "include_usage": True},
    )  # fmt: skip
    assert (found.output_limit, found.temperature, found.top_k, found.stop) == (7, 0.5, 3, ["x"])
    assert (found.truncate_prompt_tokens, found.parallel_tool_calls, found.num_logprobs) == (-1, False, 2)
    assert (found.stream, found.include_usage, found.prompt_param) == (True, False, "input")
    assert (found.chat_template_kwargs, found.reasoning_effort) == ({"a": 1}, "low")
    assert chat(top_logprobs=2).num_logprobs is None, "without the include, they are not asked for"


@pytest.mark.parametrize(
    "item",
    [
        {"role": "user", "content": [{"type": "input_text", "text": ""}] * 20_000},
        returned("1", [{"type": "input_text", "text": ""}] * 20_000),
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": ""}] * 20_000},
    ],
)
def test_the_number_of_parts_is_bounded(item: dict[str, Any]) -> None:
    """Checking hundreds of thousands takes a second, in which all streams stand still."""
    with pytest.raises(InvalidArgument, match="has 20000 parts; send at most 16384"):
        request(input=[item])


@pytest.mark.parametrize(
    ("form", "kind"),
    [
        ({"type": "text"}, None),
        ({"type": "json_object"}, "json_object"),
        ({"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": True}, "json_schema"),
    ],
)
def test_the_form_of_the_text_constrains_the_answer(form: dict[str, Any], kind: str | None) -> None:
    """As the chat's response_format would; errors name the client's parameter."""
    found = chat(text={"format": form, "verbosity": "low"})
    constraint = found.constraint()
    assert (constraint and constraint.WhichOneof("spec")) == kind
    assert found.constraint_param == "text.format"
