"""A scheduler and the ranks of one replica, as real processes on this host's CPU."""

import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from protos.triptych.v1 import common_pb2, inference_pb2, inference_pb2_grpc
from tests.support.ports import free_ports

CHUNK, BLOCK, SLOTS = 64, 64, 4
SHAPES = (
    "--max-num-seqs", str(SLOTS), "--max-model-len", "512", "--max-num-batched-tokens", str(CHUNK),
    "--block-size", str(BLOCK),
)  # fmt: skip


class Replica:
    """The processes, and a client of the scheduler."""

    def __init__(
        self,
        model: Path,
        logs: Path,
        *,
        tensor: int,
        pipeline: int,
        device: str = "cpu",
        flags: Sequence[str] = (),
        block: int = BLOCK,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        """Starts the scheduler only."""
        self._variables = variables
        self._device = device
        self._model = model
        self._logs = logs
        self._flags = [
            *flags, "--tensor-parallel-size", str(tensor), "--pipeline-parallel-size", str(pipeline),
        ]  # fmt: skip
        self._port, self._master = free_ports(2)
        self.world_size = tensor * pipeline
        self.ranks: dict[int, subprocess.Popen[bytes]] = {}
        self.scheduler = self._start(
            "scheduler_svc", "scheduler", "--port", str(self._port), *SHAPES, "--block-size", str(block)
        )
        self._channel = grpc.insecure_channel(f"127.0.0.1:{self._port}")
        self._stub = inference_pb2_grpc.InferenceStub(self._channel)

    def start_rank(self, rank: int) -> None:
        """Starts the process of a rank."""
        alone = self.world_size == 1
        group = () if alone else ("--replica-id", "r0", "--master", f"127.0.0.1:{self._master}")
        self.ranks[rank] = self._start(
            "worker_svc", f"rank{rank}", "--model", str(self._model), "--device", self._device, "--port", "0",
            "--scheduler-address", f"127.0.0.1:{self._port}", "--rank", str(rank), "--kv-memory", "0.1",
            "--no-compile-cache", "--cpu-threads", "1", *group, *self._flags,
        )  # fmt: skip

    def _start(self, module: str, name: str, *flags: str) -> subprocess.Popen[bytes]:
        with (self._logs / f"{name}.log").open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", module, *flags], stdout=log, stderr=log, env=self._variables
            )

    def wait_until_ready(self) -> None:
        """Waits until the replica takes requests."""
        health: Any = health_pb2_grpc.HealthStub(self._channel)
        watched = health.Watch(
            health_pb2.HealthCheckRequest(service="triptych.v1.Inference"), timeout=110, wait_for_ready=True
        )
        for answer in watched:
            if answer.status == health_pb2.HealthCheckResponse.SERVING:
                watched.cancel()
                return

    def generate(
        self,
        prompt: Sequence[int],
        count: int,
        sampling: Mapping[str, Any],
        *,
        n: int = 1,
        started: threading.Event | None = None,
    ) -> list[list[int]]:
        """Returns the tokens of each sequence; sets `started` after the first few."""
        parameters = common_pb2.SamplingParams(max_tokens=count, ignore_eos=True, **sampling)
        request = inference_pb2.GenerateRequest(prompt_token_ids=prompt, n=n, sampling=parameters)
        tokens: list[list[int]] = [[] for _ in range(n)]
        for event in self._stub.Generate(request, timeout=110):
            tokens[event.sequence] += event.token_ids
            if started is not None and tokens[0]:
                started.set()
        return tokens

    def generate_all(
        self, prompts: Sequence[Sequence[int]], count: int, sampling: Mapping[str, Any]
    ) -> list[list[int]]:
        """Returns the tokens of requests that run at the same time."""
        with ThreadPoolExecutor(len(prompts)) as pool:
            answers = pool.map(lambda prompt: self.generate(prompt, count, sampling), prompts)
            return [tokens for (tokens,) in answers]

    def stop(self) -> None:
        """Ends all processes."""
        for process in (*self.ranks.values(), self.scheduler):
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.terminate()
        for process in (*self.ranks.values(), self.scheduler):
            process.wait(20)


@contextmanager
def replica(
    model: Path, logs: Path, *, tensor: int = 1, pipeline: int = 1, **options: Any
) -> Iterator[Replica]:
    """Runs a replica for the block, which begins once it is ready; `options` are those of `Replica`."""
    running = Replica(model, logs, tensor=tensor, pipeline=pipeline, **options)
    try:
        for rank in reversed(range(running.world_size)):  # in any order
            running.start_rank(rank)
        running.wait_until_ready()
        yield running
    finally:
        running.stop()
