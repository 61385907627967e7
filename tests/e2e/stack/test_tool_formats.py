"""Calls that SmolLM2 writes on a real stack, read by a gateway of each form of a call."""

import httpx
import pytest

from gateway.parsers.formats import FORMATS
from gateway.parsers.writing import Call, write
from protos.service.channels import LinkSecurity
from protos.service.tokens import ServiceTokens
from tests.support.gateway.apis import Answer, answers
from tests.support.gateway.serving import running_gateway
from tests.support.stack import Stack

pytestmark = [pytest.mark.e2e, pytest.mark.stack, pytest.mark.timeout(240), pytest.mark.asyncio]

TOOLS = [
    {
        "name": "get_weather",
        "schema": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
    }
]
CALL = Call("get_weather", {"city": "São Paulo <5>", "days": 5})


@pytest.mark.parametrize(
    "name",
    ["qwen3_coder", *(pytest.param(name, marks=pytest.mark.slow) for name in ("kimi_k2", "gemma4", "lfm2"))],
)
async def test_calls_of_a_model(stack: Stack, name: str) -> None:
    """The only text that the model may write comes out as the call in it, streamed and collected."""
    text = "Let me look." + write(FORMATS[name], [CALL])
    security = LinkSecurity(tokens=ServiceTokens(file=stack.token_file))
    port = int(stack.scheduler_address.rpartition(":")[2])
    async with (
        running_gateway(port, security=security, tool_call_parser=name) as gateway,
        httpx.AsyncClient(base_url=gateway.base_url, timeout=60) as http,
    ):
        found = await answers(
            http, "Weather?", TOOLS, "chat", "responses", structured_outputs={"choice": [text]}, temperature=0
        )
    assert found == dict.fromkeys(found, Answer("Let me look.", "", [(CALL.name, CALL.arguments)]))
