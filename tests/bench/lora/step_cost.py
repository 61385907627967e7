"""What LoRA adapters cost a decode step, and what they cost a deployment that runs none.

``python -m tests.bench.lora.step_cost [--quick] [--device cpu|cuda] [--batches 1,8,32]`` runs SmolLM2 in
bfloat16 in this process; on a GPU, a model of Llama 3.2 1B's shape with made-up weights. The adapters have
rank 16 and adapt every linear layer. One worker has no adapters. Another one has them enabled, with four
adapter slots, and decodes the same batch with no adapter, with one for all rows, and with four adapters and
the base model in turn. The modes alternate within the run, and a figure is a median.
"""

import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import save_file

from tests.bench.support.gpu_model import BLOCK, Rows, model_folder
from tests.bench.support.report import parser, report
from worker_svc.execution.worker import Worker
from worker_svc.lora.checkpoint import CONFIG, WEIGHTS
from worker_svc.model_files.loader import fetch
from worker_svc.settings import Settings
from worker_svc.shapes import ShapeConfig

RANK: Final = 16
SLOTS: Final = 4
CONTEXT: Final = 128
MODES: Final = ("off", "idle", "one", "mixed")
"""LoRA not enabled; enabled and unused; one adapter for all rows; four adapters and the base in turn."""


def write_adapter(folder: Path, model: Path, seed: int) -> Path:
    """Saves a random adapter of every linear layer of a model of the Llama kind."""
    config = json.loads((model / "config.json").read_text())
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    head = config.get("head_dim") or hidden // config["num_attention_heads"]
    query, key = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    sizes = {
        "self_attn.q_proj": (hidden, query), "self_attn.k_proj": (hidden, key), "self_attn.v_proj": (hidden, key),
        "self_attn.o_proj": (query, hidden), "mlp.gate_proj": (hidden, inner), "mlp.up_proj": (hidden, inner),
        "mlp.down_proj": (inner, hidden),
    }  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(config["num_hidden_layers"]):
        for name, (inputs, outputs) in sizes.items():
            path = f"base_model.model.model.layers.{layer}.{name}"
            tensors[f"{path}.lora_A.weight"] = torch.randn(RANK, inputs, generator=generator) * inputs**-0.5
            tensors[f"{path}.lora_B.weight"] = torch.randn(outputs, RANK, generator=generator) * 0.02
    folder.mkdir(parents=True)
    save_file(tensors, folder / WEIGHTS)
    (folder / CONFIG).write_text(
        json.dumps({"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "task_type": "CAUSAL_LM"})
    )
    return folder


def open_worker(model: Path, device: str, batches: Sequence[int], *, lora: bool) -> Worker:
    """Returns a configured worker in this process."""
    settings: dict[str, Any] = {"model": str(model), "device": device, "dtype": "bfloat16", "kv_memory": 1}
    if device == "cuda":
        settings |= {"load_format": "dummy", "kv_memory": 4}
    if lora:
        settings |= {"enable_lora": True, "max_loras": SLOTS, "max_lora_rank": RANK}
    worker = Worker(Settings(**settings))
    worker.prepare()
    worker.configure(ShapeConfig(1024, max(batches), 128, BLOCK, tuple(batches)), lambda *_: None)
    return worker


def measure(
    workers: dict[str, Worker], batch: int, rounds: int, steps: int
) -> tuple[dict[str, float], dict[str, float]]:
    """Returns the median milliseconds of each mode's steps, and their ratios to the mode without LoRA.

    A ratio is the median of the ratios of the rounds, in which all modes run one after the other.
    """
    rows = {mode: Rows(worker, batch, CONTEXT) for mode, worker in workers.items()}
    adapters = {
        "off": [0] * batch,
        "idle": [0] * batch,
        "one": [1] * batch,
        "mixed": [(row + 1) % (SLOTS + 1) for row in range(batch)],
    }
    medians: dict[str, list[float]] = {mode: [] for mode in MODES}
    for number in range(rounds + 1):
        order = MODES if number % 2 else MODES[::-1]
        for mode in order:
            taken = rows[mode].run(adapters[mode], steps)
            if number:  # the first round warms up
                medians[mode].append(statistics.median(taken))
    times = {mode: statistics.median(each) * 1e3 for mode, each in medians.items()}
    ratios = {
        mode: statistics.median(one / off for one, off in zip(medians[mode], medians["off"], strict=True))
        for mode in MODES[1:]
    }
    return times, ratios


def main() -> None:
    """Prints a table and the line of JSON."""
    options = parser(__doc__, "batches of 8 only, fewer steps")
    options.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    options.add_argument("--batches", default="1,8,32", help="decode batches")
    arguments = options.parse_args()
    batches = (8,) if arguments.quick else tuple(map(int, arguments.batches.split(",")))
    rounds, steps = (8, 20) if arguments.quick else (24, 40)
    figures: dict[str, float] = {}
    ratios: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as scratch:
        gpu = arguments.device == "cuda"
        model = model_folder(Path(scratch)) if gpu else fetch("smollm2")
        without = open_worker(model, arguments.device, batches, lora=False)
        enabled = open_worker(model, arguments.device, batches, lora=True)
        assert enabled.adapters is not None
        for slot in range(SLOTS):
            folder = write_adapter(Path(scratch) / f"adapter{slot}", model, slot)
            enabled.reserve_adapter(slot + 1, ())
            enabled.adapters.load(slot + 1, folder.name, str(folder))
            started = time.perf_counter()
            enabled.adapters.place(slot + 1)
            figures["place_ms"] = (time.perf_counter() - started) * 1e3
        workers = {mode: without if mode == "off" else enabled for mode in MODES}
        print(f"{'rows':>5}" + "".join(f"{mode:>12}" for mode in MODES) + "  ms a step")
        for batch in batches:
            times, costs = measure(workers, batch, rounds, steps)
            print(f"{batch:5}" + "".join(f"{times[mode]:12.3f}" for mode in MODES), flush=True)
            figures |= {f"{mode}_b{batch}_ms": round(time_ms, 4) for mode, time_ms in times.items()}
            ratios |= {f"{mode}_over_off_b{batch}": ratio for mode, ratio in costs.items()}
    report(f"lora.step_cost {arguments.device}", figures, ratios)


if __name__ == "__main__":
    main()
