"""Compares decoding on several ranks with decoding on one.

``python -m tests.bench.ranks [--quick] [--no-services]``: on two GPUs or more, with made-up bfloat16 weights:
Llama 3.1 8B's shape on one rank, on two tensor-parallel ranks and in two stages, and eight layers of Mixtral
8x7B's shape on one rank and with its experts on two. On CPUs, small models of these families in float32; that
shows what ranks cost there rather than a gain.

Each layout runs behind the services. A batch is requested at once and streamed, and a step is the time in
which every stream gets a token while all of them run. The dense layouts also run without services, as
processes that get the same plans; the floor of a step there is the time to read a rank's weights, and on GPUs
the time of its all-reduces.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from tests.bench.support.contenders import launched
from tests.bench.support.gpu_model import memory_bandwidth, model_folder
from tests.bench.support.http_load import Load, step_seconds
from tests.bench.support.report import parser, report
from tests.support.ports import free_port

_CONTEXT: Final = 200
_LLAMA: Final[Mapping[str, Any]] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128_256, "hidden_size": 4096,
    "intermediate_size": 14_336, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "head_dim": 128, "max_position_embeddings": 131_072, "rms_norm_eps": 1e-5, "rope_theta": 500_000.0,
    "tie_word_embeddings": False, "dtype": "bfloat16", "hidden_act": "silu", "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_MIXTRAL: Final = {
    **_LLAMA, "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "vocab_size": 32_000,
    "num_hidden_layers": 8, "num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": None,
}  # fmt: skip
_SMALL: Final[Mapping[str, Any]] = {
    "vocab_size": 2000, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 32, "max_position_embeddings": 2048, "dtype": "float32",
}  # fmt: skip


@dataclass(frozen=True)
class Layout:
    """How ranks split a model."""

    model: str
    tensor: int = 1
    pipeline: int = 1
    experts: bool = False

    @property
    def name(self) -> str:
        """For the table and the line of JSON."""
        split = "_".join(
            f"{kind}{size}"
            for kind, size in (("ep" if self.experts else "tp", self.tensor), ("pp", self.pipeline))
            if size > 1
        )
        return f"{self.model}_{split or 'one'}"


LAYOUTS: Final = (
    Layout("llama"),
    Layout("llama", tensor=2),
    Layout("llama", pipeline=2),
    Layout("mixtral"),
    Layout("mixtral", tensor=2, experts=True),
)


@dataclass(frozen=True)
class Setup:
    """What all layouts have in common."""

    on_gpus: bool
    batches: tuple[int, ...]
    folders: Mapping[str, Path]
    """By model."""
    chunk: int
    block: int


def served(setup: Setup, layout: Layout, together: int) -> dict[int, float]:
    """Returns the tokens per second of each batch through the services."""
    most = max(setup.batches)
    buckets = sorted({max(batch // layout.pipeline, 1) for batch in setup.batches})
    device = ("--device", "cuda", "--kv-memory", "16") if setup.on_gpus else ("--device", "cpu", "-O", "1")
    flags = [
        "--model", str(setup.folders[layout.model]), "--load-format", "dummy", "--served-model-name", "bench",
        "--max-model-len", "2048", "--max-num-batched-tokens", str(setup.chunk), "--block-size", str(setup.block),
        "--max-num-seqs", str(most), "--decode-bucket-strategy", "manual", "--decode-buckets", ",".join(map(str, buckets)),
        "--tensor-parallel-size", str(layout.tensor), "--pipeline-parallel-size", str(layout.pipeline), *device,
        *(("--enable-expert-parallel",) if layout.experts else ()),
    ]  # fmt: skip
    rates = {}
    with tempfile.TemporaryDirectory() as run_dir, launched(*flags, "--run-dir", run_dir) as url:
        for batch in setup.batches:
            # A step runs between two prompts' chunks, so this leaves `together` steps with all requests.
            load = Load(url, "bench", _SMALL["vocab_size"], _CONTEXT, 2 * batch + together)
            clients = min(12, len(os.sched_getaffinity(0)))
            rates[batch] = batch / step_seconds(load, batch, clients)
    return rates


def without_services(setup: Setup, layout: Layout) -> dict[str, Any]:
    """Runs all ranks of a layout with the same plans; returns what rank 0 measured."""
    spec = {
        "batches": setup.batches, "context": _CONTEXT, "steps": 60, "max_model_len": 512, "chunk": setup.chunk,
        "block": setup.block, "hidden": _LLAMA["hidden_size"],
    }  # fmt: skip
    settings: dict[str, Any] = {
        "model": str(setup.folders[layout.model]), "load_format": "dummy", "tensor_parallel_size": layout.tensor,
        "pipeline_parallel_size": layout.pipeline,
    }  # fmt: skip
    if setup.on_gpus:
        settings |= {"device": "cuda", "kv_memory": 16}
    else:
        settings |= {"device": "cpu", "cpu_threads": 1, "compile_cache": False}
    if layout.tensor * layout.pipeline > 1:
        settings |= {"master": f"127.0.0.1:{free_port()}", "replica_id": "bench"}
    ranks = []
    for rank in range(layout.tensor * layout.pipeline):
        specification = json.dumps({**spec, "settings": {**settings, "rank": rank}})
        command = [sys.executable, "-m", "tests.bench.support.rank_steps", specification]
        output = subprocess.PIPE if rank == 0 else subprocess.DEVNULL
        ranks.append(subprocess.Popen(command, stdout=output))
    try:
        output_of_first, _ = ranks[0].communicate(timeout=600)
        measured: dict[str, Any] = json.loads(output_of_first.splitlines()[-1])
        return measured
    finally:
        for process in ranks:
            process.kill()
            process.wait()


def floor_seconds(measured: Mapping[str, Any], batch: int, speed: float, layers: int) -> float:
    """Returns the least time of a step: reading the weights of a rank, and its all-reduces."""
    reduced = measured["all_reduce_us"].get(str(batch), 0.0) * (2 * layers + 1) / 1e6
    return float(measured["weight_bytes"] / speed + reduced)


def make_setup(scratch: Path, *, quick: bool) -> Setup:
    """Writes the models' folders."""
    on_gpus = torch.cuda.device_count() > 1
    shapes = {"llama": _LLAMA, "mixtral": _MIXTRAL}
    folders = {
        name: model_folder(scratch / name, shape if on_gpus else {**shape, **_SMALL})
        for name, shape in shapes.items()
    }
    batches = (1, 8) if quick else (1, 8, 32, 64, 128) if on_gpus else (1, 8, 32)
    return Setup(on_gpus, batches, folders, *((512, 128) if on_gpus else (128, 128)))


def main() -> None:
    """Prints a line for each layout and batch, and the line of JSON."""
    options = parser(__doc__, "two batches, fewer steps")
    options.add_argument("--no-services", action="store_true", help="measure without the services only")
    arguments = options.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        setup = make_setup(Path(scratch), quick=arguments.quick)
        dense = [layout for layout in LAYOUTS if layout.model == "llama"]
        alone = {layout.name: without_services(setup, layout) for layout in dense}
        layouts = () if arguments.no_services else LAYOUTS
        together = 30 if arguments.quick else 100
        rates = {layout.name: served(setup, layout, together) for layout in layouts}
    figures: dict[str, Any] = {"device": alone["llama_one"]["device"], "served_tokens_per_s": rates}
    ratios = ratios_of(rates, "served")
    steps = {
        name: {int(key): rate for key, rate in each["tokens_per_s"].items()} for name, each in alone.items()
    }
    ratios |= ratios_of(steps, "steps")
    speed = memory_bandwidth("cuda" if setup.on_gpus else "cpu", 6)
    layers = int((_LLAMA if setup.on_gpus else _SMALL)["num_hidden_layers"])
    for name, each in alone.items():
        floors = {batch: floor_seconds(each, batch, speed, layers) for batch in setup.batches}
        figures[name] = {
            "tokens_per_s": steps[name],
            "floor_s": floors,
            "all_reduce_us": each["all_reduce_us"],
        }
        for batch, floor in floors.items():
            ratios[f"floor_over_step_{name}_b{batch}"] = floor * steps[name][batch] / batch
    report("ranks", figures, ratios)


def ratios_of(rates: Mapping[str, Mapping[int, float]], kind: str) -> dict[str, float]:
    """Prints tokens per second, and returns how much faster each layout is than one rank."""
    ratios = {}
    for name, by_batch in rates.items():
        one = rates[f"{name.partition('_')[0]}_one"]
        for batch, rate in by_batch.items():
            ratios[f"{kind}_{name}_b{batch}"] = rate / one[batch]
            print(f"{kind} {name} batch {batch}: {rate:.0f} tokens/s, {rate / one[batch]:.2f} of one rank")
    return ratios


if __name__ == "__main__":
    main()
