"""A gateway over a fake scheduler, shared by the tests of a module."""

from collections.abc import AsyncIterator

import pytest_asyncio

from tests.support.gateway.serving import TEXT, Stack, running_stack


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running() -> AsyncIterator[Stack]:
    """Runs until the module ends."""
    async with running_stack(TEXT, max_prompts=4) as stack:
        yield stack
