"""A gateway over a fake scheduler for each module; each test starts without requests and faults."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from gateway.scheduler_client import client
from tests.support.gateway.serving import TEXT, Stack, running_stack
from tests.support.gateway.tool_templates import folder_with


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running() -> AsyncIterator[Stack]:
    """Runs until the module ends and parks no request. Modules that need something else override it."""
    async with running_stack(TEXT, max_body_bytes=100_000, max_prompts=4, max_parked_requests=0) as stack:
        yield stack


@pytest.fixture(scope="session")
def qwen_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tokenizer's files of a model that thinks and calls tools as Qwen does."""
    return folder_with(tmp_path_factory.mktemp("qwen"))


@pytest.fixture
def stack(running: Stack) -> Stack:
    """The module's gateway; its scheduler has forgotten earlier tests."""
    running.scheduler.reset()
    return running


@pytest.fixture(autouse=True)
def short_reconnect_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps the pause before a reconnect short, however often a module's tests break the stream."""
    monkeypatch.setattr(client, "_LONGEST_PAUSE_S", 0.1)
