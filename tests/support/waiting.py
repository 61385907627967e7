"""Waits for a condition."""

import asyncio
from collections.abc import Awaitable, Callable


async def until(condition: Callable[[], object], *, timeout_s: float = 20.0) -> None:
    """Waits until a condition holds; it may return something to await."""
    async with asyncio.timeout(timeout_s):
        while not (await found if isinstance(found := condition(), Awaitable) else found):
            await asyncio.sleep(0.005)
