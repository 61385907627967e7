"""Generates with a model on device rbln with its stand-in backend, and prints what came of it: vLLM serves one platform a process.

Called with a JSON object; see :class:`Job`. Prints one JSON object; see :class:`Result`.
"""

import dataclasses
import json
import sys
import time
from pathlib import Path

from tests.support.worker.harness import Harness, load, tokens_of
from worker_svc.devices import DeviceOptions
from worker_svc.devices.rbln.device import RblnDevice
from worker_svc.plans.geometry import GroupKind


@dataclasses.dataclass(frozen=True)
class Job:
    """What to do."""

    folder: str
    prompts: list[list[int]]
    num_tokens: int
    triton: bool
    block_size: int
    max_model_len: int
    chunk: int = 128
    window_kind: str = "in_place_window"
    poisoned: bool = False


@dataclasses.dataclass(frozen=True)
class Result:
    """What came of it."""

    tokens: list[list[int]]
    operators: list[str]
    """Operators of the attention namespaces in all graphs."""
    cache_devices: list[str]
    graphs: int
    seconds: float


def run(job: Job) -> Result:
    """Loads, generates."""
    started = time.monotonic()
    device = RblnDevice(DeviceOptions("rbln-check", rbln_use_custom_kernel=job.triton))
    device.check_available()
    model = load(Path(job.folder), "float32", device=device)
    harness = Harness(
        model, max_model_len=job.max_model_len, max_num_seqs=2, chunk=job.chunk, block_size=job.block_size,
        decode_buckets=(3,), device=device, window_kind=GroupKind(job.window_kind),
    )  # fmt: skip
    caches = harness.runner.cache.by_layer().values()
    if job.poisoned:
        for cache in caches:
            device.memory.resolve(cache).fill_(float("nan"))
    tokens = [tokens_of(outputs) for outputs in harness.generate(job.prompts, job.num_tokens)]
    operators = {
        str(node.target)
        for graph in device.backend.graphs
        for node in graph.graph.nodes
        if "rbln" in str(node.target)
    }
    return Result(
        tokens,
        sorted(operators),
        sorted({cache.device.type for cache in caches}),
        len(device.backend.graphs),
        time.monotonic() - started,
    )


def main() -> None:
    """The command."""
    results = [run(Job(**job)) for job in json.loads(sys.argv[1])]
    print(json.dumps([dataclasses.asdict(result) for result in results]))


if __name__ == "__main__":
    main()
