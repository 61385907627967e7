"""A gateway over a fake scheduler whose model thinks and calls tools, and Anthropic's client of it."""

from collections.abc import AsyncIterator
from pathlib import Path

import anthropic
import pytest_asyncio

from tests.support.gateway.serving import Stack, running_stack


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running(qwen_folder: Path) -> AsyncIterator[Stack]:
    """Runs until the module ends and parks no request."""
    async with running_stack("x", folder=qwen_folder, max_body_bytes=100_000, max_parked_requests=0) as stack:
        yield stack


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(running: Stack) -> AsyncIterator[anthropic.AsyncAnthropic]:
    """The official client, without retries."""
    async with anthropic.AsyncAnthropic(
        base_url=running.gateway.base_url, api_key="none", max_retries=0
    ) as client:
        yield client
