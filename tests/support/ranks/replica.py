"""A scheduler and the ranks of one replica, as real processes on this host's CPU."""

import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
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


@dataclass
class Answer:
    """What a client received for one sequence."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[common_pb2.TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[common_pb2.TokenLogprobs] = field(default_factory=list)


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
        scheduler_flags: Sequence[str] = (),
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
        self.scheduler = self._start_scheduler(*scheduler_flags)
        self._connect()

    def _start_scheduler(self, *flags: str) -> subprocess.Popen[bytes]:
        return self._start("scheduler_svc", "scheduler", "--port", str(self._port), *SHAPES, *flags)

    def _connect(self) -> None:
        self._channel = grpc.insecure_channel(f"127.0.0.1:{self._port}")
        self._stub = inference_pb2_grpc.InferenceStub(self._channel)

    def replace_scheduler(self, *flags: str) -> None:
        """Kills the scheduler and starts another one, which finds the ranks as they are; waits for both."""
        self.scheduler.kill()
        self.scheduler.wait(20)
        self.scheduler = self._start_scheduler(*flags)
        # The old connection may not know yet that its peer is gone.
        self._channel.close()
        self._connect()
        self.wait_until_ready()

    def start_rank(self, rank: int) -> None:
        """Starts the process of a rank."""
        alone = self.world_size == 1
        group = () if alone else ("--replica-id", "r0", "--master", f"127.0.0.1:{self._master}")
        self.ranks[rank] = self._start(
            "worker_svc", f"rank{rank}", "--model", str(self._model), "--device", self._device, "--port", "0",
            "--scheduler-address", f"127.0.0.1:{self._port}", "--rank", str(rank), "--kv-memory", "0.1",
            "--no-compile-cache", "--cpu-threads", "1", *group, *self._flags,
        )  # fmt: skip

    def lose(self, rank: int, sent: signal.Signals) -> None:
        """Kills or freezes a rank. The others end by themselves; then all start again."""
        lost = self.ranks[rank]
        lost.send_signal(sent)
        assert [self.ranks[other].wait(120) for other in self.ranks if other != rank] == [1] * (
            self.world_size - 1
        )
        if sent == signal.SIGSTOP:
            lost.send_signal(signal.SIGCONT)
        assert lost.wait(120) != 0
        for each in range(self.world_size):
            self.start_rank(each)

    def _start(self, module: str, name: str, *flags: str) -> subprocess.Popen[bytes]:
        with (self._logs / f"{name}.log").open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", module, *flags], stdout=log, stderr=log, env=self._variables
            )

    def wait_until_ready(self) -> None:
        """Waits until the replica takes requests."""
        health: Any = health_pb2_grpc.HealthStub(self._channel)
        watched = health.Watch(
            health_pb2.HealthCheckRequest(service="triptych.v1.Inference"), timeout=170, wait_for_ready=True
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
        lora: str = "",
    ) -> list[list[int]]:
        """Returns the tokens of each sequence; sets `started` after the first few."""
        parameters = common_pb2.SamplingParams(max_tokens=count, ignore_eos=True, **sampling)
        return [answer.tokens for answer in self.ask(prompt, parameters, n=n, started=started, lora=lora)]

    def ask(
        self,
        prompt: Sequence[int],
        parameters: common_pb2.SamplingParams,
        *,
        n: int = 1,
        leave_after: int | None = None,
        started: threading.Event | None = None,
        lora: str = "",
    ) -> list[Answer]:
        """Returns the answer of each sequence."""
        request = inference_pb2.GenerateRequest(
            prompt_token_ids=prompt, n=n, sampling=parameters, lora_name=lora
        )
        answers = [Answer() for _ in range(n)]
        call = self._stub.Generate(request, timeout=170)
        for event in call:
            assert not event.HasField("error"), event.error
            answer = answers[event.sequence]
            answer.tokens += event.token_ids
            answer.logprobs += event.logprobs
            answer.prompt_logprobs += event.prompt_logprobs
            if started is not None and answers[0].tokens:
                started.set()
            if leave_after is not None and len(answers[0].tokens) >= leave_after:
                call.cancel()
                break
        return answers

    def ask_all(
        self, prompts: Sequence[Sequence[int]], parameters: common_pb2.SamplingParams
    ) -> list[Answer]:
        """Returns the answers of requests that run at the same time."""
        with ThreadPoolExecutor(len(prompts)) as pool:
            return [answer for (answer,) in pool.map(lambda prompt: self.ask(prompt, parameters), prompts)]

    def count(self, name: str) -> float:
        """Returns a counter of the scheduler, without labels or summed over them."""
        text = self._stub.GetMetrics(inference_pb2.GetMetricsRequest(), timeout=20).text.decode()
        lines = [line.rpartition(" ") for line in text.splitlines() if not line.startswith("#")]
        return sum(float(value) for key, _, value in lines if key.partition("{")[0] == name)

    def forget_prefixes(self) -> None:
        """Empties the prefix cache."""
        self._stub.ResetPrefixCache(inference_pb2.ResetPrefixCacheRequest(), timeout=20)

    def generate_all(
        self, prompts: Sequence[Sequence[int]], count: int, sampling: Mapping[str, Any]
    ) -> list[list[int]]:
        """Returns the tokens of requests that run at the same time."""
        parameters = common_pb2.SamplingParams(max_tokens=count, ignore_eos=True, **sampling)
        return [answer.tokens for answer in self.ask_all(prompts, parameters)]

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
