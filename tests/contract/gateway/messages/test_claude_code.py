"""Requests as Claude Code sends them: marked blocks everywhere, beta headers, server tools and counts."""

from typing import Any

import anthropic
import pytest

from tests.support.gateway.serving import Stack

pytestmark = [pytest.mark.contract, pytest.mark.asyncio(loop_scope="module")]

MARK = {"type": "ephemeral", "ttl": "1h", "scope": "global"}
BASH: dict[str, Any] = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "type": "object",
    "properties": {"command": {"type": "string"}, "timeout": {"type": "number"}},
    "required": ["command"],
    "additionalProperties": False,
}
PROMPT: Any = {
    "model": "smollm2",
    "system": [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=2; cch=1a2b3;"},
        {"type": "text", "text": "You are Claude Code.", "cache_control": MARK},
        {"type": "text", "text": "Be brief.", "cache_control": MARK},
    ],
    "tools": [
        {"name": "Bash", "description": "Runs.", "input_schema": BASH, "eager_input_streaming": True},
        {"name": "Read", "description": "Reads.", "input_schema": BASH, "defer_loading": True},
        {"type": "web_search_20250305", "name": "web_search", "max_uses": 8},
    ],
    "thinking": {"type": "adaptive"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "output_config": {"effort": "high"},
    "extra_query": {"beta": "true"},
    "betas": ["claude-code-20250219", "interleaved-thinking-2025-05-14", "prompt-caching-scope-2026-01-05"],
}
ASK: Any = {
    **PROMPT,
    "max_tokens": 200,
    "metadata": {"user_id": '{"device_id": "d", "account_uuid": "", "session_id": "s"}'},
}
CALL = '<tool_call>\n{"name": "Bash", "arguments": {"command": "ls"}}\n</tool_call>'


def said(*texts: str) -> dict[str, Any]:
    """Returns a turn of the user whose last block is marked."""
    blocks: list[dict[str, Any]] = [{"type": "text", "text": text} for text in texts]
    return {"role": "user", "content": [*blocks[:-1], {**blocks[-1], "cache_control": MARK}]}


async def test_a_turn_with_a_call(stack: Stack, client: anthropic.AsyncAnthropic) -> None:
    """The client's accumulator has all blocks; the next prompt shows the call and its result."""
    turns: Any = [said("<system-reminder>Rules.</system-reminder>", "List.")]
    stack.reply_with(f"<think>\nLet me see.\n</think>\n\nI look.\n{CALL}")
    async with client.beta.messages.stream(**ASK, messages=turns) as stream:
        kinds = [event.type async for event in stream]
        message = await stream.get_final_message()
    assert stream.response.url.query == b"beta=true"
    assert stream.response.headers["x-skipped-tools"] == "web_search_20250305"
    assert (kinds[0], kinds[-1]) == ("message_start", "message_stop")
    assert [block.type for block in message.content] == ["thinking", "text", "tool_use"]
    assert (message.stop_reason, message.usage.output_tokens) == ("tool_use", len(stack.scheduler.reply))
    counted = await client.beta.messages.count_tokens(**PROMPT, messages=turns)
    assert counted.input_tokens == len(stack.scheduler.requests[-1].prompt_token_ids)
    call = message.content[2]
    assert call.type == "tool_use"
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "a.txt", "cache_control": MARK}
    turns += [
        {"role": "assistant", "content": [block.model_dump(exclude_none=True) for block in message.content]},
        {
            "role": "user",
            "content": [result, {"type": "text", "text": "<system-reminder>x</system-reminder>"}],
        },
    ]
    stack.reply_with("One file.")
    async with client.beta.messages.stream(**ASK, messages=turns) as stream:
        assert await stream.get_final_text() == "One file."
    text = stack.gateway.app.state.context.watcher.served().text
    prompt = text.decode(stack.scheduler.requests[-1].prompt_token_ids, skip_special_tokens=False)
    assert f"<think>\nLet me see.\n</think>\n\nI look.{CALL}<|im_end|>" in prompt
    assert "<|im_start|>tool\na.txt<|im_end|>\n<|im_start|>user\n<system-reminder>" in prompt
    assert "billing" not in prompt
