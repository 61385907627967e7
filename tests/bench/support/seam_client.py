"""A scheduler and a measured worker as processes, and a gRPC client that keeps a whole batch decoding."""

import asyncio
import contextlib
import json
import sys
import time
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import grpc.aio
import psutil
from grpc_health.v1 import health_pb2, health_pb2_grpc

from protos.errors import from_proto
from protos.service.grpc_options import SCHEMA_REVISION, open_channel
from protos.triptych.v1 import common_pb2, inference_pb2, inference_pb2_grpc

_START_TIMEOUT_S: Final = 180.0
_STOP_TIMEOUT_S: Final = 60.0
_BATCH_TIMEOUT_S: Final = 300.0


@dataclass(frozen=True, slots=True)
class Window:
    """The time during which all rows of a batch decode."""

    start: float
    """When the last row's first token arrived, by ``time.monotonic``."""
    end: float
    """When the first row's last token arrived."""
    lengths: tuple[int, ...]
    """Tokens of each row at the start, prompt included."""
    tokens: int
    """Tokens that arrived in between."""
    scheduler_s: float
    """CPU time of the scheduler in between, seconds."""

    @property
    def seconds(self) -> float:
        """Length of the window."""
        return self.end - self.start


@contextlib.asynccontextmanager
async def processes(
    scheduler_flags: Sequence[str], worker_flags: Sequence[str], environment: Mapping[str, str]
) -> AsyncIterator[tuple[str, psutil.Process]]:
    """Runs a scheduler and a measured worker; yields the scheduler and its address once requests can run.

    Logs go to this process's standard error.

    Raises:
        RuntimeError: A process exits early or does not stop cleanly.
        TimeoutError: The worker is not ready in time.
    """
    async with contextlib.AsyncExitStack() as stack:
        flags = ("-m", "scheduler_svc", "--port", "0", *scheduler_flags)
        scheduler = await stack.enter_async_context(_process(flags, environment, pipe=True))
        address = f"127.0.0.1:{await _listening_port(scheduler)}"
        # A full pipe would stop the scheduler.
        forwarding = asyncio.create_task(_forward(scheduler))
        stack.callback(forwarding.cancel)
        flags = (
            "-m", "tests.bench.support.measured_worker", *worker_flags,
            "--port", "0", "--scheduler-address", address,
        )  # fmt: skip
        worker = await stack.enter_async_context(_process(flags, environment))
        await _wait_until_serving(address, worker)
        yield address, psutil.Process(scheduler.pid)


@contextlib.asynccontextmanager
async def _process(
    flags: Sequence[str], environment: Mapping[str, str], *, pipe: bool = False
) -> AsyncIterator[Process]:
    """Runs a Python process within the block, and stops it at its end; `pipe` keeps its standard error."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, *flags, env=environment, stderr=asyncio.subprocess.PIPE if pipe else None
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        async with asyncio.timeout(_STOP_TIMEOUT_S):
            code = await process.wait()
    if code:
        raise RuntimeError(f"{flags[1]} ended with exit code {code}; its last lines say why")


async def _listening_port(process: Process) -> int:
    """Returns the port that a service logs once it listens."""
    assert process.stderr is not None
    async for line in process.stderr:
        sys.stderr.write(line.decode())
        if line.startswith(b"{") and (entry := json.loads(line)).get("event") == "listening":
            return int(entry["port"])
    raise RuntimeError("the scheduler exited before it listened; its last lines say why")


async def _forward(process: Process) -> None:
    """Copies a process's standard error to this one's."""
    assert process.stderr is not None
    async for line in process.stderr:
        sys.stderr.write(line.decode())


async def _wait_until_serving(address: str, worker: Process) -> None:
    """Waits until requests can run, or raises once the worker has exited."""
    serving = asyncio.create_task(_watch_health(address))
    exited = asyncio.create_task(worker.wait())
    async with asyncio.timeout(_START_TIMEOUT_S):
        try:
            await asyncio.wait((serving, exited), return_when=asyncio.FIRST_COMPLETED)
            if not serving.done():
                raise RuntimeError(
                    f"the worker ended with exit code {worker.returncode}; its last lines say why"
                )
            await serving
        finally:
            for task in (serving, exited):
                task.cancel()
            await asyncio.gather(serving, exited, return_exceptions=True)


async def _watch_health(address: str) -> None:
    """Returns once the scheduler reports that requests can run."""
    async with open_channel(address) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)  # the type stubs cover only the synchronous stub
        async for answer in stub.Watch(health_pb2.HealthCheckRequest(service="triptych.v1.Inference")):
            if answer.status == health_pb2.HealthCheckResponse.SERVING:
                return
    raise RuntimeError("the scheduler stopped before it served")


async def decode_together(
    address: str, scheduler: psutil.Process, prompts: Sequence[Sequence[int]], max_tokens: int
) -> Window:
    """Runs greedy requests over one Connect stream; returns the window in which all of them decode.

    Raises:
        TriptychError: A request failed.
        RuntimeError: The scheduler ended the stream.
        TimeoutError: The requests take too long.
    """
    batch = BatchProgress([len(prompt) for prompt in prompts], scheduler)
    async with open_channel(address) as channel, asyncio.timeout(_BATCH_TIMEOUT_S):
        call: Any = inference_pb2_grpc.InferenceStub(channel).Connect()
        await call.write(inference_pb2.ConnectRequest(schema_revision=SCHEMA_REVISION))
        for row, prompt in enumerate(prompts):
            await call.write(inference_pb2.ConnectRequest(generate=_request(row, prompt, max_tokens)))
        while batch.running:
            message = await call.read()
            if message is grpc.aio.EOF:
                raise RuntimeError(f"the scheduler ended the stream: {await call.details()}")
            batch.take(message, time.monotonic())
        call.cancel()
    return batch.window()


def _request(row: int, prompt: Sequence[int], max_tokens: int) -> inference_pb2.GenerateRequest:
    sampling = common_pb2.SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    return inference_pb2.GenerateRequest(request_id=str(row), prompt_token_ids=prompt, sampling=sampling)


class BatchProgress:
    """Counts the tokens of requests whose ids are their rows."""

    def __init__(self, lengths: list[int], scheduler: psutil.Process) -> None:
        self.running = len(lengths)
        self._scheduler = scheduler
        self._scheduler_s = 0.0
        self._lengths = lengths
        self._to_start = set(range(len(lengths)))
        self._start = self._end = 0.0
        self._lengths_at_start: tuple[int, ...] = ()
        self._tokens = 0
        self._row_of: dict[int, int] = {}

    def take(self, message: inference_pb2.ConnectResponse, now: float) -> None:
        """Counts the tokens of a message that arrived at `now`."""
        all_decode = self._start and not self._end
        if all_decode:
            self._tokens += len(message.token_ids)
        elif self._to_start:
            for handle in message.handles:
                self._lengths[self._row_of[handle]] += 1
        for event in message.events:
            count = len(event.token_ids)
            # While all rows decode, only what is compared is counted: the client shares the machine.
            if all_decode:
                self._tokens += count
            elif self._to_start and count:
                row = int(event.request_id)
                self._lengths[row] += count
                self._to_start.discard(row)
                self._row_of[event.handle] = row
            if event.finish_reason or not count:
                self._note_end(event, now)
        if not self._to_start and not self._start:
            self._start, self._lengths_at_start = now, tuple(self._lengths)
            self._scheduler_s -= self._cpu_s()

    def _note_end(self, event: inference_pb2.GenerateEvent, now: float) -> None:
        if event.HasField("error"):
            raise from_proto(event.error)
        if event.finish_reason:
            self.running -= 1
            if not self._end:
                self._end = now
                self._scheduler_s += self._cpu_s()

    def _cpu_s(self) -> float:
        times = self._scheduler.cpu_times()
        return float(times.user + times.system)

    def window(self) -> Window:
        """Returns the window.

        Raises:
            RuntimeError: A row ended before all decoded.
        """
        if self._end <= self._start:
            raise RuntimeError("a row ended before the last one began; raise max_tokens")
        return Window(self._start, self._end, self._lengths_at_start, self._tokens, self._scheduler_s)
