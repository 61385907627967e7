"""Compares decode steps of a 1B model on a GPU with the time that memory needs.

``python -m tests.bench.gpu.decode [--quick] [--no-services] [--gateways N]`` needs a CUDA GPU. The model has
the shape of Llama 3.2 1B and made-up weights. For each batch (1, 8, 32, 128) and context (200 and 2,000
tokens) the bench measures the median time of a decode step, from the plan to the tokens on the host. The
floor is the time to read the weights and the batch's keys and values at this GPU's measured bandwidth.

Steps run in this process and then through the services. There the same batch is requested over HTTP by
several client processes and streamed; a step is the time in which every stream gets a token while all of them
run. By then the contexts are longer, by the steps that ran while other prompts were prefilled.
"""

import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from tests.bench.support.gpu_model import (
    CHUNK,
    SERVED_NAME,
    VOCAB_SIZE,
    Rows,
    memory_bandwidth,
    model_folder,
    open_worker,
    serving,
)
from tests.bench.support.http_load import Load, step_seconds
from tests.bench.support.report import parser, report

BATCHES, CONTEXTS = (1, 8, 32, 128), (200, 2000)
MAX_LEN = 3072
CLIENTS = 12
WEIGHT_BYTES = 2 * 1_235_814_400
KV_BYTES_PER_TOKEN = 2 * 2 * 16 * 8 * 64


def in_process(folder: Path, batches: Sequence[int], contexts: Sequence[int], steps: int) -> dict[str, float]:
    """Returns median milliseconds per decode step, by ``b<batch>_c<context>``."""
    worker = open_worker(folder, batches, MAX_LEN)
    times: dict[str, float] = {}
    for batch in batches:
        for context in contexts:
            taken = Rows(worker, batch, context).run([0] * batch, steps)
            times[f"b{batch}_c{context}"] = statistics.median(taken) * 1e3
    return times


def through_services(
    folder: Path, batches: Sequence[int], contexts: Sequence[int], together: int, gateways: int
) -> dict[str, float]:
    """Returns the same as ``in_process``, measured through gateways, scheduler and worker."""
    with serving(folder, batches, MAX_LEN, gateways) as base:
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
    options = parser(__doc__, "two batches, fewer steps")
    options.add_argument("--no-services", action="store_true", help="measure only in this process")
    options.add_argument("--gateways", type=int, default=1, help="gateway processes")
    arguments = options.parse_args()
    batches: Sequence[int] = (1, 32) if arguments.quick else BATCHES
    with tempfile.TemporaryDirectory() as scratch:
        folder = model_folder(Path(scratch))
        speed = memory_bandwidth("cuda", 8)
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
