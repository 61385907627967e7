"""Requests as Codex sends them: every hosted tool, no store, and a history without ids."""

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
    assert events._response.headers["x-skipped-tools"] == "local_shell, custom, web_search, tool_search"
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
    text = stack.gateway.app.state.context.watcher.served().text
    prompt = text.decode(stack.scheduler.requests[-1].prompt_token_ids, skip_special_tokens=False)
    assert f"<|im_start|>assistant\nI look.{call}<|im_end|>\n<|im_start|>tool\na.txt<|im_end|>" in prompt
    assert "apply_patch" not in prompt
