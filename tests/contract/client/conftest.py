"""A gateway with a key over a fake scheduler, and the command `triptych` beside it."""

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from pydantic import SecretStr
from structlog.testing import capture_logs

from deploy import cli
from tests.support.gateway.commands import KEY, Command, Output
from tests.support.gateway.serving import TEXT, Stack, running_stack


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running() -> AsyncIterator[Stack]:
    async with running_stack(TEXT, api_key=(SecretStr(KEY),)) as stack:
        stack.http.headers["Authorization"] = f"Bearer {KEY}"
        yield stack


@pytest.fixture
def stack(running: Stack) -> Stack:
    """The module's gateway; its scheduler has forgotten earlier tests."""
    running.scheduler.reset()
    return running


@pytest.fixture
def triptych(stack: Stack, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    """Runs a command in a thread, against the gateway and with its key."""
    monkeypatch.setenv("OPENAI_API_KEY", KEY)

    async def run(*argv: str) -> Output:
        url = () if "--url" in argv else ("--url", f"{stack.gateway.base_url}/v1")
        with capture_logs():  # the gateway logs to the same standard output
            code = await asyncio.to_thread(cli.main, [*argv, *url])
        printed = capsys.readouterr()
        return Output(code, printed.out, printed.err)

    return run
