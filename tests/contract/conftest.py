"""Contract tests run on the event loop that the services run on."""

import asyncio
from collections.abc import Callable, Mapping

import uvloop


def pytest_asyncio_loop_factories() -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Returns uvloop's event loops, for pytest-asyncio."""
    return {"uvloop": uvloop.new_event_loop}
