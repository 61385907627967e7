"""Compares the CPU time that the gateway and vLLM's API server need for a streamed token.

``python -m tests.bench.gateway [--quick]`` serves chat streams from engines without a model: each gives
every request one token a step. Ours is a scheduler over gRPC, vLLM's an engine core over its own sockets.
Each server is one process on one core; engines and the client share another core. Both take turns; figures
are medians.

- ``flat_out``: 128 answers of 512 tokens as fast as the engine emits them; a server that falls behind puts
  several tokens into a chunk. The ratio ``tokens_per_cpu_s`` is ours to vLLM's.
- ``paced``: 128 streams at 20 tokens/s each, so that every token has a chunk of its own.
- ``streams_1000``: 1,000 streams at 20 tokens/s each. The ratio is the part of the chunks that arrived, each
  with one token; 1 means that one core keeps up.
"""

import asyncio
import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import httpx
import psutil
import uvloop
from tokenizers import Tokenizer

from tests.bench.support.contenders import ContenderFailed, environment
from tests.bench.support.gateway.stream_counter import Counts, Request, Streams
from tests.bench.support.gateway.token_clock import WORDS
from tests.bench.support.report import parser, report
from tests.bench.support.vllm_env import commands
from tests.support.gateway.serving import smollm2_folder
from tests.support.paths import ROOT
from tests.support.ports import free_port

_MODEL: Final = "smollm2"
_HOST: Final = "127.0.0.1"
_PACE: Final = 20
_FEW, _MANY = 128, 1000
_START_TIMEOUT_S: Final = 300.0
_ENDLESS: Final = 90_000


@dataclass(frozen=True)
class Server:
    """A server that answers."""

    name: str
    port: int
    process: psutil.Process

    def cpu_s(self) -> float:
        """Returns the CPU time that it has used so far, seconds."""
        times = self.process.cpu_times()
        return float(times.user + times.system)


@dataclass(frozen=True)
class Measured:
    """One measurement of one server."""

    seconds: float
    cpu_s: float
    counts: Counts

    @property
    def tokens_per_cpu_s(self) -> float:
        """Tokens for each second of the server's CPU time."""
        return self.counts.tokens / self.cpu_s

    @property
    def chunks_per_s(self) -> float:
        """Chunks that arrived in a second."""
        return self.counts.chunks / self.seconds

    @property
    def tokens_per_chunk(self) -> float:
        """Tokens of a chunk, on average."""
        return self.counts.tokens / self.counts.chunks

    def gap_ms(self, percentile: int) -> float:
        """Returns a percentile of the times between two reads of a stream, milliseconds."""
        return 1e3 * statistics.quantiles(self.counts.gaps_s, n=100)[percentile - 1]


async def at_pace(server: Server, streams: int, seconds: float) -> Measured:
    """Measures streams that get `_PACE` tokens a second each."""
    clients = Streams(_HOST, server.port)
    try:
        await clients.open(streams, Request(_MODEL, _ENDLESS, _PACE), pause_s=0.002)
        await asyncio.sleep(1)
        clients.take()
        began, cpu_s = time.monotonic(), server.cpu_s()
        await asyncio.sleep(seconds)
        counts = clients.take()
        measured = Measured(time.monotonic() - began, server.cpu_s() - cpu_s, counts)
        clients.check()
        return measured
    finally:
        clients.close()


async def flat_out(server: Server, streams: int, tokens: int) -> Measured:
    """Measures whole answers, from their first request to their last token."""
    clients = Streams(_HOST, server.port)
    try:
        began, cpu_s = time.monotonic(), server.cpu_s()
        await clients.open(streams, Request(_MODEL, tokens, 0))
        await clients.ended()
        return Measured(time.monotonic() - began, server.cpu_s() - cpu_s, clients.take())
    finally:
        clients.close()


@contextlib.contextmanager
def process(name: str, command: Sequence[str], cores: set[int], folder: Path) -> Iterator[psutil.Process]:
    """Runs a process on some cores until the block ends; its log is in `folder`."""
    log = folder / f"{name}.log"
    # vLLM's server imports modules from its working directory, so only ours run in the checkout.
    cwd = folder if name == "vllm" else ROOT
    with log.open("w") as output:
        started = subprocess.Popen(
            command, cwd=cwd, env=environment(folder / "caches"), stdout=output, stderr=subprocess.STDOUT,
            preexec_fn=lambda: os.sched_setaffinity(0, cores),  # noqa: PLW1509 - no thread runs yet
        )  # fmt: skip
    try:
        yield psutil.Process(started.pid)
    finally:
        started.terminate()
        try:
            started.wait(20)
        except subprocess.TimeoutExpired:
            started.kill()
            started.wait()


def wait_until_answers(name: str, port: int, running: psutil.Process, folder: Path) -> Server:
    """Returns the server once it answers.

    Raises:
        ContenderFailed: it ends, or takes too long.
    """
    deadline = time.monotonic() + _START_TIMEOUT_S
    with httpx.Client(timeout=5, trust_env=False) as client:
        while time.monotonic() < deadline and running.status() != psutil.STATUS_ZOMBIE:
            with contextlib.suppress(httpx.TransportError):
                if client.get(f"http://{_HOST}:{port}/health").status_code == httpx.codes.OK:
                    return Server(name, port, running)
            time.sleep(0.1)
    log = (folder / f"{name}.log").read_text().splitlines()
    raise ContenderFailed(f"{name} does not serve: {log[-1] if log else 'it wrote no log'}")


@contextlib.contextmanager
def servers(model: Path, folder: Path, cores: Sequence[int]) -> Iterator[list[Server]]:
    """Runs both servers on the first core, and their engines on the second."""
    words = folder / "tokens.txt"
    ids = Tokenizer.from_file(str(model / "tokenizer.json")).encode(WORDS, add_special_tokens=False).ids
    words.write_text(" ".join(map(str, ids)))
    server_core, other_core = {cores[0]}, {cores[1]}
    ours, theirs, grpc_port = free_port(), free_port(), free_port()
    vllm = [
        str(commands() / "python"), str(ROOT / "tests/bench/support/gateway/vllm_server.py"),
        "--tokens", str(words), "--engine-cores", str(cores[1]), "--",
        "--model", str(model), "--served-model-name", _MODEL, "--host", _HOST, "--port", str(theirs),
        "--kv-cache-memory-bytes", str(1 << 30), "--max-num-seqs", "1024",
        # The demo's context is short for streams that do not end.
        "--hf-overrides", '{"max_position_embeddings": 131072}',
    ]  # fmt: skip
    double = [
        sys.executable, "-m", "tests.bench.support.gateway.emitting_scheduler", "--port", str(grpc_port),
        "--tokenizer", str(smollm2_folder()), "--tokens", str(words),
    ]  # fmt: skip
    gateway = [
        sys.executable, "-m", "gateway", "--host", _HOST, "--port", str(ours),
        "--scheduler-address", f"{_HOST}:{grpc_port}",
    ]  # fmt: skip
    with (
        process("vllm", vllm, server_core, folder) as peer,
        process("scheduler", double, other_core, folder),
        process("triptych", gateway, server_core, folder) as own,
    ):
        yield [
            wait_until_answers("triptych", ours, own, folder),
            wait_until_answers("vllm", theirs, peer, folder),
        ]


def row(measured: Sequence[Measured]) -> dict[str, float]:
    """Returns the medians of some measurements."""

    def median(values: Sequence[float]) -> float:
        return round(statistics.median(values), 3)

    return {
        "tokens_per_cpu_s": median([one.tokens_per_cpu_s for one in measured]),
        "chunks_per_s": median([one.chunks_per_s for one in measured]),
        "tokens_per_chunk": median([one.tokens_per_chunk for one in measured]),
        "cores": median([one.cpu_s / one.seconds for one in measured]),
        "gap_p99_ms": median([one.gap_ms(99) for one in measured]),
    }


async def measure(running: Sequence[Server], rounds: int, seconds: float) -> dict[str, dict[str, float]]:
    """Returns the figures of all cases, by case and server."""
    found: dict[str, list[Measured]] = {}
    for _ in range(rounds):
        for server in running:
            for case, measuring in (
                ("paced", at_pace(server, _FEW, seconds)),
                ("flat_out", flat_out(server, _FEW, 512)),
                ("streams_1000", at_pace(server, _MANY, seconds)),
            ):
                found.setdefault(f"{case}_{server.name}", []).append(await measuring)
    return {name: row(measured) for name, measured in found.items()}


def main() -> None:
    """Prints a table and the line of JSON."""
    options = parser(__doc__, "one short round")
    arguments = options.parse_args()
    from worker_svc.model_files.loader import fetch

    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        options.error("two cores are needed: one for the server, one for the engine and the client")
    os.sched_setaffinity(0, {cores[1]})
    with tempfile.TemporaryDirectory() as scratch, servers(fetch(_MODEL, None), Path(scratch), cores) as both:
        figures = uvloop.run(measure(both, *((1, 4.0) if arguments.quick else (5, 10.0))))
    os.sched_setaffinity(0, cores)
    print(f"{'':24}{'tokens / CPU s':>16}{'chunks/s':>10}{'tokens/chunk':>14}{'cores':>8}{'gap p99':>12}")
    for name, each in figures.items():
        print(
            f"{name:24}{each['tokens_per_cpu_s']:16,.0f}{each['chunks_per_s']:10,.0f}"
            f"{each['tokens_per_chunk']:14.2f}{each['cores']:8.2f}{each['gap_p99_ms']:9,.0f} ms"
        )

    def ratio(case: str) -> float:
        ours, theirs = figures[f"{case}_triptych"], figures[f"{case}_vllm"]
        return ours["tokens_per_cpu_s"] / theirs["tokens_per_cpu_s"]

    ratios = {
        "tokens_per_cpu_s": ratio("flat_out"),
        "paced_tokens_per_cpu_s": ratio("paced"),
        "streams_1000": figures["streams_1000_triptych"]["chunks_per_s"] / (_MANY * _PACE),
        "streams_1000_vllm": figures["streams_1000_vllm"]["chunks_per_s"] / (_MANY * _PACE),
    }
    report("gateway", {"by_case": figures}, ratios)


if __name__ == "__main__":
    main()
