"""A gateway over a fake scheduler whose model thinks and calls tools, and OpenAI's client of it."""

from collections.abc import AsyncIterator
from pathlib import Path

import openai
import pytest_asyncio

from tests.support.gateway.serving import Stack, running_stack


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running(qwen_folder: Path) -> AsyncIterator[Stack]:
    """Qwen's format of calls, and thinking."""
    async with running_stack("x", folder=qwen_folder, max_parked_requests=0) as stack:
        yield stack


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(running: Stack) -> AsyncIterator[openai.AsyncOpenAI]:
    """OpenAI's own client."""
    async with openai.AsyncOpenAI(
        base_url=f"{running.gateway.base_url}/v1", api_key="none", max_retries=0
    ) as client:
        yield client
