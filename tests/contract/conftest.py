"""Contract tests run on the event loop that the services run on."""

import asyncio
from collections.abc import Callable, Mapping

import pytest
import uvloop


def pytest_asyncio_loop_factories() -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Returns uvloop's event loops, for pytest-asyncio."""
    return {"uvloop": uvloop.new_event_loop}


def pytest_itemcollected(item: pytest.Item) -> None:
    """Ends tests that hang by a thread: pytest-timeout's signal does not interrupt uvloop."""
    marker = item.get_closest_marker("timeout")
    args, given = (marker.args, marker.kwargs) if marker is not None else ((), {})
    item.add_marker(pytest.mark.timeout(*args, **{**given, "method": "thread"}), append=False)
