"""Compares decoding on several ranks with decoding on one.

``python -m tests.bench.ranks [--quick]``: on two GPUs, a model of Llama 3.1 8B's shape with made-up weights,
without and with two tensor-parallel ranks. On CPUs, a small model in float32, also in two stages; that shows
the cost of ranks there rather than a gain. Ranks are processes that run the same steps as behind a scheduler,
without the services around them. The JSON line has tokens per second, and what one all-reduce of a step takes
on a GPU.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

import torch

from tests.bench.support.report import report
from tests.support import tiny_models
from tests.support.ports import free_port

_SHAPE: Final = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128_256, "hidden_size": 4096,
    "intermediate_size": 14_336, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "head_dim": 128, "max_position_embeddings": 131_072, "rms_norm_eps": 1e-5, "rope_theta": 500_000.0,
    "tie_word_embeddings": False, "dtype": "bfloat16", "hidden_act": "silu", "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def run(spec: dict[str, Any], settings: dict[str, Any], tensor: int, pipeline: int) -> dict[str, Any]:
    """Runs all ranks of one layout; returns what rank 0 measured."""
    master = f"127.0.0.1:{free_port()}"
    ranks = []
    for rank in range(tensor * pipeline):
        own: dict[str, Any] = {
            "tensor_parallel_size": tensor, "pipeline_parallel_size": pipeline, "rank": rank, **settings
        }  # fmt: skip
        if tensor * pipeline > 1:
            own |= {"master": master, "replica_id": "bench"}
        command = [
            sys.executable,
            "-m",
            "tests.bench.support.rank_steps",
            json.dumps(spec | {"settings": own}),
        ]
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


def main() -> None:
    """Prints a line for each layout and batch, and the line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="two batches")
    quick = parser.parse_args().quick
    on_gpus = torch.cuda.device_count() > 1
    batches = [1, 8] if quick else [1, 8, 32, 128] if on_gpus else [1, 8, 32]
    spec = {"batches": batches, "context": 200, "steps": 60, "max_model_len": 512, "hidden": 4096}
    layouts = [(1, 1), (2, 1)] if on_gpus else [(1, 1), (2, 1), (1, 2)]
    with tempfile.TemporaryDirectory() as scratch:
        if on_gpus:
            folder = Path(scratch) / "model"
            folder.mkdir()
            (folder / "config.json").write_text(json.dumps(_SHAPE))
            (folder / "generation_config.json").write_text('{"eos_token_id": 2}')
            spec |= {"chunk": 512, "block": 128}
            settings = {"model": str(folder), "device": "cuda", "load_format": "dummy", "kv_memory": 16}
        else:
            folder = tiny_models.write("llama", Path(scratch) / "model")
            spec |= {"chunk": 128, "block": 128}
            settings = {
                "model": str(folder),
                "device": "cpu",
                "dtype": "float32",
                "cpu_threads": 1,
                "compile_cache": False,
            }
        measured = {layout: run(spec, settings, *layout) for layout in layouts}
    figures: dict[str, Any] = {"gpu": measured[1, 1]["gpu"]}
    ratios: dict[str, float] = {}
    for (tensor, pipeline), result in measured.items():
        name = f"tp{tensor}_pp{pipeline}"
        figures[name] = result["tokens_per_s"]
        if result["all_reduce_us"]:
            figures[f"{name}_all_reduce_us"] = result["all_reduce_us"]
        for batch, rate in result["tokens_per_s"].items():
            ratios[f"{name}_b{batch}"] = rate / measured[1, 1]["tokens_per_s"][batch]
            print(f"{name} batch {batch}: {rate:.0f} tokens/s, {ratios[f'{name}_b{batch}']:.2f} of one rank")
    report("ranks", figures, ratios)


if __name__ == "__main__":
    main()
