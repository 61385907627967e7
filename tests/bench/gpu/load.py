"""Compares a served load on a GPU with the time that its chunks and steps take in one process.

``python -m tests.bench.gpu.load [--quick] [--gateways N]`` needs a CUDA GPU. The model has the shape of Llama
3.2 1B and made-up weights. At 16, 64 and 128 requests at a time, a closed loop of streamed completions has
prompts of 512 tokens and answers of 128. Its clients are processes of their own, so that they are not what is
measured.

In-process, an answer costs one chunk, which gives its first token, and its share of 127 decode steps of the
whole batch. The ratios are served tokens per second by that: 1 means that the services cost nothing. The
bench also states how much of a core each service uses.
"""

import argparse
import queue
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from protos.steps import Admission, Decode, Prefill, StepPlan
from tests.bench.support.gpu_model import (
    BLOCK,
    SERVED_NAME,
    VOCAB_SIZE,
    model_folder,
    open_worker,
    serving,
)
from tests.bench.support.http_load import Load, tokens_per_second
from tests.bench.support.report import report
from tests.support.sampling_params import sampling_params
from worker_svc.execution.worker import Worker

REQUESTS = (16, 64, 128)
PROMPT, OUTPUT, MAX_LEN = 512, 128, 1024
_SERVICES = ("gateway", "scheduler", "worker")
_WARM_UP_S = 5.0
# Client processes import for seconds before they start.
_CLIENTS_START_S = 120.0


@dataclass(frozen=True)
class Costs:
    """What a batch takes in one process."""

    chunk_s: float
    """A prefill chunk of one prompt with its first token, seconds."""
    step_s: float
    """A decode step of the batch half-way through its answers, seconds."""

    def tokens_per_second(self, batch: int) -> float:
        """Returns the output tokens per second if nothing but chunks and full decode steps took time."""
        return OUTPUT / (self.chunk_s + (OUTPUT - 1) * self.step_s / batch)


def in_process(worker: Worker, batch: int, steps: int) -> Costs:
    """Measures a batch's chunks and steps; medians."""
    width = -(-(PROMPT + OUTPUT) // BLOCK)
    chunks, decodes = [], []
    for slot in range(batch):
        known = tuple((7 * slot + position) % 40_000 + 100 for position in range(PROMPT))
        blocks = tuple(range(1 + slot * width, 1 + (slot + 1) * width))
        admission = Admission(slot, known, 0, sampling_params(temperature=0.0), {0: blocks})
        started = time.perf_counter()
        worker.execute(StepPlan(slot + 1, admit=[admission], work=Prefill(slot, 0, PROMPT, sample=True)))
        chunks.append(time.perf_counter() - started)
    first = PROMPT + (OUTPUT - steps) // 2
    for step in range(-first + PROMPT, steps):
        started = time.perf_counter()
        worker.execute(StepPlan(batch + 1, work=Decode(range(batch), [first + step] * batch, batch)))
        if step >= 0:
            decodes.append(time.perf_counter() - started)
    worker.execute(StepPlan(batch + 2, release=range(batch)))
    return Costs(statistics.median(chunks), statistics.median(decodes))


class CoreUse:
    """How much of a core each service uses, from `start` to `stop`."""

    def __init__(self, launcher: int) -> None:
        """Finds the services below the launcher's process id."""
        self._processes = {
            name: [
                child
                for child in psutil.Process(launcher).children(recursive=True)
                if name in child.cmdline()[:5]
            ]
            for name in _SERVICES
        }
        self._before: dict[str, float] = {}
        self._started = 0.0

    def _seconds(self) -> dict[str, float]:
        return {
            name: sum(sum(process.cpu_times()[:2]) for process in processes)
            for name, processes in self._processes.items()
        }

    def start(self) -> None:
        """Begins to count."""
        self._before, self._started = self._seconds(), time.monotonic()

    def stop(self) -> dict[str, float]:
        """Returns the cores in use since `start`, by service."""
        seconds = time.monotonic() - self._started
        return {name: round((now - self._before[name]) / seconds, 2) for name, now in self._seconds().items()}


def through_services(
    folder: Path, batches: Sequence[int], gateways: int, clients: int, seconds: float
) -> tuple[dict[int, float], dict[int, Mapping[str, float]]]:
    """Returns output tokens per second and the cores in use, both by requests at a time."""
    served: dict[int, float] = {}
    cores: dict[int, Mapping[str, float]] = {}
    starts: queue.SimpleQueue[float] = queue.SimpleQueue()
    with serving(folder, batches, MAX_LEN, gateways) as (url, launcher), ThreadPoolExecutor(1) as thread:
        load = Load(url, SERVED_NAME, VOCAB_SIZE, PROMPT, OUTPUT)
        tokens_per_second(load, min(batches), 2.0, 1.0, 1)
        use = CoreUse(launcher)
        for batch in batches:
            running = thread.submit(tokens_per_second, load, batch, _WARM_UP_S, seconds, clients, starts.put)
            start = starts.get(timeout=_CLIENTS_START_S)
            time.sleep(max(0.0, start + _WARM_UP_S - time.monotonic()))
            use.start()
            time.sleep(seconds)
            cores[batch] = use.stop()
            served[batch] = running.result()
    return served, cores


def main() -> None:
    """Prints a table and the line of JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="64 requests at a time, less time")
    parser.add_argument("--gateways", type=int, default=1, help="gateway processes")
    parser.add_argument("--clients", type=int, default=12, help="client processes")
    arguments = parser.parse_args()
    batches: Sequence[int] = (64,) if arguments.quick else REQUESTS
    with tempfile.TemporaryDirectory() as scratch:
        folder = model_folder(Path(scratch))
        worker = open_worker(folder, batches, MAX_LEN)
        inside = {batch: in_process(worker, batch, 60) for batch in batches}
        worker.close()
        del worker
        torch.cuda.empty_cache()
        seconds = 6.0 if arguments.quick else 15.0
        served, cores = through_services(folder, batches, arguments.gateways, arguments.clients, seconds)
    print(
        f"{'requests':>8}{'chunk':>10}{'step':>10}{'in-process':>16}{'served':>16}{'ratio':>8}  cores in use"
    )
    ratios: dict[str, float] = {}
    for batch, costs in inside.items():
        ideal = costs.tokens_per_second(batch)
        ratios[f"served_c{batch}"] = served[batch] / ideal
        use = ", ".join(f"{name} {value:.2f}" for name, value in cores[batch].items())
        print(
            f"{batch:8}{costs.chunk_s * 1e3:8.2f}ms{costs.step_s * 1e3:8.2f}ms{ideal:10,.0f} tok/s"
            f"{served[batch]:10,.0f} tok/s{ratios[f'served_c{batch}']:8.3f}  {use}"
        )
    figures = {
        "gpu": torch.cuda.get_device_name(),
        "gateways": arguments.gateways,
        "chunk_ms": {batch: costs.chunk_s * 1e3 for batch, costs in inside.items()},
        "step_ms": {batch: costs.step_s * 1e3 for batch, costs in inside.items()},
        "served_tok_s": served,
        "cores": cores,
    }
    report("gpu_load", figures, ratios)


if __name__ == "__main__":
    main()
