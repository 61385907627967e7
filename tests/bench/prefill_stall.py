"""Measures how long a 4,000-token prompt stalls sixteen decoding requests.

``python -m tests.bench.prefill_stall [--quick]`` runs SmolLM2 in bfloat16 on the CPU, with the scheduler and
the worker in one process. It tries several values of ``--decode-steps-per-chunk``; 0 runs prefill first, as
vLLM-RBLN does. For each it reports the longest gap between two tokens of a running request, the bound on that
gap (the longest chunk plus the longest decode step), and the newcomer's time to first token.
"""

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from protos.steps import Decode, Prefill, StepPlan
from scheduler_svc.requests.request import Event
from tests.bench.support.report import parser, report
from tests.support.scheduler.local_replica import LocalReplica
from worker_svc.devices import open_device
from worker_svc.model_files.loader import fetch
from worker_svc.vllm_adapter import startup
from worker_svc.vllm_adapter.model import VllmModel

RUNNING, LONG, CONTEXT = 16, 4000, 8192


@dataclass
class _Arrivals:
    """Records when a request's tokens arrive."""

    times: list[float] = field(default_factory=list)

    def push(self, event: Event) -> None:
        self.times.extend([time.perf_counter()] * len(event.token_ids))

    def push_tokens(self, request_ids: Sequence[str], token_ids: Sequence[int]) -> None:
        self.times.extend([time.perf_counter()] * len(token_ids))


@dataclass(frozen=True)
class _Stall:
    """Effects of one long prompt, seconds."""

    longest_gap: float
    bound: float
    mean_gap: float
    first_token: float


def _prompt(seed: int, count: int) -> list[int]:
    return [100 + (seed * 7919 + i * i * 31) % 20_000 for i in range(count)]


def _measure(model: VllmModel, ratio: int, long: int) -> _Stall:
    replica = LocalReplica(
        model, max_model_len=CONTEXT, slots=RUNNING + 1, buckets=(1, 16, 17), caching=False,
        decode_steps_per_chunk=ratio, kv_bytes=1 << 31,
    )  # fmt: skip
    running = [_Arrivals() for _ in range(RUNNING)]
    for index, sink in enumerate(running):
        replica.submit(_prompt(index, 64), sink, num_tokens=CONTEXT - 64)
    while any(len(sink.times) < 8 for sink in running):
        replica.step()
    newcomer = _Arrivals()
    longest: dict[type, float] = {Prefill: 0.0, Decode: 0.0}

    def ran(plan: StepPlan, seconds: float) -> None:
        kind = type(plan.work)
        longest[kind] = max(longest[kind], seconds)

    began = time.perf_counter()
    replica.submit(_prompt(99, long), newcomer, num_tokens=1)
    while not newcomer.times:
        replica.step(ran)
    for _ in range(3):
        replica.step(ran)
    gaps = [
        later - earlier
        for sink in running
        for earlier, later in zip(sink.times, sink.times[1:], strict=False)
        if later > began
    ]
    return _Stall(
        max(gaps), longest[Prefill] + longest[Decode], statistics.fmean(gaps), newcomer.times[0] - began
    )


def main() -> None:
    """Prints a table and the line of JSON."""
    options = parser(__doc__, "a prompt of 1,000 tokens, each setting once")
    quick = options.parse_args().quick
    device = open_device("cpu")
    startup.prepare(device.name)
    model = VllmModel(fetch("smollm2", None), device, dtype="bfloat16", seed=0)
    model.load_weights()
    long, rounds = (1000, 1) if quick else (LONG, 3)
    ratios = (1, 4, 0) if quick else (1, 2, 4, 8, 0)
    stalls: dict[int, list[_Stall]] = {ratio: [] for ratio in ratios}
    _measure(model, 1, 256)  # warms up
    for _ in range(rounds):
        for ratio in ratios:
            stalls[ratio].append(_measure(model, ratio, long))
    print(
        f"{RUNNING} requests decode, one prompt of {long} tokens arrives; medians of {rounds}, milliseconds"
    )
    print("steps per chunk   longest gap   chunk + step   mean gap   first token of the newcomer")
    figures: dict[str, object] = {}
    for ratio, runs in stalls.items():
        name = str(ratio) if ratio else "prefill first"
        row = [
            1000 * statistics.median(getattr(run, what) for run in runs)
            for what in ("longest_gap", "bound", "mean_gap", "first_token")
        ]
        print(f"{name:>15}   {row[0]:11.1f}   {row[1]:12.1f}   {row[2]:8.1f}   {row[3]:11.1f}")
        figures[name] = dict(
            zip(("longest_gap_ms", "bound_ms", "mean_gap_ms", "first_token_ms"), row, strict=True)
        )
    first = statistics.median(run.longest_gap for run in stalls[0])
    report(
        "prefill_stall",
        {"prompt_tokens": long, "running": RUNNING, "by_decode_steps_per_chunk": figures},
        {
            "gap_over_bound": max(
                run.longest_gap / run.bound for ratio in ratios if ratio for run in stalls[ratio]
            ),
            "gap_over_prefill_first": statistics.median(run.longest_gap for run in stalls[1]) / first,
        },
    )


if __name__ == "__main__":
    main()
