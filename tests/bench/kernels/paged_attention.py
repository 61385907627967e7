"""Compares attention on a GPU with the time that its memory needs to read keys and values, in the same run.

``python -m tests.bench.kernels.paged_attention [--quick]`` needs a GPU. It uses layers like those of Llama
3.2 1B in bfloat16: decode steps of 1, 8, 32 and 128 rows with 200 and 2,000 tokens of context, and chunks of
512 tokens behind 0 and 1,536 tokens. A CUDA graph runs many layers, each with its own KV cache, so that no
layer finds its KV in the GPU's cache.

For decode steps, ``ratios`` has the share of the memory's bandwidth (measured by a copy) that the step
reaches; writing, reading and combining all count. For chunks it has the TFLOP/s of the matrix products.
"""

import argparse
import statistics
from collections.abc import Callable

import torch

from tests.bench.support.report import report
from worker_svc.devices.attention import AttentionCall, AttentionParams, PagedInput
from worker_svc.devices.cuda.device import CudaDevice
from worker_svc.shapes.geometry import AttentionLayer, KvGroup

SHAPE = AttentionParams(32, 8, 64, 0.125, 0, 0.0, writes=True)
GROUP = KvGroup(0, (AttentionLayer("a", 32, 8, 64, 0, torch.bfloat16),))
BLOCK, MAX_MODEL_LEN, CHUNK = 128, 4096, 512
TOKEN_BYTES = 2 * 8 * 64 * 2


def seconds(graph: torch.cuda.CUDAGraph, repeats: int) -> float:
    """Returns the median seconds of a replay."""
    graph.replay()
    times = []
    for _ in range(repeats):
        start, end = (torch.Event("cuda", enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times)


def captured(run: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """Captures a graph of `run`, after one run that compiles."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


def bandwidth(repeats: int) -> float:
    """Returns the bytes per second that a copy reads and writes together."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)

    def run() -> None:
        target.copy_(source)

    return 2 * source.nbytes / seconds(captured(run), repeats)


def layer_seconds(rows: int, context: int, query_len: int, repeats: int) -> float:
    """Returns the seconds of one layer's attention; each row has `context` tokens before its query."""
    device = CudaDevice()
    length = context + query_len
    held = -(-length // BLOCK)
    tables = torch.zeros((rows, MAX_MODEL_LEN // BLOCK), dtype=torch.int32)
    tables[:, :held] = 1 + torch.randperm(rows * held).view(rows, held)
    at = torch.arange(context, length)
    slots = tables[:, at // BLOCK].long() * BLOCK + at % BLOCK
    step = PagedInput(
        torch.full((rows,), length, dtype=torch.int32).cuda(),
        (torch.arange(rows + 1, dtype=torch.int32) * query_len).cuda(),
        tables.cuda(), slots.view(-1).cuda(), rows * query_len,
    )  # fmt: skip
    plan = device.plan(GROUP, BLOCK, step)
    shape = device.cache_shape(GROUP, 1 + rows * held, BLOCK)
    layers = max(2, min(64, (1 << 28) // (rows * length * TOKEN_BYTES)))
    caches = [torch.randn(shape, dtype=torch.bfloat16, device="cuda") for _ in range(layers)]
    states = torch.randn((rows * query_len, 48, 64), dtype=torch.bfloat16, device="cuda")
    query, key, value = torch.split(states, [32, 8, 8], dim=1)
    output = torch.empty_like(query)

    def run() -> None:
        for cache in caches:
            device.attend(AttentionCall(SHAPE, query, key, value, cache, output), plan)

    return seconds(captured(run), repeats) / layers


def main() -> None:
    """Prints a line for each kind of step, then the line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few repeats")
    repeats = 5 if parser.parse_args().quick else 50
    limit = bandwidth(repeats)
    print(f"{torch.cuda.get_device_name()}: a copy moves {limit / 1e9:.0f} GB/s")
    figures: dict[str, object] = {"gpu": torch.cuda.get_device_name(), "gb_s": round(limit / 1e9)}
    ratios = {}
    for rows in (1, 8, 32, 128):
        for context in (200, 2000):
            took = layer_seconds(rows, context, 1, repeats)
            ratio = rows * (context + 1) * TOKEN_BYTES / limit / took
            print(
                f"decode {rows:4} rows, {context:5} tokens: {took * 1e6:7.1f} us a layer, {ratio:.2f} of the bandwidth"
            )
            figures[f"us_{rows}_{context}"], ratios[f"decode_{rows}_{context}"] = round(took * 1e6, 2), ratio
    for context in (0, 1536):
        took = layer_seconds(1, context, CHUNK, repeats)
        products = 4 * SHAPE.num_heads * SHAPE.head_size * CHUNK * (context + (CHUNK + 1) / 2)
        print(
            f"chunk of {CHUNK} behind {context:5} tokens: {took * 1e6:7.1f} us a layer, {products / took / 1e12:.0f} TFLOP/s"
        )
        figures[f"us_chunk_{context}"] = round(took * 1e6, 2)
        ratios[f"tflop_s_chunk_{context}"] = products / took / 1e12
    report("paged_attention", figures, ratios)


if __name__ == "__main__":
    main()
