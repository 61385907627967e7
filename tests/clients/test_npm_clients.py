"""The npm clients of OpenAI and Anthropic against a real gateway over a fake scheduler."""

import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

from protos.errors import Overloaded
from tests.support.clients.environments import node_folder, run_client
from tests.support.gateway.serving import TEXT, Stack, running_stack
from tests.support.security.certificates import service_files

pytestmark = [
    pytest.mark.contract,
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("npm") is None, reason="Node.js and npm are not installed"),
]

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
PARSERS: dict[str, Any] = {"tool_call_parser": "hermes", "reasoning_parser": "qwen3"}


@pytest.fixture(scope="module")
def node() -> Path:
    return node_folder()


@pytest.fixture
async def stack() -> AsyncIterator[Stack]:
    async with running_stack(TEXT, **PARSERS) as stack:
        yield stack


async def openai(node: Path, stack: Stack, scenario: str, key: str = "unused", **variables: str) -> Any:
    url = f"{stack.gateway.base_url}/v1"
    return await run_client("node", "openai_client.mjs", url, scenario, key, folder=node, **variables)


async def anthropic(node: Path, stack: Stack, scenario: str, key: str = "unused") -> Any:
    url = stack.gateway.base_url
    return await run_client("node", "anthropic_client.mjs", url, scenario, key, folder=node)


async def test_chats(node: Path, stack: Stack) -> None:
    """Collected and streamed chats have their choices, log-probabilities and usage."""
    answer = await openai(node, stack, "chat")
    assert answer["choices"][0]["message"]["content"] == TEXT
    assert len(answer["choices"]) == 2
    assert len(answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]) == 2
    chunks = await openai(node, stack, "stream")
    deltas = [choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"]]
    assert "".join(deltas) == TEXT
    assert chunks[-1]["usage"]["completion_tokens"] > 5


async def test_completions_and_models(node: Path, stack: Stack) -> None:
    """The older endpoint and the list of models work."""
    assert set(await openai(node, stack, "models")) == {"smollm2"}
    assert (await openai(node, stack, "completions"))["choices"][0]["text"].endswith(TEXT)
    assert await openai(node, stack, "completions_stream") == TEXT


@pytest.mark.parametrize("scenario", ["tools", "tools_stream"])
async def test_tools(node: Path, stack: Stack, scenario: str) -> None:
    """Both clients find the call, collected and streamed."""
    stack.reply_with(CALL)
    choice = await openai(node, stack, scenario)
    assert choice["finish_reason"] == "tool_calls"
    function = choice["message"]["tool_calls"][0]["function"]
    assert (function["name"], function["arguments"].replace(" ", "")) == ("weather", '{"city":"Paris"}')
    message = await anthropic(node, stack, scenario)
    assert message["stop_reason"] == "tool_use"
    assert message["content"][-1]["input"] == {"city": "Paris"}


async def test_thinking(node: Path, stack: Stack) -> None:
    """Both clients get the thinking apart from the answer."""
    stack.reply_with("<think>Hm.</think>Paris.")
    message = await openai(node, stack, "thinking")
    assert (message["reasoning_content"], message["content"]) == ("Hm.", "Paris.")
    blocks = (await anthropic(node, stack, "thinking"))["content"]
    assert [block["type"] for block in blocks] == ["thinking", "text"]
    assert (blocks[0]["thinking"], blocks[1]["text"]) == ("Hm.", "Paris.")


async def test_a_schema(node: Path, stack: Stack) -> None:
    """The client parses a structured answer by its schema."""
    stack.reply_with('{"city": "Paris"}')
    assert await openai(node, stack, "schema") == {"city": "Paris"}
    sent = stack.scheduler.requests[-1].sampling.structured_output
    assert '"city"' in (sent.json_schema or sent.structural_tag)


async def test_responses(node: Path, stack: Stack) -> None:
    """The Responses API works, collected and streamed."""
    answer = await openai(node, stack, "responses")
    assert (answer["text"], answer["status"]) == (TEXT, "completed")
    streamed = await openai(node, stack, "responses_stream")
    assert streamed["text"] == TEXT
    assert streamed["types"][0] == "response.created"
    assert streamed["types"][-1] == "response.completed"


async def test_messages(node: Path, stack: Stack) -> None:
    """Anthropic's messages work, collected, streamed and counted."""
    message = await anthropic(node, stack, "message")
    assert message["content"][0]["text"] == TEXT
    assert message["stop_reason"] == "end_turn"
    streamed = await anthropic(node, stack, "stream")
    assert streamed["final"]["content"][0]["text"] == TEXT
    assert streamed["types"][0] == "message_start"
    assert streamed["types"][-1] == "message_stop"
    assert (await anthropic(node, stack, "count"))["input_tokens"] > 5
    assert await anthropic(node, stack, "models") == ["smollm2"]


@pytest.mark.parametrize("client", [openai, anthropic])
async def test_a_client_that_leaves_frees_its_request(node: Path, stack: Stack, client: Any) -> None:
    stack.scheduler.reply, stack.scheduler.step_s = [504, 505], 0.01
    assert await client(node, stack, "cancel") == "left"
    await stack.scheduler.until(lambda: len(stack.scheduler.aborted) == 1)


@pytest.mark.parametrize("client", [openai, anthropic])
async def test_clients_retry_what_can_be_retried(node: Path, stack: Stack, client: Any) -> None:
    """Both clients send a refused request again, after the time that the gateway names."""
    refusals = [Overloaded("full", retry_after_ms=100)]
    stack.scheduler.refuse = lambda _: refusals.pop() if refusals else None
    assert await client(node, stack, "retries") == TEXT
    assert len(stack.scheduler.requests) == 2


async def test_errors(node: Path, stack: Stack) -> None:
    """Errors become the clients' own classes."""
    error = await anthropic(node, stack, "wrong_model")
    assert (error["class"], error["status"]) == ("NotFoundError", 404)
    assert error["body"]["error"]["type"] == "not_found_error"


async def test_keys_and_tls(node: Path, tmp_path: Path) -> None:
    """Both clients send their key over TLS; a wrong one is an authentication error."""
    files = service_files(tmp_path)
    settings: dict[str, Any] = {
        "api_key": (SecretStr("right-key"),),
        "ssl_certfile": files.cert,
        "ssl_keyfile": files.key,
    }
    async with running_stack(TEXT, **settings) as stack:
        url = f"https://127.0.0.1:{stack.gateway.port}"
        trust = {"NODE_EXTRA_CA_CERTS": str(files.ca)}

        async def ask(script: str, base: str, scenario: str, key: str) -> Any:
            return await run_client("node", script, base, scenario, key, folder=node, **trust)

        assert await ask("openai_client.mjs", f"{url}/v1", "retries", "right-key") == TEXT
        assert await ask("anthropic_client.mjs", url, "retries", "right-key") == TEXT
        for script, base in (("openai_client.mjs", f"{url}/v1"), ("anthropic_client.mjs", url)):
            error = await ask(script, base, "retries", "wrong-key")
            assert (error["class"], error["status"]) == ("AuthenticationError", 401)
