"""The Python clients of OpenAI and Anthropic where they do more than parse answers: faults, keys and TLS."""

import contextlib
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Self

import anthropic
import openai
import pytest
from pydantic import SecretStr

from protos.errors import Overloaded
from tests.support.gateway.serving import CHAT, TEXT, Stack, running_stack
from tests.support.security.certificates import service_files

pytestmark = [pytest.mark.contract, pytest.mark.slow]

MESSAGES: list[Any] = CHAT["messages"]


@pytest.fixture
async def stack() -> AsyncIterator[Stack]:
    async with running_stack(TEXT) as stack:
        yield stack


class _Closing:
    """Closes its client at the end of a block."""

    client: openai.AsyncOpenAI | anthropic.AsyncAnthropic

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.client.close()


class OpenAi(_Closing):
    """Asks through OpenAI's client."""

    client: openai.AsyncOpenAI
    errors = openai

    def __init__(self, base_url: str, key: str = "unused", **options: Any) -> None:
        self.client = openai.AsyncOpenAI(base_url=f"{base_url}/v1", api_key=key, **options)

    async def ask(self, model: str = "smollm2", max_tokens: int = 100) -> str:
        answer = await self.client.chat.completions.create(
            model=model, messages=MESSAGES, max_tokens=max_tokens
        )
        return answer.choices[0].message.content or ""

    async def leave_early(self) -> None:
        stream = await self.client.chat.completions.create(
            model="smollm2", messages=MESSAGES, max_tokens=400, stream=True
        )
        async with stream:
            async for _ in stream:
                return


class Anthropic(_Closing):
    """Asks through Anthropic's client."""

    client: anthropic.AsyncAnthropic
    errors = anthropic

    def __init__(self, base_url: str, key: str = "unused", **options: Any) -> None:
        self.client = anthropic.AsyncAnthropic(base_url=base_url, api_key=key, **options)

    async def ask(self, model: str = "smollm2", max_tokens: int = 100) -> str:
        message = await self.client.messages.create(model=model, messages=MESSAGES, max_tokens=max_tokens)
        return "".join(block.text for block in message.content if block.type == "text")

    async def leave_early(self) -> None:
        async with self.client.messages.stream(model="smollm2", messages=MESSAGES, max_tokens=400) as stream:
            async for _ in stream:
                return


Client = type[OpenAi] | type[Anthropic]
both = pytest.mark.parametrize("client", [OpenAi, Anthropic])


@both
async def test_a_refused_request_is_sent_again(stack: Stack, client: Client) -> None:
    """The client waits for the time that the gateway names, and its second try is answered."""
    refusals = [Overloaded("full", retry_after_ms=100)]
    stack.scheduler.refuse = lambda _: refusals.pop() if refusals else None
    async with client(stack.gateway.base_url) as asking:
        assert await asking.ask() == TEXT
    assert len(stack.scheduler.requests) == 2


@both
async def test_a_client_that_leaves_frees_its_request(stack: Stack, client: Client) -> None:
    """The gateway aborts the request of a client that closes its stream."""
    stack.scheduler.reply, stack.scheduler.step_s = [504, 505], 0.01
    async with client(stack.gateway.base_url) as asking:
        await asking.leave_early()
    await stack.scheduler.until(lambda: len(stack.scheduler.aborted) == 1)


@both
async def test_keys_over_tls(tmp_path: Path, client: Client) -> None:
    """The client's key opens the gateway over TLS; a wrong one is an authentication error."""
    files = service_files(tmp_path)
    settings: dict[str, Any] = {
        "api_key": (SecretStr("right-key"),), "ssl_certfile": files.cert, "ssl_keyfile": files.key,
    }  # fmt: skip
    trust = ssl.create_default_context(cafile=files.ca)
    async with running_stack(TEXT, **settings) as stack:
        url = f"https://127.0.0.1:{stack.gateway.port}"
        for key, ends in (
            ("right-key", contextlib.nullcontext()),
            ("wrong-key", pytest.raises(client.errors.AuthenticationError)),
        ):
            http = client.errors.DefaultAsyncHttpxClient(verify=trust)
            async with client(url, key, http_client=http) as asking:
                with ends:
                    assert await asking.ask() == TEXT
