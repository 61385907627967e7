"""Measures the cost of sampling, compared with the forward pass before it, and how far seeds replay.

`python -m tests.bench.kernels.sampling [--quick] [--device cpu|cuda]` runs SmolLM2 in bfloat16 in this
process, without a scheduler and on all cores; on a GPU it runs random weights in the shape of Llama 3.2 1B.
It measures decode steps of 32 rows in alternating rounds: greedy, sampled, with filters, with `top_p` alone,
with penalties, with all of these, and with log-probabilities. On a CPU, `forward` is the time until the
logits are computed. The same batch with grammars follows, and the savings of jump-ahead
(`tests/bench/support/constrained.py`).

`--same-tokens` measures instead how often a seeded request draws another token in another batch, or after a
lost worker, in float32 and in bfloat16 (`tests/bench/support/same_tokens.py`).
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import torch

from tests.bench.support.constrained import measured as constrained_measured
from tests.bench.support.constrained import measured_on_words
from tests.bench.support.gpu_model import model_folder
from tests.bench.support.report import exit_code, parser, report
from tests.bench.support.same_tokens import BATCHES, measure_rates
from tests.support.prompts import PROMPTS
from tests.support.sampling_params import sampling_params
from tests.support.worker.harness import Harness, random_prompt
from worker_svc.devices import open_device
from worker_svc.devices.base import Device
from worker_svc.model_files.loader import fetch
from worker_svc.vllm_adapter import startup
from worker_svc.vllm_adapter.configuration import Dtype
from worker_svc.vllm_adapter.model import VllmModel

BATCH: Final = 32
CONTEXT: Final = 256
CHUNK: Final = 128
RANDOM_TEMPERATURE: Final = 0.3
WEIGHT_SCALE: Final = 0.02
MAX_MODEL_LEN: Final = 1024
_WARM_UP_STEPS: Final = 3

FILTERS: Final = {"temperature": 0.8, "top_p": 0.95, "top_k": 50, "min_p": 0.02}
PENALTIES: Final = {"presence_penalty": 0.5, "frequency_penalty": 0.3, "repetition_penalty": 1.1}

Case = Callable[[Harness], None]
"""Admits `BATCH` requests in slots 0, 1, … that are ready to decode."""


class ClockedModel(VllmModel):
    """A model that records when its logits were computed."""

    logits_at = 0.0
    """Time of the last logits, by `time.perf_counter`."""

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See the base class."""
        logits = super().logits(hidden)
        self.logits_at = time.perf_counter()
        return logits


def requests_of(**fields: float) -> Case:
    """Returns a case: requests with these parameters, different seeds and a computed context."""

    def fill(harness: Harness) -> None:
        for slot in range(BATCH):
            sampling = sampling_params(seed=slot, **fields)  # type: ignore[arg-type]
            harness.run(
                admit=[harness.admit(slot, random_prompt(slot, CONTEXT), sampling, computed=CONTEXT - 1)]
            )

    return fill


CASES: dict[str, Case] = {
    "greedy": requests_of(temperature=0.0),
    "temperature": requests_of(temperature=0.8),
    "filters": requests_of(**FILTERS),
    "top_p": requests_of(temperature=0.8, top_p=0.95),
    "penalties": requests_of(temperature=0.0, **PENALTIES),
    "full": requests_of(**FILTERS, **PENALTIES),
    "logprobs": requests_of(temperature=0.0, logprobs=5),
}


def measure(
    model: ClockedModel, harness: Harness, cases: Mapping[str, Case], rounds: int, steps: int
) -> dict[str, dict[str, float]]:
    """Returns the medians of each case in milliseconds: `step`, and `forward` where it can be timed."""
    forward: dict[str, list[float]] = {name: [] for name in cases}
    whole: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(rounds):
        for name, fill in cases.items():
            fill(harness)
            for index in range(-_WARM_UP_STEPS, steps):
                started = time.perf_counter()
                harness.decode(range(BATCH), BATCH)
                ended = time.perf_counter()
                if index >= 0:
                    if model.logits_at > started:  # a captured step does not call logits()
                        forward[name].append(model.logits_at - started)
                    whole[name].append(ended - started)
            harness.release(range(BATCH))
    return {
        name: {
            part: 1000 * statistics.median(times[name])
            for part, times in (("forward", forward), ("step", whole))
            if times[name]
        }
        for name in cases
    }


def _model(device: Device, folder: Path, dtype: Dtype) -> ClockedModel:
    """Loads SmolLM2 for a CPU, or makes up the larger model's weights for a GPU."""
    startup.prepare(device.name)
    model = ClockedModel(folder, device, dtype=dtype, seed=0, dummy_weights=device.name != "cpu")
    model.load_weights()
    return model


@torch.no_grad()
def _spread_weights(model: ClockedModel) -> None:
    """Gives made-up weights the scale of trained ones: the loader's are so small that no rounding shows."""
    dice = torch.Generator(next(model._model.parameters()).device).manual_seed(0)
    for weight in model._model.parameters():
        if weight.dim() == 1:
            weight.fill_(1.0)
        else:
            weight.normal_(0.0, WEIGHT_SCALE, generator=dice)


def _bench(arguments: argparse.Namespace) -> None:
    quick: bool = arguments.quick
    device = open_device(arguments.device)
    with tempfile.TemporaryDirectory() as parent:
        folder = fetch("smollm2") if device.name == "cpu" else model_folder(Path(parent))
        if arguments.same_tokens:
            _measure_rates(device, folder, quick=quick)
        else:
            _measure_all(device, folder, quick=quick)


def _measure_rates(device: Device, folder: Path, *, quick: bool) -> None:
    figures: dict[str, dict[str, float]] = {}
    print("per 1000 tokens: another token, by an inverse CDF; share of answers; difference of logits")
    for dtype in ("float32", "bfloat16"):
        model = _model(device, folder, dtype)
        if device.name != "cpu":
            _spread_weights(model)
        harness = Harness(
            model,
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=BATCH,
            decode_buckets=(1, *BATCHES),
            device=device,
        )
        # The logits of random weights are closer to one another than a trained model's.
        temperature = 0.9 if device.name == "cpu" else RANDOM_TEMPERATURE
        prompts = (
            _text_prompts(folder)
            if device.name == "cpu"
            else [random_prompt(seed, CONTEXT) for seed in range(16)]
        )
        for name, rates in measure_rates(harness, prompts, temperature, quick=quick):
            columns = {
                "race": 1000 * rates.race,
                "inverse": 1000 * rates.inverse,
                "answer": rates.answer,
                "logits": rates.logits,
            }
            figures[f"{dtype}, {name}"] = {key: float(f"{value:.2g}") for key, value in columns.items()}
            print(f"{dtype:<9}{name:<34}" + "".join(f"{value:>12.2g}" for value in columns.values()))
    report("same_tokens", {"device": device.product_name(), "rates": figures}, {})


def _text_prompts(folder: Path) -> list[list[int]]:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return [tokenizer.encode(text).ids[:CHUNK] for text in PROMPTS[:16]]


def _measure_all(device: Device, folder: Path, *, quick: bool) -> None:
    model = _model(device, folder, "bfloat16")
    harness = Harness(
        model, max_model_len=MAX_MODEL_LEN, max_num_seqs=BATCH, decode_buckets=(BATCH,), device=device
    )
    measured = measure(model, harness, CASES, 2 if quick else 8, 8 if quick else 24)
    greedy = measured["greedy"]["step"]
    name = "smollm2" if device.name == "cpu" else "llama-1b-dummy"
    print(f"{name}, {BATCH} rows, {device.product_name()}; medians, ms")
    print(f"{'':<14}{'forward':>11}{'step':>11}{'/ greedy':>11}")
    for case, each in measured.items():
        forward = f"{each['forward']:.2f}" if "forward" in each else ""
        print(f"{case:<14}{forward:>11}{each['step']:>11.2f}{each['step'] / greedy:>11.3f}")
    figures: dict[str, Any] = {
        "model": name,
        "device": device.product_name(),
        "batch": BATCH,
        "steps_ms": {
            case: {key: round(value, 3) for key, value in each.items()} for case, each in measured.items()
        },
    }
    ratios = {
        f"{case}_b{BATCH}": each["step"] / greedy for case, each in measured.items() if case != "greedy"
    }
    ratios[f"full_sampling_b{BATCH}"] = ratios.pop(f"full_b{BATCH}")
    figures["constrained"], constrained = (
        constrained_measured(quick=quick)
        if device.name == "cpu"
        else measured_on_words(model, device, folder, quick=quick)
    )
    ratios |= constrained
    for case, value in figures["constrained"].items():
        print(f"{case:<34}{value:>9.2f}")
    report("sampling", figures, ratios)


def main() -> int:
    """Prints a table and the line of JSON; returns the exit code."""
    options = parser(__doc__, "fewer steps")
    options.add_argument("--same-tokens", action="store_true", help="measure how often a draw differs")
    options.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    return exit_code("sampling", lambda: _bench(options.parse_args()))


if __name__ == "__main__":
    sys.exit(main())
