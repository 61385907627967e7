"""Compares decode steps of a 1B model on a GPU with the time that memory needs.

``python -m tests.bench.gpu.decode [--quick] [--no-services] [--gateways N]`` needs a CUDA GPU. The model has
the shape of Llama 3.2 1B and made-up weights. For each batch (1, 8, 32, 128) and context (200 and 2,000
tokens) the bench measures the median time of a decode step, from the plan to the tokens on the host. The
floor is the time to read the weights and the batch's keys and values at this GPU's measured bandwidth.

Steps run in this process and then through the services. There the same batch is requested over HTTP by
several client processes and streamed; a step is the time in which every stream gets a token while all of them
run. By then the contexts are longer, by the steps that ran while other prompts were prefilled.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from protos.steps import Admission, Decode, Prefill, StepPlan
from tests.bench.support.gpu_model import (
    BLOCK,
    CHUNK,
    SERVED_NAME,
    VOCAB_SIZE,
    model_folder,
    open_worker,
    serving,
)
from tests.bench.support.http_load import Load, step_seconds
from tests.bench.support.report import report
from tests.support.sampling_params import sampling_params

BATCHES, CONTEXTS = (1, 8, 32, 128), (200, 2000)
MAX_LEN = 3072
CLIENTS = 12
WEIGHT_BYTES = 2 * 1_235_814_400
KV_BYTES_PER_TOKEN = 2 * 2 * 16 * 8 * 64


def bandwidth() -> float:
    """Returns the bytes per second that a sum over 4 GiB reads, the best of several runs."""
    data = torch.ones(1 << 31, dtype=torch.bfloat16, device="cuda")
    best = 0.0
    for _ in range(8):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        data.sum(dtype=torch.float32)
        end.record()
        torch.cuda.synchronize()
        best = max(best, data.nbytes / start.elapsed_time(end) * 1e3)
    return best


def in_process(folder: Path, batches: Sequence[int], contexts: Sequence[int], steps: int) -> dict[str, float]:
    """Returns median milliseconds per decode step, by ``b<batch>_c<context>``."""
    worker = open_worker(folder, batches, MAX_LEN)
    times: dict[str, float] = {}
    number = 0
    for batch in batches:
        for context in contexts:
            width = -(-(context + steps + 1) // BLOCK)
            known = tuple(range(100, 100 + context))
            for slot in range(batch):
                ids = range(1 + slot * width, 1 + (slot + 1) * width)
                admission = Admission(
                    slot, known, context - 1, sampling_params(temperature=0.0), {0: tuple(ids)}
                )
                worker.execute(
                    StepPlan(
                        number := number + 1, admit=[admission], work=Prefill(slot, context - 1, 1, True)
                    )
                )
            taken = []
            for step in range(steps):
                plan = StepPlan(
                    number := number + 1, work=Decode(range(batch), [context + step] * batch, batch)
                )
                started = time.perf_counter()
                worker.execute(plan)
                taken.append(time.perf_counter() - started)
            times[f"b{batch}_c{context}"] = statistics.median(taken[2:]) * 1e3
            worker.execute(StepPlan(number := number + 1, release=list(range(batch))))
    return times


def through_services(
    folder: Path, batches: Sequence[int], contexts: Sequence[int], together: int, gateways: int
) -> dict[str, float]:
    """Returns the same as ``in_process``, measured through gateways, scheduler and worker."""
    with serving(folder, batches, MAX_LEN, gateways) as (base, _):
        served = {}
        for batch in batches:
            for context in contexts:
                # One decode step runs between two chunks, so this leaves `together` steps with all requests.
                count = batch * -(-context // CHUNK) + together
                load = Load(base, SERVED_NAME, VOCAB_SIZE, context, count)
                served[f"b{batch}_c{context}"] = step_seconds(load, batch, CLIENTS) * 1e3
                print(
                    f"b{batch}_c{context}: {served[f'b{batch}_c{context}']:.2f} ms a step served", flush=True
                )
        return served


def main() -> None:
    """Prints a table and the line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="two batches, fewer steps")
    parser.add_argument("--no-services", action="store_true", help="measure only in this process")
    parser.add_argument("--gateways", type=int, default=1, help="gateway processes")
    arguments = parser.parse_args()
    batches: Sequence[int] = (1, 32) if arguments.quick else BATCHES
    with tempfile.TemporaryDirectory() as scratch:
        folder = model_folder(Path(scratch))
        speed = bandwidth()
        torch.cuda.empty_cache()
        inside = in_process(folder, batches, CONTEXTS, 20 if arguments.quick else 60)
        floors = {
            f"b{batch}_c{context}": (WEIGHT_BYTES + batch * context * KV_BYTES_PER_TOKEN) / speed * 1e3
            for batch in batches
            for context in CONTEXTS
        }
        for name, step in inside.items():
            print(f"{name}: {step:.2f} ms a step in-process, floor {floors[name]:.2f} ms", flush=True)
        torch.cuda.empty_cache()
        outside: dict[str, float] = {}
        if not arguments.no_services:
            together = 40 if arguments.quick else 120
            outside = through_services(folder, batches, CONTEXTS, together, arguments.gateways)
    print(f"{'':12}{'floor':>10}{'step':>10}{'floor/step':>12}{'served':>10}{'served/step':>12}")
    ratios: dict[str, float] = {}
    for name, step in inside.items():
        ratios[f"floor_over_step_{name}"] = floors[name] / step
        line = f"{name:12}{floors[name]:8.2f}ms{step:8.2f}ms{floors[name] / step:12.2f}"
        if name in outside:
            ratios[f"served_over_step_{name}"] = outside[name] / step
            line += f"{outside[name]:8.2f}ms{outside[name] / step:12.2f}"
        print(line)
    figures: dict[str, Any] = {
        "gpu": torch.cuda.get_device_name(), "gateways": arguments.gateways, "bandwidth_tb_s": round(speed / 1e12, 3),
        "step_ms": inside, "floor_ms": floors, "served_ms": outside,
    }  # fmt: skip
    report("gpu_decode", figures, ratios)


if __name__ == "__main__":
    main()
