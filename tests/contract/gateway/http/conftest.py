"""A gateway over a fake scheduler, shared by the tests of a module."""

from collections.abc import AsyncIterator

import pytest_asyncio

from tests.support.gateway.serving import TEXT, Stack, running_stack


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running() -> AsyncIterator[Stack]:
    """Runs until the module ends and parks no request. Modules that need something else override it."""
    async with running_stack(TEXT, max_body_bytes=100_000, max_prompts=4, max_parked_requests=0) as stack:
        yield stack
