"""Measures the host's part of choosing tokens whose logits are on an NPU.

``python -m tests.bench.npu_sampling [--quick]`` states bytes copied from the device and microseconds on the
host per step, at 1, 8 and 32 rows and a vocabulary of 128,256, for greedy rows, for random rows sampled on
the host, and for random rows drawn on the device. torch-rbln is the vendor's, its runtime library a stub
whose memory is the host's, and graphs compute nothing: the device's own time is missing, and copies take the
time of a memory copy.
"""

import ctypes
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any, Final

import torch

from protos.steps import Admission, GroupKind
from protos.triptych.v1 import common_pb2
from tests.bench.support.report import parser, report
from tests.support.rbln.vendor_packages import environment
from worker_svc.execution.batch import Batch
from worker_svc.execution.token_selection import TokenSelector, make_sampler
from worker_svc.sampling.state import SamplingVocabulary
from worker_svc.shapes import AttentionLayer, KvGroup, ShapeConfig

VOCAB: Final = 128_256
ROWS: Final = (1, 8, 32)
# Of the stub's counters, the bytes of copies from the device.
_BYTES_READ: Final = 3
RANDOM: Final = common_pb2.SamplingParams(temperature=0.8, top_p=0.9, top_k=50, seed=1, seed_is_drawn=True)
GREEDY: Final = common_pb2.SamplingParams(temperature=0.0)
MODES: Final = {
    "greedy": (GREEDY, False),
    "random_on_host": (RANDOM, False),
    "random_on_device": (RANDOM, True),
}


def selector_of(rows: int, sampling: common_pb2.SamplingParams, draw: Any) -> tuple[Batch, TokenSelector]:
    """Returns a batch of equal requests, and what selects their tokens."""
    shapes = ShapeConfig(64, rows, chunk=64, block_size=64, decode_buckets=(rows,), num_blocks=(rows + 1,))
    group = KvGroup(0, (AttentionLayer("a", 1, 1, 32, 0, torch.float32),), GroupKind.FULL)
    batch = Batch(shapes, [group], [rows + 1], torch.device("cpu"), SamplingVocabulary(VOCAB))
    for slot in range(rows):
        batch.admit(Admission(slot, [1, 2], 1, sampling, {0: [1 + slot]}))
    batch.copy_admitted()
    return batch, TokenSelector(batch, None, draw)


def null_backend(graph: Any, inputs: Any, **_: Any) -> Callable[..., Any]:
    """Compiles any graph of the sampler to one that computes nothing."""
    tokens = torch.zeros(inputs[0].shape[0], dtype=torch.int64).to("rbln")
    return lambda *_: (tokens,)


def measure(rows: int, mode: str, steps: int) -> tuple[float, float]:
    """Returns bytes from the device and microseconds of a step, the median."""
    from worker_svc.devices.rbln.device import RblnDevice
    from worker_svc.devices.registry import DeviceOptions

    sampling, on_device = MODES[mode]
    device = RblnDevice(DeviceOptions(sampling_on_device=on_device))
    device.check_available()
    argmax = device.compile_argmax()
    assert argmax is not None
    batch, selector = selector_of(rows, sampling, device.compile_draw())
    slots, sample = list(range(rows)), make_sampler(batch)
    index = torch.arange(rows)
    logits = torch.randn(rows, VOCAB).to("rbln")
    counter = ctypes.CDLL("librbln.so").stub_rbln_counter
    counter.restype = ctypes.c_uint64
    read = 0
    times: list[float] = []
    for step in range(steps + 5):
        if step == 5:  # after warm-up
            read, times = counter(_BYTES_READ), []
        start = time.perf_counter()
        best = argmax(logits).to("cpu", torch.int64)
        selector.select(slots, index, logits, index, sample, batch.sampling.thinking.advance, [best])
        times.append(time.perf_counter() - start)
    return (counter(_BYTES_READ) - read) / steps, statistics.median(times) * 1e6


@torch.inference_mode()
def run(steps: int) -> None:
    """Measures every mode at every number of rows."""
    from rebel.core import torch_compile

    torch_compile.rbln_backend = null_backend
    figures: dict[str, dict[str, float]] = {}
    for rows in ROWS:
        for mode in MODES:
            size, microseconds = measure(rows, mode, steps)
            figures[f"{mode}_{rows}"] = {"bytes": round(size), "us": round(microseconds, 1)}
            print(f"{rows:3} rows, {mode}: {size:,.0f} bytes, {microseconds:,.1f} µs a step", flush=True)
    ratios = {
        f"{part}_device_to_host_{rows}": figures[f"random_on_device_{rows}"][part] / figures[f"random_on_host_{rows}"][part]
        for part in ("bytes", "us")
        for rows in ROWS
    }  # fmt: skip
    report("npu_sampling", {"vocabulary": VOCAB, "steps": steps, "modes": figures}, ratios)


def main() -> int:
    """Runs the bench in a process that finds the vendor's packages."""
    made = parser(__doc__, "20 steps each instead of 200")
    made.add_argument("--inside", action="store_true", help="the vendor's packages are on the path")
    given = made.parse_args()
    if given.inside:
        run(20 if given.quick else 200)
        return 0
    command = [sys.executable, "-m", "tests.bench.npu_sampling", "--inside", *sys.argv[1:]]
    return subprocess.run(command, env=environment(), check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
