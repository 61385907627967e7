"""Generates with models on device rbln, in its own process: vLLM has one platform a process.

The argument is a JSON array of `Job`. The output is a JSON array of `Result`.
"""

import dataclasses
import importlib
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import fx

from protos.steps import GroupKind
from tests.support.worker.harness import Harness, load, tokens_of
from worker_svc.devices.rbln.check_backend import CheckBackend, MetaMemory, trace
from worker_svc.devices.rbln.device import RblnDevice
from worker_svc.devices.rbln.vendor import TRITON_MODULES
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
    exports: bool = False
    """Whether to export graphs, with the vendor's declarations of Triton operators; for `rbln-check`."""
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
    exported: list[str]
    """Operators of the attention namespaces in exported programs."""
    written: list[str]
    """Inputs and buffers that functional forms of these programs return instead of writing them."""


class ExportingBackend(CheckBackend):
    """Also exports each graph, as the vendor's compiler does, and holds the program to the same rules."""

    def __init__(self, memory: MetaMemory) -> None:
        """Starts empty."""
        super().__init__(memory)
        self.exported: set[str] = set()
        self.written: set[str] = set()

    def __call__(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """Exports a graph.

        Raises:
            NotLowered: names what is dynamic or not on the list.
        """
        program = torch.export.export(module, tuple(inputs))
        signature = program.graph_signature
        assert not {**signature.buffers_to_mutate, **signature.user_inputs_to_mutate}
        for node in [*program.graph.nodes]:
            if node.target is torch.ops.aten._assert_tensor_metadata.default:  # the exporter's own
                program.graph.erase_node(node)
        program.graph_module.recompile()
        graph = trace(program.module(check_guards=False), inputs)
        self.exported |= {str(node.target) for node in graph.graph.nodes if "rbln_" in str(node.target)}
        functional = program.run_decompositions({}).graph_signature
        self.written |= {*functional.buffers_to_mutate.values(), *functional.user_inputs_to_mutate.values()}
        return super().__call__(module, inputs)


def run(job: Job) -> Result:
    """Loads the model and generates."""
    options = DeviceOptions(job.backend, rbln_use_custom_kernel=job.triton, rbln_moe_use_opt_kernel=False)
    device = RblnDevice(options)
    if job.exports:
        for name in TRITON_MODULES:
            importlib.import_module(name)
        device.backend = ExportingBackend(device.memory)
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
        sorted(getattr(device.backend, "exported", ())),
        sorted(getattr(device.backend, "written", ())),
    )


def main() -> None:
    """Runs the jobs of the first argument and prints their results."""
    results = [run(Job(**job)) for job in json.loads(sys.argv[1])]
    print(json.dumps([dataclasses.asdict(result) for result in results]))


if __name__ == "__main__":
    main()
