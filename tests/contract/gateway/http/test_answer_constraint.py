"""Constrained answers over real HTTP: what reaches the scheduler, and which parameter a refusal names."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from protos.errors import InvalidArgument
from tests.support.gateway.serving import Stack, running_stack
from tests.support.gateway.tool_templates import TIME, WEATHER

pytestmark = [
    pytest.mark.contract,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.usefixtures("shared_vllm"),
]

PATH = "/v1/chat/completions"
ASK: dict[str, Any] = {"messages": [{"role": "user", "content": "Weather?"}]}
INTEGER: dict[str, Any] = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "integer"}}}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running(qwen_folder: Path) -> AsyncIterator[Stack]:
    async with running_stack(CALL, folder=qwen_folder) as stack:
        yield stack


@pytest.mark.parametrize(
    ("text", "content", "calls"), [("Hm.</think>\n\n12", "12", 0), (f"Hm.</think>\n\n{CALL}", None, 1)]
)
async def test_a_thinking_model_answers_or_calls(
    stack: Stack, text: str, content: str | None, calls: int
) -> None:
    """With tools and a schema, a matching answer is content, and calls are calls."""
    stack.reply_with(text)
    body = {
        **ASK, "tools": [WEATHER], "response_format": INTEGER, "chat_template_kwargs": {"opened": True},
    }  # fmt: skip
    message = (await stack.http.post(PATH, json=body)).json()["choices"][0]["message"]
    assert (message["reasoning"], message["content"]) == ("Hm.", content)
    assert len(message.get("tool_calls", [])) == calls
    form = json.loads(stack.scheduler.requests[-1].sampling.structured_output.structural_tag)["format"]
    assert form["elements"][0]["end"] == "</think>"
    assert [one["type"] for one in form["elements"][-1]["elements"]] == ["tags_with_separator", "json_schema"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"tools": [WEATHER], "tool_choice": "required"}, "tools"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "get_weather"}}}, "tools"),
        ({"tools": [{**TIME, "function": {**TIME["function"], "strict": True}}]}, "tools"),
        ({"response_format": INTEGER}, "response_format"),
        ({"tools": [WEATHER], "response_format": INTEGER}, "response_format"),
        ({"structured_outputs": {"regex": "a"}}, "structured_outputs"),
    ],
)  # fmt: skip
async def test_a_refused_grammar_names_the_clients_parameter(
    stack: Stack, body: dict[str, Any], param: str
) -> None:
    """The worker knows only structured_output; the client sees its own parameter."""
    stack.scheduler.refuse = lambda _: InvalidArgument(
        "multipleOf 0.3 is not enforced", param="structured_output"
    )
    response = await stack.http.post(PATH, json={**ASK, **body})
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


async def test_completions_are_constrained_too(stack: Stack) -> None:
    body = {"prompt": "x", "structured_outputs": {"regex": "[ab]"}}
    assert (await stack.http.post("/v1/completions", json=body)).status_code == 200
    assert stack.scheduler.requests[-1].sampling.structured_output.regex == "[ab]"
    stack.scheduler.refuse = lambda _: InvalidArgument("no", param="structured_output")
    refused = (await stack.http.post("/v1/completions", json=body)).json()["error"]
    assert refused["param"] == "structured_outputs"
