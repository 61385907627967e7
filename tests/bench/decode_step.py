"""Splits the time of a step into its parts, and compares the step with the least time that memory allows.

``python -m tests.bench.decode_step [--quick] [--model smollm2|gemma3-270m] [--backend compiled|eager]
[--device cpu|cuda]`` runs one model in bfloat16 in this process, without a scheduler, on all cores and pinned
to none. It times each decode bucket with all rows in use, and a prefill chunk. Within a step it times linear
layers (including the output head), attention, other kernels and sampling; overhead is the rest.

The floor is the time in which memory can deliver what a step must read: the weights once, and the keys and
values of every row's context. Memory bandwidth is measured in the same run.
"""

import argparse
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from safetensors import safe_open

from protos.steps import Prefill
from tests.bench.support.gpu_model import memory_bandwidth
from tests.bench.support.report import exit_code, parser, report
from tests.bench.support.step_parts import StepParts, TimedModel, time_kernels
from tests.support.worker.harness import Harness, random_prompt
from worker_svc.devices import open_device
from worker_svc.model_files.loader import fetch
from worker_svc.shapes import AttentionLayer
from worker_svc.vllm_adapter import startup

BUCKETS: Final = (1, 8, 16, 32)
CHUNK: Final = 128
MAX_MODEL_LEN: Final = 1024
_COLUMNS: Final = ("step", "linear", "attention", "other", "sampling", "overhead", "floor")
_WARM_UP_STEPS: Final = 3


@dataclass(frozen=True)
class Measured:
    """Medians of one kind of step, milliseconds."""

    columns: Mapping[str, float]
    operators: Mapping[str, float]
    """Kernels by operator, the slowest first."""


@dataclass(frozen=True)
class Floor:
    """Bytes that a step must read, and the speed of memory."""

    bytes_per_s: float
    weights: int
    """Bytes that every step reads."""
    layers: tuple[AttentionLayer, ...]

    def milliseconds(self, lengths: Iterable[int]) -> float:
        """Returns the least time of a step, given the number of tokens in each row."""
        seen = [(layer, length) for length in lengths for layer in self.layers]
        keys_and_values = sum(
            layer.bytes_per_token * min(length, layer.window or length) for layer, length in seen
        )
        return 1000 * (self.weights + keys_and_values) / self.bytes_per_s


class StepBench:
    """Runs steps of one model, whole and in parts."""

    def __init__(self, model: TimedModel, harness: Harness, floor: Floor, repetitions: int) -> None:
        """Prepares to run a model."""
        self._model, self._harness, self._floor = model, harness, floor
        self._repetitions = repetitions

    def decode(self, bucket: int) -> Measured:
        """Measures a decode step of `bucket` rows; each row has a prompt of one chunk."""
        slots = range(bucket)
        for slot in slots:
            self._harness.prefill(slot, random_prompt(slot, CHUNK))

        def step() -> list[int]:
            self._harness.decode(slots, bucket)
            return [self._harness.lengths[slot] for slot in slots]

        measured = self._measure(step, lambda: None, lambda: None)
        self._harness.release(slots)
        return measured

    def prefill(self) -> Measured:
        """Measures the prefill of one chunk; admission and release do not count."""
        work = Prefill(0, 0, CHUNK, sample=True)

        def admit() -> None:
            self._harness.run(admit=[self._harness.admit(0, random_prompt(0, CHUNK))])

        def step() -> list[int]:
            self._harness.run(work=work)
            return [CHUNK]

        return self._measure(step, admit, lambda: self._harness.release((0,)))

    def _note(self, parts: StepParts | None) -> None:
        """Turns the kernel clocks of the model and its graphs on or off."""
        self._model.parts = parts
        time_kernels(parts, self._model.synchronize)

    def _measure(
        self, step: Callable[[], list[int]], before: Callable[[], None], after: Callable[[], None]
    ) -> Measured:
        """Repeats `step`, which returns the tokens of each row, in turn with and without kernel clocks."""
        whole: list[float] = []
        floors: list[float] = []
        parts: list[StepParts] = []
        sampling: list[float] = []
        for index in range(-_WARM_UP_STEPS, 2 * self._repetitions):
            self._note(StepParts() if index % 2 else None)
            before()
            started = time.perf_counter()
            lengths = step()
            ended = time.perf_counter()
            after()
            if index < 0:
                continue
            if self._model.parts is None:
                whole.append(ended - started)
                floors.append(self._floor.milliseconds(lengths))
            else:
                parts.append(self._model.parts)
                sampling.append(ended - self._model.parts.logits_at)
        self._note(None)
        columns = {
            "step": _median_ms(whole),
            "linear": _median_ms(each.linear for each in parts),
            "attention": _median_ms(each.attention for each in parts),
            "other": _median_ms(each.other for each in parts),
            "sampling": _median_ms(sampling),
        }
        columns["overhead"] = 2 * columns["step"] - sum(columns.values())
        columns["floor"] = statistics.median(floors)
        operators = {
            name: _median_ms(each.by_operator[name] for each in parts) for name in parts[0].by_operator
        }
        longest_first = sorted(operators.items(), key=lambda item: -item[1])
        return Measured(columns, dict(longest_first))


def _median_ms(seconds: Iterable[float]) -> float:
    return 1000 * statistics.median(seconds)


def weight_bytes(folder: Path, dtype: torch.dtype) -> int:
    """Returns the bytes of weights, in `dtype`, that every step of a dense model reads.

    These are all weights except an untied input embedding.
    """
    elements: dict[str, int] = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            elements.update({name: math.prod(file.get_slice(name).get_shape()) for name in file.keys()})  # noqa: SIM118 - no mapping
    if "lm_head.weight" in elements:
        elements.pop("model.embed_tokens.weight")
    return sum(elements.values()) * dtype.itemsize


def _bench(arguments: argparse.Namespace) -> None:
    quick: bool = arguments.quick
    device = open_device(arguments.device)
    folder = fetch(arguments.model)
    startup.prepare(device.name)
    model = TimedModel(folder, device, dtype="bfloat16", seed=0)
    model.load_weights()
    buckets = (1, 32) if quick else BUCKETS
    harness = Harness(
        model, max_model_len=MAX_MODEL_LEN, max_num_seqs=max(buckets), chunk=CHUNK, decode_buckets=buckets,
        device=device, backend=arguments.backend,
    )  # fmt: skip
    bytes_per_s = memory_bandwidth(device.torch_device, 5 if quick else 15)
    floor = Floor(bytes_per_s, weight_bytes(folder, torch.bfloat16), model.description.layers)
    bench = StepBench(model, harness, floor, 8 if quick else 60)
    print(
        f"{arguments.model}, {arguments.backend}, {device.product_name()}; memory {bytes_per_s / 1e9:.1f} GB/s,"
        f" weights {floor.weights / 1e6:.0f} MB; medians, ms"
    )
    print(f"{'':<14}" + "".join(f"{name:>11}" for name in (*_COLUMNS, "step/floor")))
    measured: dict[str, Measured] = {}
    for bucket in (*buckets, None):
        name = f"prefill_{CHUNK}" if bucket is None else f"decode_{bucket}"
        measured[name] = result = bench.prefill() if bucket is None else bench.decode(bucket)
        values = [f"{result.columns[column]:>11.2f}" for column in _COLUMNS]
        print(f"{name:<14}" + "".join(values) + f"{result.columns['step'] / result.columns['floor']:>11.2f}")
    figures = {
        "model": arguments.model,
        "backend": arguments.backend,
        "device": device.product_name(),
        "memory_gb_per_s": round(bytes_per_s / 1e9, 2),
        "weights_mb": round(floor.weights / 1e6, 1),
        "steps_ms": {name: _rounded(each.columns) for name, each in measured.items()},
        "operators_ms": {name: _rounded(each.operators) for name, each in measured.items()},
    }
    # A chunk is bound by its matrix products, not by memory, so it has no ratio.
    ratios = {
        name: each.columns["step"] / each.columns["floor"]
        for name, each in measured.items()
        if name.startswith("decode")
    }
    report("decode_step", figures, ratios)


def _rounded(columns: Mapping[str, float]) -> dict[str, float]:
    return {name: round(value, 3) for name, value in columns.items()}


def main() -> int:
    """Prints a table and the line of JSON; returns the exit code."""
    options = parser(__doc__, "two buckets, few steps")
    options.add_argument("--model", choices=("smollm2", "gemma3-270m"), default="smollm2")
    options.add_argument("--backend", choices=("compiled", "eager"), default="compiled")
    options.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    return exit_code("decode_step", lambda: _bench(options.parse_args()))


if __name__ == "__main__":
    sys.exit(main())
