"""One request followed by its id through the logs of three processes."""

import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import httpx
import pytest

from tests.support.ports import free_ports
from tests.support.waiting import until

pytestmark = [pytest.mark.e2e, pytest.mark.stack, pytest.mark.slow, pytest.mark.timeout(240)]


@contextlib.contextmanager
def running(folder: Path, name: str, *flags: str) -> Iterator[Path]:
    """Runs a service apart from the others; yields its log."""
    log = folder / f"{name}.log"
    command = [sys.executable, "-m", "deploy.cli", name, *flags]
    with log.open("wb") as file, subprocess.Popen(command, stderr=file, env=os.environ) as process:
        try:
            yield log
        finally:
            process.terminate()


@pytest.mark.parametrize("log_format", ["json", "console"])
async def test_each_service_logs_a_request_by_its_id(smollm2: Path, tmp_path: Path, log_format: str) -> None:
    """The gateway and the scheduler at info, the worker at debug; the client chose the id."""
    http, scheduler, worker = free_ports(3)
    shared = ("--log-level", "debug", "--log-format", log_format)
    address = ("--scheduler-address", f"127.0.0.1:{scheduler}")
    with (
        running(tmp_path, "scheduler", "--port", str(scheduler), *shared) as scheduler_log,
        running(
            tmp_path, "worker", "--model", str(smollm2), "-O", "0", "--port", str(worker), *address, *shared
        ) as worker_log,
        running(tmp_path, "gateway", "--port", str(http), *address, *shared) as gateway_log,
    ):
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{http}", timeout=30) as client:

            async def is_ready() -> bool:
                with contextlib.suppress(httpx.TransportError):
                    if (await client.get("/ready")).status_code == 200:
                        return True
                await asyncio.sleep(0.5)
                return False

            await until(is_ready, timeout_s=200)
            body = {"model": "smollm2", "prompt": "One, two,", "max_tokens": 3}
            answer = await client.post("/v1/completions", json=body, headers={"X-Request-Id": "follow-me"})
            assert answer.status_code == 200, answer.text

        def lines(log: Path, level: str, event: str) -> list[str]:
            found = [line for line in log.read_text().splitlines() if "follow-me" in line]
            marks = (f'"event": "{event}"', f'"{level}"') if log_format == "json" else (event, f"[{level}")
            return [line for line in found if all(mark in line for mark in marks)]

        for log, level, event, fields in (
            (gateway_log, "info", "request", ("completion_tokens", "ttft_ms", "finish_reason")),
            (scheduler_log, "info", "request", ("completion_tokens", "ttft_ms", "finish_reason")),
            (worker_log, "debug", "admitted", ("slot",)),
        ):
            await until(partial(lines, log, level, event))  # the client may have its answer before
            (line,) = lines(log, level, event)
            assert all(field in line for field in fields), line
