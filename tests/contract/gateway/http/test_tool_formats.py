"""Every format of tool calls over real HTTP and real gRPC, in three APIs, collected and streamed."""

import pytest

from gateway.parsers.formats import FORMATS
from gateway.parsers.writing import Call, write
from tests.support.gateway.apis import Answer, answers
from tests.support.gateway.serving import running_stack

pytestmark = [pytest.mark.contract, pytest.mark.asyncio]

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "places": {"type": "array"}},
}
TOOLS = [{"name": "get_weather", "schema": SCHEMA}, {"name": "get_time", "schema": {"type": "object"}}]
CALLS = [
    Call("get_weather", {"city": 'São "Paulo" <5 & 6>', "days": 5, "places": ["a", {"b": None}]}),
    Call("get_time", {}),
]


# One of each form of a call; all of them are slow.
QUICK = ("hermes", "qwen3_coder", "minimax_m3", "kimi_k2", "gemma4", "pythonic")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in FORMATS]
)
async def test_all_apis_read_the_same(name: str) -> None:
    form = FORMATS[name]
    before = "Let me look." if form.trigger else ""
    expected = Answer(before, "", [(call.name, call.arguments) for call in CALLS])
    async with running_stack(before + write(form, CALLS), tool_call_parser=name) as stack:
        for tokens in (1, 3):
            stack.scheduler.tokens_per_event = tokens
            found = await answers(stack.http, "Weather?", TOOLS)
            assert found == dict.fromkeys(found, expected)
