"""Measures the host's time of a decode step on an NPU whose graphs take no time.

``python -m tests.bench.npu_step [--quick]`` runs a tiny model's steps through the worker's runner, without a
scheduler, with the vendor's torch-rbln over a stub of the runtime. After warm-up each graph returns its
static output at once, so the rest is the worker's and torch-rbln's own: the batch, copies to and from the
device, and the calls. It prints medians with 1, 8 and 32 greedy rows. ``ratios`` are against graphs called
through torch-rbln's wrapper and Dynamo's guards, in alternating rounds, and against the aim of 150 us.

The bench starts itself in a process that finds the vendor's packages.
"""

import gc
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from protos.steps import Decode, StepPlan
from tests.bench.support.report import parser, report
from tests.support import tiny_models
from tests.support.rbln.vendor_packages import environment
from tests.support.worker.harness import Harness, load, random_prompt
from worker_svc.devices.base import Device
from worker_svc.devices.rbln.device import RblnDevice
from worker_svc.vllm_platform import prepare_libraries

ROWS: Final = (1, 8, 32)
AIM_US: Final = 150.0
ROUNDS: Final = 10


class UnboundDevice(RblnDevice):
    """An NPU whose graphs are called through Dynamo."""

    bind = Device.bind


def without_work(compiled: Callable[..., Sequence[Any]]) -> Callable[..., Sequence[Any]]:
    """Returns a graph that runs once; later calls return its static output."""
    outputs: Sequence[Any] = ()

    def run(*arguments: Any) -> Sequence[Any]:
        nonlocal outputs
        outputs = outputs or compiled(*arguments)
        return outputs

    return run


def open_harness(device: RblnDevice, folder: Path) -> Harness:
    """Returns a runner with its graphs made."""
    device.check_available()
    model = load(tiny_models.write("llama", folder), "float32", device=device)
    return Harness(model, block_size=1024, decode_buckets=ROWS, device=device)


def round_of(harness: Harness, rows: int, steps: int) -> float:
    """Returns the median of some steps, us."""
    plan, times = StepPlan(1, work=Decode(tuple(range(rows)), rows)), []
    for _ in range(steps):
        started = time.perf_counter()
        harness.runner.launch(plan).read()
        times.append(time.perf_counter() - started)
    return 1e6 * statistics.median(times)


def measure(steps: int) -> dict[str, dict[int, float]]:
    """Returns the median of rounds with fixed tensors and without, us, and of their ratio, by rows."""
    prepare_libraries()
    from rebel.core import torch_compile

    backend = torch_compile.rbln_backend
    torch_compile.rbln_backend = lambda *given, **options: without_work(backend(*given, **options))
    with tempfile.TemporaryDirectory() as folder:
        bound = open_harness(RblnDevice(), Path(folder, "bound"))
        unbound = open_harness(UnboundDevice(), Path(folder, "unbound"))
    found: dict[str, dict[int, float]] = {"bound": {}, "unbound": {}, "ratio": {}}
    gc.disable()
    for rows in ROWS:
        for harness in (bound, unbound):
            for slot in range(rows):
                harness.prefill(slot, [token % 200 for token in random_prompt(slot, 8)])
            round_of(harness, rows, steps)
        rounds = [[round_of(each, rows, steps) for each in (bound, unbound)] for _ in range(ROUNDS)]
        found["bound"][rows], found["unbound"][rows] = (
            statistics.median(each) for each in zip(*rounds, strict=True)
        )
        found["ratio"][rows] = statistics.median(left / right for left, right in rounds)
        for harness in (bound, unbound):
            harness.release(range(rows))
    return found


def main() -> int:
    """Runs the bench in a process that finds the vendor's packages."""
    made = parser(__doc__, "20 steps a round instead of 80")
    made.add_argument("--inside", action="store_true", help="the vendor's packages are on the path")
    given = made.parse_args()
    if not given.inside:
        command = [sys.executable, "-m", "tests.bench.npu_step", "--inside", *sys.argv[1:]]
        return subprocess.run(command, env=environment(), check=False).returncode
    found = measure(20 if given.quick else 80)
    for rows in ROWS:
        print(
            f"{rows:3} rows: {found['bound'][rows]:,.0f} µs a step, {found['unbound'][rows]:,.0f} µs through Dynamo"
        )
    report(
        "npu_step",
        {
            f"us_per_step{end}": {str(rows): round(found[kind][rows], 1) for rows in ROWS}
            for kind, end in (("bound", ""), ("unbound", "_through_dynamo"))
        },
        {f"{rows}_rows_to_dynamo": found["ratio"][rows] for rows in ROWS}
        | {f"{rows}_rows_to_aim": found["bound"][rows] / AIM_US for rows in ROWS},
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
