"""Measures the host's time of a decode step on an NPU whose graphs take no time.

``python -m tests.bench.npu_step [--quick]`` runs a tiny model's steps through the worker's runner, without a
scheduler, with the vendor's torch-rbln over a stub of the runtime. After warm-up each graph returns its
static output at once, so the rest is the worker's and torch-rbln's own: the batch, copies to and from the
device, and the calls. It prints medians with 1, 8 and 32 greedy rows. ``ratios`` are against 150 us.

The bench starts itself in a process that finds the vendor's packages.
"""

import gc
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from tests.bench.support.report import parser, report

ROWS: Final = (1, 8, 32)
LIMIT_US: Final = 150.0
_INSIDE: Final = "TRIPTYCH_BENCH_NPU_STEP"


def without_work(compiled: Callable[..., Sequence[Any]]) -> Callable[..., Sequence[Any]]:
    """Returns a graph that runs once; later calls return its static output."""
    outputs: Sequence[Any] = ()

    def run(*arguments: Any) -> Sequence[Any]:
        nonlocal outputs
        outputs = outputs or compiled(*arguments)
        return outputs

    return run


def measure(repetitions: int) -> dict[int, float]:
    """Returns the median of a step, us, by number of rows."""
    from worker_svc.vllm_platform import prepare_libraries

    prepare_libraries()
    from rebel.core import torch_compile

    from tests.support import tiny_models
    from tests.support.worker.harness import Harness, load, random_prompt
    from worker_svc.devices.rbln.device import RblnDevice

    backend = torch_compile.rbln_backend
    torch_compile.rbln_backend = lambda *given, **options: without_work(backend(*given, **options))
    device = RblnDevice()
    device.check_available()
    with tempfile.TemporaryDirectory() as folder:
        model = load(tiny_models.write("llama", Path(folder)), "float32", device=device)
    harness = Harness(model, block_size=1024, decode_buckets=ROWS, device=device)
    medians = {}
    gc.disable()
    for rows in ROWS:
        slots = range(rows)
        for slot in slots:
            harness.prefill(slot, [token % 200 for token in random_prompt(slot, 8)])
        times = []
        for _ in range(repetitions):
            started = time.perf_counter()
            harness.decode(slots, rows)
            times.append(time.perf_counter() - started)
        medians[rows] = 1e6 * statistics.median(times[repetitions // 4 :])
        harness.release(slots)
    return medians


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the bench in a process of the vendor's packages."""
    arguments = parser(__doc__, "fewer steps").parse_args(argv)
    if _INSIDE not in os.environ:
        from tests.support.rbln.vendor_packages import environment

        command = [sys.executable, "-m", "tests.bench.npu_step", *(["--quick"] if arguments.quick else [])]
        return subprocess.run(command, env=environment(**{_INSIDE: "1"}), check=False).returncode
    medians = measure(200 if arguments.quick else 800)
    for rows, median in medians.items():
        print(f"{rows:3d} rows: {median:6.0f} us a step")
    report(
        "npu_step",
        {"us_per_step": {str(rows): round(median, 1) for rows, median in medians.items()}},
        {f"{rows}_rows_to_aim": median / LIMIT_US for rows, median in medians.items()},
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
