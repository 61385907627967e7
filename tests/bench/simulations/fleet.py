"""Measures what steps of 64 replicas cost the scheduler as its queue and its prefix caches grow.

``python -m tests.bench.simulations.fleet [--quick]`` simulates 20,000 requests on 64 replicas of 16 slots and
measures the CPU time of each step: update, dispatch, and planning what follows. It must not grow with the
number of waiting requests or of cached blocks.

A fifth of the prompts begin with one of 32 system prompts; lengths of prompts are lognormal, of answers
Pareto. There are 8 tenants and 3 priorities. In the first phase all requests arrive at once, and steps are
compared by quartiles of waiting requests. The second phase runs smaller traffic after up to a million blocks
were cached.
"""

import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from protos.service.logs import configure
from scheduler_svc.settings import Settings
from scheduler_svc.simulation.requests import SimulatedRequest
from scheduler_svc.simulation.run import Simulation
from scheduler_svc.simulation.step_times import StepTimes
from tests.bench.support.report import parser, report

REPLICAS: Final = 64
BLOCK_SIZE: Final = 16
CACHED: Final = (0, 10_000, 100_000, 1_000_000)
_PROMPT: Final = 4000
_FILLED_S: Final = 1e4
"""Virtual time at which the cache is full and the traffic begins."""
_TIMES: Final = StepTimes(base_s=0.008, per_token_s=0.00005)
_SETTINGS: Final = Settings(
    max_num_seqs=16, max_num_batched_tokens=128, block_size=BLOCK_SIZE, num_blocks=20_000,
    max_waiting_requests=1 << 20, max_waiting_tokens=1 << 40,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Step:
    """A step's end: its virtual time, the requests that wait, and the CPU microseconds that followed."""

    at_s: float
    waiting: int
    spent_us: float


def crowd(count: int, *, seed: int, at_s: float = 0.0) -> list[SimulatedRequest]:
    """Returns requests that arrive together."""
    dice = random.Random(seed)
    systems = [(f"system-{index}", dice.randrange(100, 1500)) for index in range(32)]
    requests = []
    for _ in range(count):
        own = max(1, min(int(dice.lognormvariate(5.5, 1.0)), 2000))
        prefix = (dice.choice(systems),) if dice.random() < 0.2 else ()
        requests.append(SimulatedRequest(
            at_s, own + sum(tokens for _, tokens in prefix), min(int(16 * dice.paretovariate(1.3)), 400), prefix,
            tenant=f"tenant-{min(int(dice.paretovariate(1.0)), 8)}", priority=dice.choices((0, 1, 2), (1, 8, 1))[0],
        ))  # fmt: skip
    return requests


def steps_of(requests: Sequence[SimulatedRequest]) -> list[Step]:
    """Simulates requests; returns their steps."""
    simulation = Simulation(list(requests), _SETTINGS, [_TIMES] * REPLICAS)
    steps: list[Step] = []

    def timed(finish: Callable[[], None]) -> None:
        waiting, started = len(simulation.engine.waiting), time.thread_time()
        finish()
        steps.append(Step(simulation.now, waiting, (time.thread_time() - started) * 1e6))

    for worker in simulation.workers:
        worker.finish = partial(timed, worker.finish)  # type: ignore[method-assign] # measures it
    simulation.run()
    return steps


def summary(steps: Sequence[Step]) -> dict[str, float]:
    """Returns the number of steps, and their median and 99th percentile in microseconds."""
    spent = sorted(step.spent_us for step in steps)
    return {
        "steps": len(spent),
        "median_us": round(statistics.median(spent), 1),
        "p99_us": round(spent[len(spent) * 99 // 100], 1),
    }


def main() -> None:
    """Runs the bench and prints its line."""
    options = parser(__doc__, "a tenth of the requests")
    scale = 10 if options.parse_args().quick else 1
    configure("fleet", level="warning")
    steps = sorted(
        (one for one in steps_of(crowd(20_000 // scale, seed=1)) if one.waiting), key=lambda one: one.waiting
    )
    size = len(steps) // 4
    quartiles = [steps[index * size : (index + 1) * size] for index in range(4)]
    by_waiting = [{"from": part[0].waiting, "to": part[-1].waiting, **summary(part)} for part in quartiles]
    for row in by_waiting:
        print(row)
    by_cached: dict[str, dict[str, float]] = {}
    traffic = crowd(3000 // scale, seed=2, at_s=_FILLED_S)
    for blocks in CACHED:
        filler = [SimulatedRequest(0.0, _PROMPT, 1) for _ in range(blocks * BLOCK_SIZE // _PROMPT)]
        by_cached[str(blocks)] = summary(
            [one for one in steps_of([*filler, *traffic]) if one.at_s >= _FILLED_S]
        )
        print(f"{blocks} blocks cached before: {by_cached[str(blocks)]}")
    ratios = {
        "waiting_high_over_low": by_waiting[-1]["median_us"] / by_waiting[0]["median_us"],
        "cached_1m_over_0": by_cached[str(CACHED[-1])]["median_us"] / by_cached["0"]["median_us"],
    }
    report("fleet", {"by_waiting": by_waiting, "by_cached": by_cached}, ratios)


if __name__ == "__main__":
    main()
