"""A Messages request as the chat request that stands for it, and what is refused."""

import json
from typing import Any

import pytest

from gateway.messages_api.routes import to_chat
from gateway.messages_api.schemas import MessagesRequest
from gateway.schemas.base import IgnoredFields, parse
from gateway.schemas.tools import NamedChoice
from gateway.text.chat_template import ChatTemplate
from protos.errors import InvalidArgument, TriptychError, Unsupported
from tests.support.gateway.tool_templates import THINKING

USER = {"role": "user", "content": "hi"}
USE = {"type": "tool_use", "id": "call_1", "name": "f", "input": {"x": 1}}
RESULT = {"type": "tool_result", "tool_use_id": "call_1"}
TOOL = {"name": "f", "input_schema": {"type": "object"}}

ANY_ORDER = ChatTemplate(THINKING, {})
SWITCHED = ChatTemplate("{{ reasoning_effort }}{{ thinking }}", {})
DEEP = json.loads('{"x": ' * 400 + "1" + "}" * 400)
SYSTEM_FIRST = ChatTemplate(
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('first') }}{% endif %}"
    "{{ m.content }}{% endfor %}",
    {},
)


def request(
    *messages: dict[str, Any], ignored: IgnoredFields | None = None, **fields: Any
) -> MessagesRequest:
    body = {"max_tokens": 9, "messages": messages or [USER], **fields}
    return parse(MessagesRequest, json.dumps(body).encode(), ignored)


def turns(
    *messages: dict[str, Any], template: ChatTemplate = ANY_ORDER, **fields: Any
) -> list[dict[str, Any]]:
    return [message.for_template() for message in to_chat(request(*messages, **fields), template).messages]


def text(content: str, **fields: Any) -> dict[str, Any]:
    return {"type": "text", "text": content, **fields}


def user(*blocks: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": list(blocks)}


def assistant(*blocks: dict[str, Any]) -> dict[str, Any]:
    return {"role": "assistant", "content": list(blocks)}


def system(content: str) -> dict[str, Any]:
    return {"role": "system", "content": content}


def call(number: int = 1) -> dict[str, Any]:
    function = {"name": "f", "arguments": {"x": 1}}
    return {"id": f"call_{number}", "type": "function", "function": function}


def tool(content: str) -> dict[str, Any]:
    return {"role": "tool", "content": content, "tool_call_id": "call_1", "name": "f"}


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ([user(text("a"), text("b", cache_control={"type": "ephemeral", "ttl": "1h"}))], [{"role": "user", "content": "a\nb"}]),
        ([USER, USER], [{"role": "user", "content": "hi\nhi"}]),
        (
            [USER, assistant({"type": "thinking", "thinking": "t", "signature": "s"}, text("a"), USE), user(RESULT | {"content": "r"}, text("b"))],
            [USER, {"role": "assistant", "content": "a", "tool_calls": [call()], "reasoning": "t", "reasoning_content": "t"}, tool("r"), {"role": "user", "content": "b"}],
        ),
        (
            [USER, assistant({"type": "redacted_thinking", "data": "x"}, USE), user(RESULT | {"content": [text("a"), text("b")]})],
            [USER, {"role": "assistant", "content": "", "tool_calls": [call()]}, tool("a\nb")],
        ),
        (
            [USER, assistant(USE), user(RESULT)],
            [USER, {"role": "assistant", "content": "", "tool_calls": [call()]}, tool("")],
        ),
        (
            [USER, assistant(USE), user(RESULT | {"content": "no city", "is_error": True})],
            [USER, {"role": "assistant", "content": "", "tool_calls": [call()]}, tool("Error: no city")],
        ),
        (
            [USER, assistant(USE), user(RESULT | {"content": "error 5", "is_error": True})],
            [USER, {"role": "assistant", "content": "", "tool_calls": [call()]}, tool("error 5")],
        ),
        ([USER, system("now"), USER], [USER, system("now"), USER]),
    ],
)  # fmt: skip
def test_turns(messages: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    """Blocks become the turns that chat templates know; results of calls come before the user's text."""
    assert turns(*messages) == expected


def test_system_prompts() -> None:
    """Text or blocks are one system turn in front; a header that differs in every request is left out."""
    blocks = [
        text("x-anthropic-billing-header: cch=1;"),
        text("a"),
        text("b", cache_control={"type": "ephemeral"}),
    ]
    assert turns(system="a\nb") == turns(system=blocks) == [system("a\nb"), USER]
    assert turns(system=[]) == turns(system=blocks[:1]) == [USER]


def test_later_system_turns_move_where_a_template_refuses_them() -> None:
    """They join the first one if the template wants it alone, and stay in place otherwise."""
    assert (ANY_ORDER.wants_system_first, SYSTEM_FIRST.wants_system_first) == (False, True)
    messages = (USER, system("now"), USER)
    assert turns(*messages, system="a") == [system("a"), *messages]
    merged = [system("a\nnow"), {"role": "user", "content": "hi\nhi"}]
    assert turns(*messages, system="a", template=SYSTEM_FIRST) == merged


@pytest.mark.parametrize(
    ("choice", "expected", "parallel"),
    [
        (None, None, True),
        ({"type": "auto"}, "auto", True),
        ({"type": "any", "disable_parallel_tool_use": True}, "required", False),
        ({"type": "none"}, "none", True),
        ({"type": "tool", "name": "f"}, NamedChoice("f"), True),
    ],
)
def test_tools(choice: dict[str, Any] | None, expected: Any, parallel: bool) -> None:
    """Custom tools are functions, with the fields that they have and no others; server tools are left out."""
    described = {
        **TOOL,
        "type": "custom",
        "description": "d",
        "strict": True,
        "cache_control": {"type": "ephemeral"},
    }
    server = {"type": "bash_20250124", "name": "bash"}
    chat = to_chat(
        request(tools=[described, server, {**TOOL, "name": "g", "input_schema": {}}], tool_choice=choice),
        ANY_ORDER,
    )
    parameters = {"type": "object"}
    assert [tool.for_template()["function"] for tool in chat.tools] == [
        {"name": "f", "description": "d", "parameters": parameters, "strict": True},
        {"name": "g", "parameters": parameters},
    ]
    assert (chat.tool_choice, chat.parallel_tool_calls) == (expected, parallel)


@pytest.mark.parametrize(
    ("fields", "variables", "shown"),
    [
        ({}, {}, True),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, {"enable_thinking": True}, True),
        ({"thinking": {"type": "adaptive"}}, {}, True),
        ({"thinking": {"type": "disabled"}}, {"enable_thinking": False}, False),
        ({"thinking": {"type": "disabled"}, "chat_template_kwargs": {"enable_thinking": True}}, {"enable_thinking": True}, False),
        ({"output_config": {"effort": "high"}}, {}, True),
    ],
)  # fmt: skip
def test_thinking(fields: dict[str, Any], variables: dict[str, Any], shown: bool) -> None:
    """The template's switch follows ``thinking``; the client's own variables win."""
    chat = to_chat(request(**fields), ANY_ORDER)
    assert (chat.chat_template_kwargs, chat.include_reasoning) == (variables, shown)
    assert to_chat(request(thinking={"type": "disabled"}), SYSTEM_FIRST).chat_template_kwargs == {}
    effort = to_chat(request(output_config={"effort": "high"}, thinking={"type": "enabled"}), SWITCHED)
    assert (effort.reasoning_effort, effort.chat_template_kwargs) == ("high", {"thinking": True})


@pytest.mark.parametrize(
    ("block", "reason"), [(USE, "send its result"), (USE | {"input": DEEP}, "nested too deep")]
)
def test_calls_that_cannot_be_shown(block: dict[str, Any], reason: str) -> None:
    """A call cannot be continued, and JSON is read deeper than it is written."""
    with pytest.raises(InvalidArgument, match=reason):
        to_chat(request(USER, assistant(block)), ANY_ORDER)


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"max_tokens": None}, InvalidArgument, "'max_tokens' is required"),
        ({"temperature": 101}, InvalidArgument, "'temperature' should be less than or equal to 100"),
        ({"max_tokens": 0}, InvalidArgument, "'max_tokens' should be greater than or equal to 1"),
        ({"messages": [user({"type": "image", "source": {}})]}, InvalidArgument, "'messages[0].content' block 0 is not served"),
        ({"messages": [user(USE)]}, InvalidArgument, "content[0] has the type 'tool_use', which turns of the role 'user'"),
        ({"messages": [user({"type": "tool_result"})]}, InvalidArgument, "'messages[0].content[0]' needs 'tool_use_id'"),
        ({"system": [{"type": "image"}]}, InvalidArgument, "'system' block 0 is not served; only blocks of type 'text' are"),
        ({"messages": [USER] * 4097}, InvalidArgument, "takes at most 4096 messages"),
        ({"messages": [user(*[text("")] * 20_000)]}, InvalidArgument, "has 20000 blocks"),
        ({"messages": [user(RESULT | {"content": [text("")] * 20_000})]}, InvalidArgument, "has 20001 blocks"),
        ({"system": [text("")] * 20_000}, InvalidArgument, "has 20000 blocks"),
        ({"tools": [{"name": "f"}]}, InvalidArgument, "needs 'input_schema'"),
        ({"tools": [{**TOOL, "name": "f g"}]}, InvalidArgument, "name must be 1 to 128 letters"),
        ({"tools": [TOOL, TOOL]}, InvalidArgument, "two tools named 'f'"),
        ({"tools": [{"type": "evil\r\nx", "name": "f"}]}, InvalidArgument, "should match pattern"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "g"}}, InvalidArgument, "names 'g', which is not among"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, InvalidArgument, "needs 'name'"),
        ({"tool_choice": {"type": "any"}}, InvalidArgument, "nothing to call"),
        ({"mcp_servers": [{"url": "x"}]}, Unsupported, "must call its MCP servers itself"),
        ({"thread": {"type": "continue", "previous_message_id": "msg_1"}}, Unsupported, "send all turns in 'messages'"),
        ({"compaction": {"type": "summary"}}, Unsupported, "ask for a summary"),
        ({"stop_sequences": [""]}, InvalidArgument, "'stop_sequences[0]'"),
        ({"output_format": {"type": "json_schema", "schema": {}}, "output_config": {"format": {"type": "json_schema", "schema": {}}}}, InvalidArgument, "mean the same"),
    ],
)  # fmt: skip
def test_refusals(fields: dict[str, Any], error: type[TriptychError], message: str) -> None:
    """What cannot be served, or changes the output and is not served, is refused by name."""
    with pytest.raises(error) as caught:
        request(**fields)
    assert message in str(caught.value)
