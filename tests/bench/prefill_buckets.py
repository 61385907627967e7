"""Times a prompt's first token, and what a start pays for the graph, for each prefill bucket.

``python -m tests.bench.prefill_buckets [--quick] [--device cpu|cuda]`` runs a worker in this process, without
a scheduler: SmolLM2 in bfloat16 on a CPU, Llama 3.2 1B's shape with made-up weights on a GPU. It uses no
compiled code of earlier starts. On a CPU all times are CPU time, whatever else the machine does.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from protos.steps import Admission, Prefill, StepPlan
from tests.bench.support.gpu_model import BLOCK, model_folder
from tests.bench.support.report import exit_code, parser, report
from tests.support.sampling_params import sampling_params
from tests.support.worker.harness import random_prompt
from worker_svc.execution.worker import Worker
from worker_svc.settings import Settings
from worker_svc.shapes import ShapeConfig

BUCKETS: Final = (64, 128, 256, 512)
LENGTHS: Final = (50, 100)
_MAX_MODEL_LEN: Final = 1024


class Marks:
    """Notes when each graph of the phases of a configuration begins."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """Starts without marks."""
        self._clock = clock
        self._marks: list[tuple[float, str]] = []

    def note(self, phase: str, done: int, total: int, what: str) -> None:
        """Takes in a report of progress."""
        del done, total
        self._marks.append((self._clock(), what if phase in ("compile", "warm_up") else ""))

    def seconds(self, what: str) -> float:
        """Returns the time from the marks with these words to the next ones, in all phases together."""
        self.note("", 0, 0, "")
        pairs = zip(self._marks, self._marks[1:], strict=False)
        return sum(after - before for (before, words), (after, _) in pairs if words == what)


def first_token_ms(
    worker: Worker, length: int, bucket: int, repetitions: int, clock: Callable[[], float]
) -> float:
    """Returns the least time from admission to the token of a prompt that one chunk holds."""
    taken = []
    for number in range(repetitions):
        blocks = {0: range(1, 1 + _MAX_MODEL_LEN // BLOCK)}
        request = Admission(0, random_prompt(number, length), 0, sampling_params(temperature=0.0), blocks)
        plan = StepPlan(2 * number + 1, Prefill(0, 0, length, True, bucket), admit=[request])
        started = clock()
        worker.execute(plan)
        taken.append(clock() - started)
        worker.execute(StepPlan(2 * number + 2, release=[0]))
    return 1000 * min(taken)


def run(arguments: argparse.Namespace) -> None:
    """Runs the bench."""
    with tempfile.TemporaryDirectory() as parent:
        on_gpu = arguments.device == "cuda"
        worker = Worker(
            Settings(
                model=str(model_folder(Path(parent))) if on_gpu else "smollm2", device=arguments.device,
                load_format="dummy" if on_gpu else "auto", compile_cache=False, kv_memory=1.0,
            )
        )  # fmt: skip
        worker.prepare()
        clock = time.perf_counter if on_gpu else time.process_time
        marks = Marks(clock)
        blocks = 1 + _MAX_MODEL_LEN // BLOCK
        worker.configure(
            ShapeConfig(
                _MAX_MODEL_LEN, 1, BUCKETS[-1], BLOCK, (1,), (blocks,) * len(worker.groups),
                prefill_buckets=BUCKETS,
            ),
            marks.note,
        )  # fmt: skip
        figures: dict[str, float] = {}
        for bucket in BUCKETS:
            figures[f"graph_s_{bucket}"] = round(marks.seconds(f"prefill of {bucket} tokens"), 3)
            for length in (length for length in LENGTHS if length <= bucket):
                spent = first_token_ms(worker, length, bucket, 5 if arguments.quick else 20, clock)
                figures[f"first_token_ms_{length}_in_{bucket}"] = round(spent, 2)
            print(bucket, {name: value for name, value in figures.items() if name.endswith(f"_{bucket}")})
        worker.close()
    ratios = {
        f"first_token_{length}": min(figures[f"first_token_ms_{length}_in_{bucket}"] for bucket in BUCKETS if bucket >= length)
        / figures[f"first_token_ms_{length}_in_{BUCKETS[-1]}"]
        for length in LENGTHS
    }  # fmt: skip
    report("prefill_buckets", {"device": arguments.device, **figures}, ratios)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the bench; returns the exit code."""
    made = parser(__doc__, "5 prompts a bucket instead of 20")
    made.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    arguments = made.parse_args(argv)
    return exit_code("prefill_buckets", lambda: run(arguments))


if __name__ == "__main__":
    sys.exit(main())
