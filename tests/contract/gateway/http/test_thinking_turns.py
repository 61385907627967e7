"""Thinking of earlier turns goes back to the model between calls and their results, over each API."""

from pathlib import Path
from typing import Any

import pytest

from tests.support.gateway.serving import running_stack
from tests.support.gateway.tool_templates import THINKING, WEATHER, folder_with

pytestmark = [pytest.mark.contract, pytest.mark.asyncio(loop_scope="module")]

# Shows the thinking of turns with calls, as models want it that think between calls.
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' and m.NAME %}<think>{{ m.NAME }}</think>{% endif %}"
    "{{ m.content }}{% for c in m.tool_calls or [] %}[{{ c.function.name }}{{ c.function.arguments | tojson }}]{% endfor %}"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}{% if tools %}{% endif %}"
)
PARTS = (
    "{% for m in messages %}<{{ m.role }}>{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
    "{% if p.type == 'thinking' %}<think>{{ p.thinking }}</think>{% else %}{{ p.text }}{% endif %}{% endfor %}{% endif %}"
    "{% for c in m.tool_calls or [] %}[{{ c.function.name }}{{ c.function.arguments | tojson }}]{% endfor %}"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}{% if tools %}{% endif %}"
)
CITIES = ("Paris", "Oslo")
EXPECTED = (
    "<user>Weather?"
    '<assistant><think>First Paris.</think>[get_weather{"city": "Paris"}]<tool>sunny'
    '<assistant><think>First Oslo.</think>[get_weather{"city": "Oslo"}]<tool>sunny<assistant>'
)

_FUNCTION = WEATHER["function"]


def _chat(name: str) -> list[dict[str, Any]]:
    turns: list[dict[str, Any]] = [{"role": "user", "content": "Weather?"}]
    for city in CITIES:
        function = {"name": "get_weather", "arguments": f'{{"city": "{city}"}}'}
        call = {"id": city, "type": "function", "function": function}
        turns += [
            {"role": "assistant", "content": None, name: f"First {city}.", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": city, "content": "sunny"},
        ]
    return turns


def _messages() -> list[dict[str, Any]]:
    turns: list[dict[str, Any]] = [{"role": "user", "content": "Weather?"}]
    for city in CITIES:
        blocks = [
            {"type": "thinking", "thinking": f"First {city}.", "signature": "s"},
            {"type": "redacted_thinking", "data": "x"},
            {"type": "tool_use", "id": city, "name": "get_weather", "input": {"city": city}},
        ]
        result = {"type": "tool_result", "tool_use_id": city, "content": "sunny"}
        turns += [{"role": "assistant", "content": blocks}, {"role": "user", "content": [result]}]
    return turns


def _items() -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = [{"role": "user", "content": "Weather?"}]
    for city in CITIES:
        thought = [{"type": "reasoning_text", "text": f"First {city}."}]
        items += [
            {"type": "reasoning", "id": f"rs_{city}", "summary": [], "content": thought},
            {
                "type": "function_call",
                "call_id": city,
                "name": "get_weather",
                "arguments": f'{{"city": "{city}"}}',
            },
            {"type": "function_call_output", "call_id": city, "output": "sunny"},
        ]
    return items


REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat, reasoning": ("/v1/chat/completions", {"messages": _chat("reasoning"), "tools": [WEATHER]}),
    "chat, reasoning_content": (
        "/v1/chat/completions",
        {"messages": _chat("reasoning_content"), "tools": [WEATHER]},
    ),
    "Messages": (
        "/v1/messages",
        {
            "messages": _messages(),
            "max_tokens": 5,
            "tools": [{"name": "get_weather", "input_schema": _FUNCTION["parameters"]}],
        },
    ),
    "Responses": (
        "/v1/responses",
        {"input": _items(), "tools": [{"type": "function", **_FUNCTION}]},
    ),
}


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content", "thinking", "parts"])
async def test_templates_get_the_thinking_under_the_names_that_they_read(tmp_path: Path, name: str) -> None:
    template = PARTS if name == "parts" else TEMPLATE.replace("NAME", name)
    folder = folder_with(tmp_path, template)
    async with running_stack("ok", folder=folder, tool_call_parser="hermes") as stack:
        for path, body in REQUESTS.values():
            await stack.post(path, model="smollm2", **body)
            assert stack.prompt == EXPECTED


async def test_the_requests_variables_reach_the_template(tmp_path: Path) -> None:
    """Also chat's own field, Messages' and Responses': as switch and as degree, under each name."""
    template = (
        "{{ messages[0].content }}{{ enable_thinking is defined and [enable_thinking, thinking] }}"
        "{{ reasoning_effort }}"
    )
    asked: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}]}
    chats, effort = "/v1/chat/completions", {"reasoning_effort": "low"}
    cases: list[tuple[str, dict[str, Any], str]] = [
        (chats, asked, "xFalse"),
        (chats, {**asked, **effort}, "x[True, True]low"),
        (chats, {**asked, "reasoning_effort": "none"}, "x[False, False]none"),
        (chats, {**asked, **effort, "chat_template_kwargs": {"thinking": False}}, "x[True, False]low"),
        (chats, {**asked, "chat_template_kwargs": {"enable_thinking": 1, "thinking": 2}}, "x[1, 2]"),
        ("/v1/responses", {"input": "x", "reasoning": {"effort": "none"}}, "x[False, False]none"),
        (
            "/v1/messages",
            {**asked, "max_tokens": 5, "thinking": {"type": "disabled"}},
            "x[False, False]",
        ),
        ("/v1/messages", {**asked, "max_tokens": 5, "output_config": {"effort": "low"}}, "x[True, True]low"),
    ]
    async with running_stack("ok", folder=folder_with(tmp_path, template)) as stack:
        for path, body, prompt in cases:
            await stack.post(path, model="smollm2", **body)
            assert stack.prompt == prompt


async def test_an_answer_goes_on_in_the_thought_that_a_turn_has_begun(tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "<think>\nLet me see,"}]
    goes_on = {"continue_final_message": True, "add_generation_prompt": False}
    async with running_stack(" 4.\n</think>\n\n4", folder=folder_with(tmp_path, THINKING)) as stack:
        for tokens in (1, 100):
            stack.scheduler.tokens_per_event = tokens
            answer = await stack.post("/v1/chat/completions", messages=turns, **goes_on)
            message = answer["choices"][0]["message"]
            assert (message["reasoning"], message["content"]) == ("4.", "4")
            assert stack.prompt.endswith("assistant\n<think>\nLet me see,")
            answer = await stack.post("/v1/messages", model="smollm2", messages=turns, max_tokens=50)
            assert [block.get("thinking") or block["text"] for block in answer["content"]] == ["4.", "4"]
