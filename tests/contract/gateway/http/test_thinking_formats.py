"""Every format of thinking over real HTTP and real gRPC, in three APIs, collected and streamed."""

from pathlib import Path
from typing import Any

import pytest

from gateway.parsers.reasoning import THINKING_FORMATS
from tests.support.gateway.apis import Answer, answers
from tests.support.gateway.serving import running_stack
from tests.support.gateway.tool_templates import THINKING, folder_with

pytestmark = [pytest.mark.contract, pytest.mark.asyncio]

TOOLS: list[dict[str, Any]] = [{"name": "get_time", "schema": {"type": "object"}}]
CALL = '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>'
# Markers of several formats consist of more than one special token.
SPECIAL = [
    "<think>", "</think>", "<|open|>", "<|close|>", "<|sep|>", "<|channel>", "<channel|>", "[THINK]", "[/THINK]", "<tool_call>",
    "<|START_THINKING|>", "<|END_THINKING|>", "<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>",
]  # fmt: skip


@pytest.mark.parametrize("name", THINKING_FORMATS)
async def test_all_apis_read_the_same(name: str, tmp_path: Path) -> None:
    """Spaces are kept, and the texts around thinking and answer are not shown, with and without tools."""
    form, folder = THINKING_FORMATS[name], folder_with(tmp_path, THINKING, SPECIAL)
    begin, end = form.answer[0] if form.answer else ("", "")
    thought = f"{form.start}I see a big world.{form.end}"
    cases = [
        (
            f"{thought}{begin}Hello big world.{end}{form.turn_end}",
            Answer("Hello big world.", "I see a big world."),
        ),
        (f"{thought}{CALL}{form.turn_end}", Answer("", "I see a big world.", [("get_time", {})])),
        (f"{form.start}I need it.\n{CALL}", Answer("", "I need it.", [("get_time", {})])),
    ]
    if form.unmarked == "never":
        cases.append(("Hello big world.", Answer("Hello big world.")))
    async with running_stack("x", folder=folder, reasoning_parser=name, tool_call_parser="hermes") as stack:
        for text, expected in cases:
            stack.reply_with(text)
            for tokens in (1, 3):
                stack.scheduler.tokens_per_event = tokens
                for tools in (TOOLS, []) if not expected.calls else (TOOLS,):
                    found = await answers(stack.http, "Well?", tools)
                    assert found == dict.fromkeys(found, expected), text
