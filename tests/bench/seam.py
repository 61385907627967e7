"""Compares decoding through scheduler and worker processes with the same steps run in one process.

``python -m tests.bench.seam [--quick] [--null-only]`` measures output tokens per second of one worker on the
CPU: (a) of its steps run in a row in this process, and (b) through a scheduler and a worker, each a process,
for a gRPC client on one Connect stream. The models are SmolLM2 in bfloat16, at 1, 8 and 32 rows, and a null
model whose steps take 0.5 ms, at 1, 8, 32, 64 and 128 rows. The null model stands for a fast device: what (b)
lacks is the cost of the seam alone.

Prompts differ in length, so rows need their next blocks at different steps. Only the time counts in which all
rows decode. (a) runs as many steps as (b), at the same lengths. Both take turns; the ratios are medians.

The worker notes when its steps ran. From that the bench states the mean length of a lease (decode steps per
plan) and the device's idle share: the part of the time in which no step ran. Of the scheduler's process it
states the CPU time per step, gRPC included.
"""

import asyncio
import itertools
import os
import random
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from protos.steps import Admission, Decode, Prefill, StepPlan
from tests.bench.support.report import parser, report
from tests.bench.support.seam_client import Window, decode_together, processes
from tests.support.sampling_params import sampling_params

if TYPE_CHECKING:
    from tests.bench.support.measured_worker import RanStep
    from worker_svc.execution.worker import Worker

BLOCK: Final = 128
CHUNK: Final = 128
_SHORTEST_PROMPT: Final = 32
# Prompt lengths of neighbouring rows differ by this, so that blocks fall due apart. Rows that start one after
# the other must not catch up with it: it is more than the steps between their starts.
_STAGGER: Final = 38


@dataclass(frozen=True)
class Model:
    """A model to measure."""

    name: str
    """The prefix of its ratios."""
    path: str
    """The worker's ``--model``."""
    batches: tuple[int, ...]
    """Numbers of rows."""
    max_model_len: int
    """Longest sequence, tokens."""
    null_step_ms: float | None = None
    """Time of a step of a null model; None for a real one."""


@dataclass(frozen=True)
class Round:
    """One measurement of a batch: (b) between two halves of (a)."""

    batch: int
    """Rows."""
    window: Window
    """The time in which all rows decode through the services."""
    step_s: float
    """Seconds of a step in this process."""

    @property
    def ratio(self) -> float:
        """Tokens per second through the services, divided by those in this process."""
        return self.window.tokens / self.window.seconds / (self.batch / self.step_s)


def null_model(batches: tuple[int, ...] = (1, 8, 32, 64, 128)) -> Model:
    """Returns the model whose steps take 0.5 ms."""
    return Model("null", "null-model", batches, 8192, null_step_ms=0.5)


def prompts(batch: int, dice: random.Random) -> list[list[int]]:
    """Returns prompts of staggered lengths, with tokens that no earlier prompt began with."""
    lengths = [_SHORTEST_PROMPT + row * _STAGGER % BLOCK for row in range(batch)]
    return [[dice.randrange(100, 30_000) for _ in range(length)] for length in lengths]


def open_worker(model: Model) -> "Worker":
    """Returns a configured worker in this process."""
    # Imported late, so that torch finds the environment that `main` prepares.
    from tests.bench.support.measured_worker import MeasuredWorker, NullWorker
    from worker_svc.settings import Settings
    from worker_svc.shapes import ShapeConfig

    settings = Settings(model=model.path, device="cpu", dtype="bfloat16", kv_memory=1.0)
    worker: Worker
    if model.null_step_ms is None:
        worker = MeasuredWorker(settings)
    else:
        worker = NullWorker(settings, step_s=model.null_step_ms / 1e3)
    worker.prepare()
    rows = max(model.batches)
    worker.configure(ShapeConfig(model.max_model_len, rows, CHUNK, BLOCK, model.batches), lambda *_: None)
    return worker


def step_in_process(worker: "Worker", lengths: Sequence[int], steps: int) -> float:
    """Returns the mean seconds of a decode step."""
    batch, first_block = len(lengths), 1
    for slot, length in enumerate(lengths):
        num_blocks = -(-(length + steps) // BLOCK)
        blocks = range(first_block, first_block + num_blocks)
        first_block += num_blocks
        admission = Admission(slot, (7,) * length, length - 1, sampling_params(temperature=0.0), {0: blocks})
        worker.execute(StepPlan(slot + 1, admit=[admission], work=Prefill(slot, length - 1, 1, sample=True)))
    work = Decode(range(batch), batch)
    started = time.perf_counter()
    for _ in range(steps):
        worker.execute(StepPlan(batch + 1, work=work))
    seconds = time.perf_counter() - started
    worker.execute(StepPlan(batch + 2, release=range(batch)))
    return seconds / steps


async def measure(
    model: Model, steps: int, rounds: int, scratch: Path
) -> tuple[list[Round], list["RanStep"]]:
    """Returns the rounds of a model, and the steps that the worker's process ran."""
    from tests.bench.support.measured_worker import read_steps

    worker, dice, file = open_worker(model), random.Random(1), scratch / f"{model.name}.jsonl"
    scheduler_flags = [
        "--max-model-len", str(model.max_model_len), "--max-num-seqs", str(max(model.batches)),
        "--max-num-batched-tokens", str(CHUNK), "--block-size", str(BLOCK),
        "--decode-bucket-strategy", "manual", "--decode-buckets", ",".join(map(str, model.batches)),
    ]  # fmt: skip
    worker_flags = ["--steps", str(file), "--model", model.path, "--device", "cpu", "--dtype", "bfloat16"]
    worker_flags += ["--kv-memory", "1"]
    if model.null_step_ms is not None:
        worker_flags += ["--null-step-ms", str(model.null_step_ms)]
    measured = []
    async with processes(scheduler_flags, worker_flags, environment()) as (address, scheduler):
        # A first, short run of each batch warms up, and gives the lengths at which all rows decode.
        lengths = {}
        for batch in model.batches:
            needed = _needed(batch, BLOCK // 4)
            lengths[batch] = (await decode_together(address, scheduler, prompts(batch, dice), needed)).lengths
        for batch in model.batches * rounds:
            before = step_in_process(worker, lengths[batch], steps // 2)
            window = await decode_together(address, scheduler, prompts(batch, dice), _needed(batch, steps))
            later = [length + steps // 2 for length in lengths[batch]]
            after = step_in_process(worker, later, steps // 2)
            measured.append(Round(batch, window, (before + after) / 2))
    worker.close()
    return measured, read_steps(file)


def _needed(batch: int, steps: int) -> int:
    """Returns the tokens that each row needs for `steps` steps in which all rows decode."""
    # While prompts are computed, one decode step runs between two chunks.
    return steps + sum(-(-len(prompt) // CHUNK) for prompt in prompts(batch, random.Random(0)))


def environment() -> dict[str, str]:
    """Returns this process's environment without settings that steer the services or their threads."""
    steering = ("OMP_", "TRIPTYCH_", "VLLM_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(steering)}
    return {**kept, "OMP_WAIT_POLICY": "PASSIVE"}  # as the worker's command has it


def mean_lease(steps: Iterable["RanStep"], window: Window) -> float:
    """Returns the decode steps per plan in a window, without its last plan, which a row's end cuts short."""
    lengths = Counter(step.plan for step in steps if step.rows and window.start <= step.start < window.end)
    return statistics.mean(list(lengths.values())[:-1] or lengths.values())


def idle_share(steps: Iterable["RanStep"], window: Window) -> float:
    """Returns the part of a window in which no step ran, 0 to 1; steps may overlap."""
    busy, until = 0.0, window.start
    for step in sorted(steps, key=lambda step: step.start):
        begin, end = max(step.start, until), min(step.end, window.end)
        if end > begin:
            busy, until = busy + end - begin, end
    return 1 - busy / window.seconds


def median_gaps(steps: Iterable["RanStep"], window: Window) -> tuple[float, float]:
    """Returns the seconds between two decode steps of one plan, and of two plans; 0 where there are none."""
    inside = [step for step in steps if step.rows and window.start <= step.start < window.end]
    gaps: dict[bool, list[float]] = {True: [], False: []}
    for earlier, later in itertools.pairwise(inside):
        gaps[earlier.plan == later.plan].append(max(0.0, later.start - earlier.end))
    same, other = (statistics.median(gaps[same] or [0.0]) for same in (True, False))
    return same, other


def summary(rounds: Sequence[Round], steps: Sequence["RanStep"]) -> dict[str, float]:
    """Returns the figures of one batch: medians of its rounds."""

    def median(values: Iterable[float]) -> float:
        return round(statistics.median(values), 4)

    return {
        "in_process_tok_s": median(one.batch / one.step_s for one in rounds),
        "served_tok_s": median(one.window.tokens / one.window.seconds for one in rounds),
        "ratio": median(one.ratio for one in rounds),
        "lease_steps": median(mean_lease(steps, one.window) for one in rounds),
        "idle": median(idle_share(steps, one.window) for one in rounds),
        "scheduler_us": median(
            1e6 * one.window.scheduler_s / (one.window.tokens / one.batch) for one in rounds
        ),
        "gap_in_lease_us": median(1e6 * median_gaps(steps, one.window)[0] for one in rounds),
        "gap_between_us": median(1e6 * median_gaps(steps, one.window)[1] for one in rounds),
    }


def main() -> None:
    """Prints a table and the line of JSON."""
    options = parser(__doc__, "fewer steps and rounds")
    options.add_argument("--null-only", action="store_true", help="measure the null model only")
    arguments = options.parse_args()
    clean = environment()
    os.environ.clear()
    os.environ.update(clean)
    runs = [(null_model(), *((1000, 2) if arguments.quick else (2000, 5)))]
    if not arguments.null_only:
        from worker_svc.model_files.loader import fetch

        smollm2 = Model("smollm2", str(fetch("smollm2", None)), (1, 8, 32), 1024)
        runs.insert(0, (smollm2, *((96, 1) if arguments.quick else (128, 5))))
    figures: dict[str, dict[str, float]] = {}
    for model, steps, count in runs:
        with tempfile.TemporaryDirectory() as scratch:
            rounds, ran = asyncio.run(measure(model, steps, count, Path(scratch)))
        for batch in model.batches:
            figures[f"{model.name}_b{batch}"] = summary([one for one in rounds if one.batch == batch], ran)
    print(
        f"{'':12}{'in-process':>14}{'served':>14}{'ratio':>8}{'lease':>8}{'idle':>8}{'scheduler':>14}"
        f"{'gaps inside, between':>24}"
    )
    for name, row in figures.items():
        print(
            f"{name:12}{row['in_process_tok_s']:8,.0f} tok/s{row['served_tok_s']:8,.0f} tok/s{row['ratio']:8.3f}"
            f"{row['lease_steps']:8.1f}{row['idle']:8.3f}{row['scheduler_us']:8,.0f} µs/step"
            f"{row['gap_in_lease_us']:10,.0f} µs"
            f"{row['gap_between_us']:8,.0f} µs"
        )
    report("seam", {"by_batch": figures}, {name: row["ratio"] for name, row in figures.items()})


if __name__ == "__main__":
    main()
