"""What choosing tokens costs, against the forward pass that it follows.

``python -m tests.bench.sampling [--quick]``: SmolLM2 in bfloat16 in this process, without a scheduler, on all cores. Decode steps of 32
rows, all in use, each kind of requests in turn and again: of greedy requests, of requests that are drawn, with filters, with penalties, with
everything, with log-probabilities. ``forward`` is the time until the logits are there. Then the same batch with grammars, and what
jump-ahead saves (``tests/bench/constrained.py``).
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch

from protos.errors import ConfigurationRefused
from tests.bench.constrained import measured as constrained_measured
from tests.bench.report import report
from tests.worker_harness import Harness
from worker_svc.devices import open_device
from worker_svc.models import FetchError, fetch
from worker_svc.plan import Sampling
from worker_svc.vllm_adapter import startup
from worker_svc.vllm_adapter.engine import VllmModel

BATCH: Final = 32
CONTEXT: Final = 256
MAX_MODEL_LEN: Final = 1024
_WARM_UP_STEPS: Final = 3

FILTERS: Final = {"temperature": 0.8, "top_p": 0.95, "top_k": 50, "min_p": 0.02}
PENALTIES: Final = {"presence_penalty": 0.5, "frequency_penalty": 0.3, "repetition_penalty": 1.1}

Case = Callable[[Harness], None]
"""Admits ``BATCH`` requests, in slots 0, 1, …, that are ready to decode."""


class ClockedModel(VllmModel):
    """A model that notes when its logits were there.

    Attributes:
        logits_at: on the clock of ``time.perf_counter``.
    """

    logits_at = 0.0

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See the base class."""
        logits = super().logits(hidden)
        self.logits_at = time.perf_counter()
        return logits


def _prompt(seed: int) -> list[int]:
    ids: list[int] = torch.randint(
        100, 40_000, (CONTEXT,), generator=torch.Generator().manual_seed(seed)
    ).tolist()
    return ids


def requests_of(**fields: float) -> Case:
    """Requests that ask for this, each with a seed of its own, behind a context that counts as computed."""

    def fill(harness: Harness) -> None:
        for slot in range(BATCH):
            sampling = Sampling(seed=slot, **fields)  # type: ignore[arg-type]
            harness.run(admit=[harness.admit(slot, _prompt(slot), sampling, computed=CONTEXT - 1)])

    return fill


CASES: dict[str, Case] = {
    "greedy": requests_of(temperature=0.0),
    "temperature": requests_of(temperature=0.8),
    "filters": requests_of(**FILTERS),
    "penalties": requests_of(temperature=0.0, **PENALTIES),
    "full": requests_of(**FILTERS, **PENALTIES),
    "logprobs": requests_of(temperature=0.0, logprobs=5),
}


def measure(
    model: ClockedModel, harness: Harness, cases: Mapping[str, Case], rounds: int, steps: int
) -> dict[str, dict[str, float]]:
    """Medians of each case, milliseconds: ``forward``, and the whole ``step``."""
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
                    forward[name].append(model.logits_at - started)
                    whole[name].append(ended - started)
            harness.release(range(BATCH))
    return {
        name: {
            "forward": 1000 * statistics.median(forward[name]),
            "step": 1000 * statistics.median(whole[name]),
        }
        for name in cases
    }


def _bench(arguments: argparse.Namespace) -> None:
    quick: bool = arguments.quick
    device = open_device("cpu")
    folder = fetch("smollm2")
    startup.prepare(device)
    model = ClockedModel(folder, device, dtype="bfloat16", load_format="auto", seed=0)
    model.load_weights()
    harness = Harness(
        model, max_model_len=MAX_MODEL_LEN, max_num_seqs=BATCH, decode_buckets=(BATCH,), device=device
    )
    measured = measure(model, harness, CASES, 2 if quick else 8, 8 if quick else 24)
    greedy = measured["greedy"]["step"]
    print(f"smollm2, {BATCH} rows, {device.product_name()}; medians, ms")
    print(f"{'':<14}{'forward':>11}{'step':>11}{'/ greedy':>11}")
    for name, each in measured.items():
        print(f"{name:<14}{each['forward']:>11.2f}{each['step']:>11.2f}{each['step'] / greedy:>11.3f}")
    figures: dict[str, Any] = {
        "model": "smollm2",
        "batch": BATCH,
        "steps_ms": {
            name: {key: round(value, 3) for key, value in each.items()} for name, each in measured.items()
        },
    }
    ratios = {
        f"{name}_b{BATCH}": each["step"] / greedy for name, each in measured.items() if name != "greedy"
    }
    ratios[f"full_sampling_b{BATCH}"] = ratios.pop(f"full_b{BATCH}")
    figures["constrained"], constrained = constrained_measured(quick=quick)
    for name, value in figures["constrained"].items():
        print(f"{name:<28}{value:>9.2f}")
    report("sampling", figures, {**ratios, **constrained})


def main() -> int:
    """Prints a table and the line of JSON.

    Returns:
        0, or 2 where the model or the device cannot be had, which is said in one line.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="fewer steps")
    try:
        _bench(parser.parse_args())
    except (ConfigurationRefused, FetchError) as error:
        print(f"sampling: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
