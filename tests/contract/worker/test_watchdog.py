"""Workers that end themselves: the real command in a real process, most with a fake device that fails."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from protos.errors import Context
from protos.service.grpc_options import open_channel
from protos.triptych.v1 import registry_pb2, registry_pb2_grpc, worker_pb2, worker_pb2_grpc
from tests.support import tiny_models
from tests.support.paths import ROOT

pytestmark = [pytest.mark.contract, pytest.mark.timeout(120)]

SIZES = worker_pb2.ConfigureRequest(
    max_model_len=32, max_num_seqs=1, chunk=8, block_size=8, decode_buckets=[1], num_blocks=[5]
)
DECODE = worker_pb2.StepPlan(step=1, release=[0], decode=worker_pb2.Decode(slots=[0], bucket=1))


class Process:
    """A worker process and a channel to it."""

    process: asyncio.subprocess.Process
    channel: grpc.aio.Channel
    stub: Any

    async def end(self) -> tuple[int, list[str]]:
        """Waits for the end; returns the exit code and the lines of the log."""
        assert self.process.stderr is not None
        async with asyncio.timeout(20):
            log = (await self.process.stderr.read()).decode().splitlines()
            return await self.process.wait(), log

    async def configure(self) -> None:
        assert [event async for event in self.stub.Configure(SIZES)][-1].HasField("ready")

    async def step(self) -> Any:
        """Configures the worker and sends it a step; returns the stream."""
        await self.configure()
        steps = self.stub.Execute()
        await steps.write(DECODE)
        return steps


class HungRegistry(registry_pb2_grpc.WorkerRegistryServicer):
    """Keeps a worker until a step of it hangs."""

    def __init__(self) -> None:
        self.hung = asyncio.Event()

    async def Register(
        self, request: registry_pb2.RegisterRequest, context: Context
    ) -> AsyncIterator[registry_pb2.RegisterEvent]:
        await self.hung.wait()
        yield registry_pb2.RegisterEvent(state=registry_pb2.RegisterEvent.STATE_HUNG)

    async def Leave(self, request: registry_pb2.LeaveRequest, context: Context) -> registry_pb2.LeaveResponse:
        return registry_pb2.LeaveResponse()


@contextlib.asynccontextmanager
async def started(kind: str, *flags: str) -> AsyncIterator[Process]:
    """Starts `failing_process`."""
    running = Process()
    running.process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.support.worker.failing_process", kind,
        "--model", "fake", "--port", "0", "--scheduler-address", "", *flags,
        stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        assert running.process.stderr is not None
        while (entry := json.loads(await running.process.stderr.readline()))["event"] != "listening":
            pass
        async with open_channel(f"127.0.0.1:{entry['port']}") as running.channel:
            running.stub = worker_pb2_grpc.WorkerStub(running.channel)
            yield running
    finally:
        if running.process.returncode is None:
            running.process.kill()
        await running.process.wait()


@pytest.mark.parametrize("kind", ["hang", pytest.param("hang-reading", marks=pytest.mark.slow)])
async def test_a_hung_step_ends_the_process(kind: str) -> None:
    """The exit code is 1, the last line says why, and the log says where the thread was.

    The device may also hang after the launch, when only the thread that waits for it is busy.
    """
    async with started(kind, "--hang-timeout-s", "0.5") as worker:
        _ = await worker.step()
        code, log = await worker.end()
        assert code == 1
        assert log[-1].startswith("triptych worker: there was no progress for 0.")
        assert log[-1].endswith(
            " s in a step (--hang-timeout-s); the worker ends, so that its supervisor starts another"
        )
        (hung,) = [json.loads(line) for line in log[:-1] if '"hung"' in line]
        assert "failing_process.py" in hung["stack"]


@pytest.mark.slow
async def test_a_step_that_the_scheduler_has_given_up_ends_the_process_soon() -> None:
    """The worker learns from its registration that its step is hung, long before its own limit."""
    registry = HungRegistry()
    server = grpc.aio.server()
    registry_pb2_grpc.add_WorkerRegistryServicer_to_server(registry, server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        async with started("hang", "--scheduler-address", address) as worker:
            _ = await worker.step()
            registry.hung.set()
            code, log = await worker.end()
    finally:
        await server.stop(0)
    assert code == 1
    assert log[-1].startswith("triptych worker: there was no progress for ")


@pytest.mark.slow
async def test_native_code_that_keeps_the_lock_ends_the_process() -> None:
    async with started("native", "--hang-timeout-s", "0.5", "--configure-hang-timeout-s", "0.5") as worker:
        _ = await worker.step()
        code, log = await worker.end()
        assert code == 1
        assert any("failing_process.py" in line for line in log)


@pytest.mark.slow
async def test_a_hung_configuration_ends_the_process() -> None:
    async with started("configuration", "--configure-hang-timeout-s", "0.5") as worker:
        call = worker.stub.Configure(SIZES)
        code, log = await worker.end()
        assert code == 1
        assert "in a configuration (--configure-hang-timeout-s)" in log[-1]
        call.cancel()


@pytest.mark.slow
async def test_a_long_configuration_with_progress_is_no_hang() -> None:
    """Only the time since the last progress counts: 1.5 s of work pass a limit of 1 s."""
    async with started("slow", "--configure-hang-timeout-s", "1", "--hang-timeout-s", "1") as worker:
        steps = await worker.step()
        assert list((await steps.read()).token_ids) == [3]


@pytest.mark.slow
async def test_a_frozen_process_goes_on() -> None:
    """The time of a freeze does not count: 1.5 s of it pass a limit of 1 s."""
    async with started("slow", "--configure-hang-timeout-s", "1") as worker:
        events = aiter(worker.stub.Configure(SIZES))
        await anext(events)
        os.kill(worker.process.pid, signal.SIGSTOP)
        await asyncio.sleep(1.5)
        os.kill(worker.process.pid, signal.SIGCONT)
        assert [event async for event in events][-1].HasField("ready")


@pytest.mark.slow
async def test_a_broken_device_ends_the_process() -> None:
    """Every step's error is answered; then the exit code is 1, and the last line says why."""
    async with started("broken", "--max-failed-steps", "3") as worker:
        await worker.configure()
        steps = worker.stub.Execute()
        for _ in range(3):
            await steps.write(DECODE)
            assert (await steps.read()).error.message == "the step failed: RuntimeError: the device is gone"
        code, log = await worker.end()
        assert code == 1
        assert log[-1] == (
            "triptych worker: 3 steps failed in a row, the last with: the step failed: RuntimeError: the"
            " device is gone; the worker ends, so that its supervisor starts another (--max-failed-steps)"
        )


async def test_health_follows_the_configuration() -> None:
    """A worker serves once it is configured, and not any more once a reconfiguration has failed."""
    states = health_pb2.HealthCheckResponse
    async with started("fine") as worker:
        health: Any = health_pb2_grpc.HealthStub(worker.channel)

        async def status() -> int:
            return int((await health.Check(health_pb2.HealthCheckRequest())).status)

        assert await status() == states.NOT_SERVING
        await worker.configure()
        assert await status() == states.SERVING
        bad = worker_pb2.ConfigureRequest()
        bad.CopyFrom(SIZES)
        bad.max_model_len = 13
        with pytest.raises(grpc.aio.AioRpcError, match="--max-model-len 13"):
            await worker.stub.Configure(bad).read()
        assert await status() == states.NOT_SERVING
        await worker.configure()
        assert await status() == states.SERVING


def end_of(*flags: str, **variables: str) -> tuple[str, float]:
    """Runs a worker to its end; returns its line about that, and the seconds from the line to the end."""
    command = [sys.executable, "-m", "deploy.cli", "worker", "--device=cpu", "--port=0", *flags]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=os.environ | variables) as process:
        assert process.stderr is not None
        lines = []
        said_at = 0.0
        for line in process.stderr:
            if line.startswith("triptych worker: "):
                lines.append(line)
                said_at = time.monotonic()
    assert process.returncode == 2
    (line,) = lines
    return line, time.monotonic() - said_at


def test_the_reason_waits_for_no_scheduler(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        line, took_s = end_of(f"--model={tmp_path}/missing", f"--scheduler-address={address}")
    assert "there is no folder" in line
    assert took_s < 1


@pytest.mark.slow
def test_a_broken_package_is_one_line(tmp_path: Path) -> None:
    model = tiny_models.write("llama", tmp_path / "model")
    package = tmp_path / "packages" / "vllm"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise ImportError('libcudart.so.12: cannot open')")
    path = os.pathsep.join([str(package.parent), str(ROOT)])
    line, _ = end_of(f"--model={model}", "--scheduler-address=", PYTHONPATH=path)
    assert "libcudart.so.12" in line
    assert "triptych install worker" in line
