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
    prompt = stack.prompt
    assert f"<think>\nLet me see.\n</think>\n\nI look.{CALL}<|im_end|>" in prompt
    assert "<|im_start|>tool\na.txt<|im_end|>\n<|im_start|>user\n<system-reminder>" in prompt
    assert "billing" not in prompt


TEXT = {"type": "text", "media_type": "text/plain", "data": "Plain words."}
PDF = {"type": "base64", "media_type": "application/pdf", "data": "JVBERi0="}
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBORw0="}}


def result_of(*content: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": "c", "content": list(content)}


@pytest.mark.parametrize(
    ("role", "block", "expected"),
    [
        ("user", {"type": "document", "source": TEXT, "title": "T", "context": "C"}, "T\nC\nPlain words."),
        ("user", {"type": "document", "source": {"type": "content", "content": "Inner."}}, "Inner."),
        ("user", {"type": "document", "source": {"type": "content", "content": [{"type": "text", "text": "In."}, IMAGE]}}, "In.\n[image omitted]"),
        ("user", {"type": "document", "source": PDF, "title": "a.pdf", "context": "C"}, '[document "a.pdf" omitted]\nC'),
        ("user", {"type": "document", "source": {"type": "url", "url": "http://x/a.pdf"}}, "[document omitted]"),
        ("user", {"type": "document", "source": {"type": "file", "file_id": "f"}}, "[document omitted]"),
        ("user", {"type": "search_result", "title": "S", "source": "http://s", "content": [{"type": "text", "text": "Found."}]}, "S\nhttp://s\nFound."),
        ("user", {"type": "container_upload", "file_id": "f"}, "[container upload omitted]"),
        ("user", result_of(IMAGE), "[image omitted]"),
        ("user", result_of({"type": "text", "text": "Seen:"}, IMAGE), "Seen:\n[image omitted]"),
        ("user", result_of({"type": "document", "source": TEXT}), "Plain words."),
        ("user", result_of({"type": "search_result", "title": "S", "source": "s", "content": []}), "S\ns"),
        ("user", result_of({"type": "tool_reference", "tool_name": "t"}), "[tool reference omitted]"),
        ("assistant", {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "cats"}}, '[web_search was called with {"query": "cats"}]'),
        ("assistant", {"type": "web_search_tool_result", "tool_use_id": "s", "content": [{"type": "web_search_result", "title": "Cats", "url": "http://c", "encrypted_content": "x"}]}, "Cats\nhttp://c"),
        ("assistant", {"type": "web_search_tool_result", "tool_use_id": "s", "content": {"type": "web_search_tool_result_error", "error_code": "unavailable"}}, "unavailable"),
        ("assistant", {"type": "web_fetch_tool_result", "tool_use_id": "s", "content": {"type": "web_fetch_result", "url": "http://f", "content": {"type": "document", "source": TEXT}}}, "http://f\nPlain words."),
        ("assistant", {"type": "code_execution_tool_result", "tool_use_id": "s", "content": {"type": "code_execution_result", "stdout": "out", "stderr": "err", "return_code": 1, "content": []}}, "out\nerr"),
        ("assistant", {"type": "mcp_tool_use", "id": "s", "name": "look", "server_name": "n", "input": {}}, "[look was called with {}]"),
        ("assistant", {"type": "mcp_tool_result", "tool_use_id": "s", "content": [{"type": "text", "text": "Seen."}]}, "Seen."),
        ("assistant", {"type": "thinking", "thinking": "Hm.", "signature": "s"}, "Hm."),
        ("assistant", {"type": "redacted_thinking", "data": "x"}, ""),
    ],
)  # fmt: skip
async def test_histories_that_began_elsewhere(
    stack: Stack, client: anthropic.AsyncAnthropic, role: str, block: dict[str, Any], expected: str
) -> None:
    """Text is taken; a line stands for the rest. A model of today can go on with the conversation."""
    call = {"type": "tool_use", "id": "c", "name": "Bash", "input": {"command": "ls"}}
    before: Any = [said("Hi."), {"role": "assistant", "content": [call]}] if role == "user" else [said("Hi.")]
    turn = {"role": role, "content": [block, {"type": "text", "text": "And then?"}]}
    turns = [*before, turn, *([] if role == "user" else [said("Go on.")])]
    stack.reply_with("Fine.")
    await client.messages.create(model="smollm2", max_tokens=50, messages=turns)
    prompt = stack.prompt
    assert expected in prompt
    assert "And then?" in prompt
    assert "JVBERi0" not in prompt
    assert "iVBORw0" not in prompt
