"""Generates with models on device rbln, in its own process: vLLM has one platform a process.

The argument is a JSON array of `Job`. The output is a JSON array of `Result`.
"""

import dataclasses
import json
import sys
from pathlib import Path
from typing import Literal

from protos.steps import GroupKind
from tests.support.worker.harness import Harness, load, tokens_of
from worker_svc.devices.rbln.device import RblnDevice
from worker_svc.devices.registry import DeviceOptions


@dataclasses.dataclass(frozen=True)
class Job:
    """One model to generate with."""

    folder: str
    """The model's folder."""
    prompts: list[list[int]]
    """Token ids of each prompt."""
    num_tokens: int
    """Tokens to generate for each prompt."""
    triton: bool
    """Whether to use the Triton kernels."""
    block_size: int
    """Tokens of a block."""
    max_model_len: int
    """Tokens of the longest sequence."""
    backend: Literal["rbln", "rbln-check"] = "rbln-check"
    """The compiler of graphs. The vendor's is a fake; see `vendor_packages`."""


@dataclasses.dataclass(frozen=True)
class Result:
    """What one job generated, and how."""

    tokens: list[list[int]]
    """Generated tokens of each prompt."""
    operators: list[str]
    """Operators of the attention namespaces in all graphs."""
    cache_devices: list[str]
    """Types of the devices that hold the caches."""
    graphs: int
    """Number of graphs."""


def run(job: Job) -> Result:
    """Loads the model and generates."""
    options = DeviceOptions(job.backend, rbln_use_custom_kernel=job.triton, rbln_moe_use_opt_kernel=False)
    device = RblnDevice(options)
    device.check_available()
    model = load(Path(job.folder), "float32", device=device)
    harness = Harness(
        model, max_model_len=job.max_model_len, max_num_seqs=2, block_size=job.block_size,
        decode_buckets=(3,), device=device, window_kind=GroupKind.IN_PLACE_WINDOW,
    )  # fmt: skip
    caches = harness.runner.cache.by_layer().values()
    tokens = [tokens_of(outputs) for outputs in harness.generate(job.prompts, job.num_tokens)]
    operators = {
        str(node.target)
        for graph in device.backend.graphs
        for node in graph.graph.nodes
        if "rbln_" in str(node.target)
    }
    return Result(
        tokens,
        sorted(operators),
        sorted({cache.device.type for cache in caches}),
        len(device.backend.graphs),
    )


def main() -> None:
    """Runs the jobs of the first argument and prints their results."""
    results = [run(Job(**job)) for job in json.loads(sys.argv[1])]
    print(json.dumps([dataclasses.asdict(result) for result in results]))


if __name__ == "__main__":
    main()
