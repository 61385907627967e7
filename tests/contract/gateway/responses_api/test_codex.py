"""Requests as Codex sends them: every hosted tool, no store, and a history without ids."""

import json
from typing import Any

import openai
import pytest

from tests.support.gateway.serving import Stack

pytestmark = [pytest.mark.contract, pytest.mark.asyncio(loop_scope="module")]

SHELL: dict[str, Any] = {
    "type": "object",
    "properties": {"command": {"type": "array", "items": {"type": "string"}}, "workdir": {"type": "string"}},
    "required": ["command"],
    "additionalProperties": False,
}
AGENT: dict[str, Any] = {
    "type": "function", "name": "spawn_agent", "description": "Starts an agent.", "strict": False,
    "parameters": {"type": "object", "properties": {"message": {"type": "string"}}},
}  # fmt: skip
GRAMMAR = {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"}
CODEX: Any = {
    "model": "smollm2",
    "instructions": "You are Codex.",
    "tools": [
        {"type": "function", "name": "shell", "description": "Runs.", "strict": False, "parameters": SHELL},
        {"type": "namespace", "name": "agents", "description": "Agents.", "tools": [AGENT]},
        {"type": "local_shell"},
        {"type": "custom", "name": "apply_patch", "description": "Patches.", "format": GRAMMAR},
        {"type": "web_search", "external_web_access": False},
        {"type": "tool_search", "execution": "client"},
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": False,
    "reasoning": {"effort": "medium", "summary": "auto"},
    "store": False,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "a-conversation",
    "prompt_cache_retention": "24h",
    "max_tool_calls": 4,
    "truncation": "auto",
    "text": {"verbosity": "low"},
    "extra_body": {"client_metadata": {"x-codex-installation-id": "i"}},
}
CALL = '<tool_call>\n{"name": "%s", "arguments": %s}\n</tool_call>'
SHELL_CALL = CALL % ("shell", '{"command": ["ls"]}')
AGENT_CALL = CALL % ("agents__spawn_agent", '{"message": "go"}')


def said(role: str, text: str) -> dict[str, Any]:
    return {"type": "message", "role": role, "content": [{"type": "input_text", "text": text}]}


def kept(item: Any) -> dict[str, Any]:
    """Returns an item as Codex keeps it: without id and status, and thinking without its text."""
    fields: dict[str, Any] = item.model_dump(exclude_none=True, exclude={"id", "status"})
    if item.type == "reasoning":
        fields |= {"content": None, "encrypted_content": None}
    return fields


@pytest.mark.parametrize(
    ("call", "name", "namespace"), [(SHELL_CALL, "shell", None), (AGENT_CALL, "spawn_agent", "agents")]
)
async def test_a_turn_with_a_call(
    stack: Stack, client: openai.AsyncOpenAI, call: str, name: str, namespace: str | None
) -> None:
    """The client's accumulator has all items, and the next prompt shows the call and its result."""
    stack.reply_with(f"<think>\nLet me see.\n</think>\n\nI look.\n{call}\n{call}")
    items: Any = [
        said("developer", "<permissions>"),
        said("user", "<environment_context>"),
        said("user", "List."),
    ]
    async with client.responses.stream(**CODEX, input=items) as events:
        seen: list[Any] = [event async for event in events]
        final: Any = await events.get_final_response()
    assert events._response.headers["x-skipped-tools"] == "local_shell, web_search, tool_search"
    assert [item.type for item in final.output] == ["reasoning", "message", "function_call"], (
        "one call at once"
    )
    assert (final.output[2].name, final.output[2].namespace) == (name, namespace)
    done = [event.item for event in seen if event.type == "response.output_item.done"]
    assert [kept(item) for item in done] == [kept(item) for item in final.output]
    result = {"type": "function_call_output", "call_id": final.output[2].call_id, "output": "a.txt"}
    stack.reply_with("One file.")
    history: Any = [*items, *map(kept, final.output), result]
    async with client.responses.stream(**CODEX, input=history) as events:
        assert (await events.get_final_response()).output_text == "One file."
    prompt = stack.prompt
    assert f"<|im_start|>assistant\nI look.{call}<|im_end|>\n<|im_start|>tool\na.txt<|im_end|>" in prompt
    assert "start: /.+/" in prompt, "the model sees the grammar of a custom tool"


PATCH = '*** Begin\n+ "é" \\d \U0001f600\n*** End'
PATCH_CALL = CALL % ("apply_patch", json.dumps({"input": PATCH}))


@pytest.mark.parametrize("tokens_per_event", [1, 4, 500])
@pytest.mark.parametrize("choice", ["auto", "required", {"type": "custom", "name": "apply_patch"}])
async def test_a_custom_tool(
    stack: Stack, client: openai.AsyncOpenAI, tokens_per_event: int, choice: Any
) -> None:
    """The model writes a function's call; the client gets a custom call and sends it back."""
    stack.scheduler.tokens_per_event = tokens_per_event
    stack.reply_with(f"I patch.\n{PATCH_CALL}" if choice == "auto" else PATCH_CALL)
    asked: Any = {**CODEX, "tool_choice": choice}
    async with client.responses.stream(**asked, input="Patch.") as events:
        seen: list[Any] = [event async for event in events]
        final: Any = await events.get_final_response()
    call = final.output[-1]
    assert (call.type, call.name, call.input) == ("custom_tool_call", "apply_patch", PATCH)
    own = [event for event in seen if event.type.startswith("response.custom_tool_call_input")]
    deltas = [event.delta for event in own[:-1]]
    assert {event.type for event in own[:-1]} == {"response.custom_tool_call_input.delta"}
    assert "".join(deltas) == PATCH
    assert len(deltas) > 8 or tokens_per_event > 1
    assert all(deltas)
    assert (own[-1].type, own[-1].input) == ("response.custom_tool_call_input.done", PATCH)
    assert {event.item_id for event in own} == {call.id}
    added = next(e.item for e in seen if e.type == "response.output_item.added" and e.item.id == call.id)
    assert (added.type, added.input) == ("custom_tool_call", "")
    assert final.tools[-1].type == "custom"
    whole: Any = await client.responses.create(**asked, input="Patch.")
    assert [kept(item) | {"call_id": ""} for item in whole.output] == [
        kept(item) | {"call_id": ""} for item in final.output
    ]
    history: Any = [
        said("user", "Patch."),
        *map(kept, final.output),
        {"type": "custom_tool_call_output", "call_id": call.call_id, "output": "Done!"},
    ]
    stack.reply_with("Good.")
    await client.responses.create(**CODEX, input=history)
    prompt = stack.prompt
    assert PATCH_CALL.replace("\\u00e9", "é").replace("\\ud83d\\ude00", "\U0001f600") in prompt
    assert "<|im_start|>tool\nDone!<|im_end|>" in prompt


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ('{"patch": "x"}', '{"patch": "x"}'),
        ("{}", "{}"),
        ('{ "input" : "" }', ""),
        ('{"input": 5}', '{"input": 5}'),
        ('{"input": "a", "b": 1}', "a"),
    ],
)
async def test_custom_calls_of_another_form(
    stack: Stack, client: openai.AsyncOpenAI, arguments: str, text: str, stream: bool
) -> None:
    """Without a grammar, a model may write anything; the client then gets the arguments as they stand."""
    stack.reply_with(CALL % ("apply_patch", arguments))
    if stream:
        async with client.responses.stream(**CODEX, input="x") as events:
            answer: Any = await events.get_final_response()
    else:
        answer = await client.responses.create(**CODEX, input="x")
    assert [item.input for item in answer.output] == [text]


async def test_custom_tools_in_namespaces_and_choices(stack: Stack, client: openai.AsyncOpenAI) -> None:
    """A custom tool of a namespace keeps both names; an unknown one is refused."""
    tools: Any = [{"type": "namespace", "name": "files", "description": "F.", "tools": [CODEX["tools"][3]]}]
    stack.reply_with(CALL % ("files__apply_patch", '{"input": "x"}'))
    allowed: Any = {
        "type": "allowed_tools",
        "mode": "required",
        "tools": [{"type": "custom", "name": "files__apply_patch"}],
    }
    answer: Any = await client.responses.create(input="x", tools=tools, tool_choice=allowed)
    (call,) = answer.output
    assert (call.type, call.namespace, call.name, call.input) == (
        "custom_tool_call",
        "files",
        "apply_patch",
        "x",
    )
    assert answer.tool_choice.tools == allowed["tools"]
    with pytest.raises(openai.BadRequestError, match="not among the functions"):
        await client.responses.create(input="x", tools=tools, tool_choice={"type": "custom", "name": "other"})


# Each type of item that OpenAI's own tools leave in a conversation, with texts that the prompt has.
FOREIGN: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "local_shell_call": ({"id": "i", "call_id": "c", "status": "completed", "action": {"type": "exec", "command": ["ls"], "env": {}}}, ("local_shell", '["ls"]')),
    "local_shell_call_output": ({"id": "c", "output": "a.txt"}, ("a.txt",)),
    "shell_call": ({"call_id": "c", "action": {"commands": ["pwd"]}}, ("pwd",)),
    "shell_call_output": ({"call_id": "c", "output": [{"stdout": "out1", "stderr": "err1", "outcome": {"type": "exit", "exit_code": 3}}]}, ("out1\nerr1\nexit code 3",)),
    "apply_patch_call": ({"call_id": "c", "status": "completed", "operation": {"type": "delete_file", "path": "p.txt"}}, ("p.txt",)),
    "apply_patch_call_output": ({"call_id": "c", "status": "failed"}, ("failed",)),
    "computer_call": ({"id": "i", "call_id": "c", "pending_safety_checks": [], "status": "completed", "action": {"type": "click", "x": 1, "y": 2, "button": "left"}}, ("click",)),
    "computer_call_output": ({"call_id": "c", "output": {"type": "computer_screenshot", "image_url": "data:x"}}, ("[computer screenshot omitted]",)),
    "custom_tool_call": ({"call_id": "c", "name": "apply_patch", "input": "do it"}, ('{"input": "do it"}',)),
    "custom_tool_call_output": ({"call_id": "c", "output": [{"type": "input_text", "text": "fine"}, {"type": "input_image", "image_url": "data:x", "detail": "auto"}, {"type": "input_file", "filename": "a.pdf", "file_data": "x"}]}, ('fine\n[image omitted]\n[file "a.pdf" omitted]',)),
    "later_call_output": ({"call_id": "c", "output": {"found": 1}}, ('{"found": 1}',)),
    "tool_search_call": ({"call_id": "c", "arguments": {"query": "mail"}}, ("mail",)),
    "tool_search_output": ({"call_id": "c", "tools": []}, ("[tool search output omitted]",)),
    "web_search_call": ({"id": "i", "status": "completed", "action": {"type": "search", "query": "weather", "queries": ["weather"]}}, ("[web search: weather]",)),
    "file_search_call": ({"id": "i", "status": "completed", "queries": ["cats", "dogs"], "results": [{"text": "a cat"}]}, ("[file search: cats; dogs]\na cat",)),
    "code_interpreter_call": ({"id": "i", "status": "completed", "container_id": "x", "code": "1 + 1", "outputs": [{"type": "logs", "logs": "2"}, {"type": "image", "url": "data:x"}]}, ("1 + 1]\n2\n[image omitted]",)),
    "image_generation_call": ({"id": "i", "status": "completed", "result": "AAAA", "revised_prompt": "a cat"}, ("[image generation: a cat]",)),
    "mcp_call": ({"id": "i", "server_label": "s", "name": "look", "arguments": "{}", "output": "seen"}, ("[mcp: s look {}]\nseen",)),
    "mcp_list_tools": ({"id": "i", "server_label": "s", "tools": []}, ("[mcp list tools: s]",)),
    "mcp_approval_request": ({"id": "i", "server_label": "s", "name": "look", "arguments": "{}"}, ("[mcp approval request: s look {}]",)),
    "mcp_approval_response": ({"approval_request_id": "i", "approve": True}, ("[mcp approval response: true]",)),
    "program": ({"id": "i", "call_id": "c", "code": "x", "fingerprint": "f"}, ("[program: x]",)),
    "program_output": ({"id": "i", "call_id": "c", "result": "x", "status": "completed"}, ("[program output omitted]",)),
    "compaction": ({"id": "i", "encrypted_content": "xyz"}, ("[compaction omitted]",)),
    "compaction_trigger": ({}, ("omitted]",)),
    "additional_tools": ({"role": "developer", "tools": []}, ("[additional tools omitted]",)),
    "configuration_update": ({"id": "i"}, ("omitted]",)),
    "reasoning": ({"id": "i", "summary": [{"type": "summary_text", "text": "I thought."}], "encrypted_content": "x"}, ("I thought.",)),
}  # fmt: skip


@pytest.mark.parametrize("kind", FOREIGN)
async def test_histories_that_began_elsewhere(stack: Stack, client: openai.AsyncOpenAI, kind: str) -> None:
    """Text is taken; a line stands for the rest. A model of today can go on with the conversation."""
    fields, texts = FOREIGN[kind]
    stack.reply_with("Go on.")
    history: Any = [
        said("user", "Hello."),
        {"type": kind, **fields},
        said("assistant", "So."),
        said("user", "And?"),
    ]
    assert (await client.responses.create(**CODEX, input=history)).output_text == "Go on."
    for text in texts:
        assert text in stack.prompt


@pytest.mark.parametrize("kind", FOREIGN)
@pytest.mark.parametrize("value", [None, 5, "x", [], [5], {}, {"a": []}])
async def test_damaged_items_are_no_fault_of_the_gateway(stack: Stack, kind: str, value: Any) -> None:
    """Whatever their fields hold, the answer is 200 or names the parameter."""
    item = {"type": kind, **dict.fromkeys(FOREIGN[kind][0], value)}
    response = await stack.http.post("/v1/responses", json={"input": [said("user", "x"), item]})
    assert response.status_code in (200, 400), response.text
