"""Schedules 64 replicas and 20,000 requests on a simulated clock, and measures what each step costs.

A step's cost must not grow with the number of waiting requests or of cached blocks.
``python -m tests.bench.simulations.fleet [--quick]`` uses the real engine, schedulers and KV caches. Devices
spend simulated time and answer with a constant token. The bench measures this thread's CPU time of each step:
dispatch, step and update.

The traffic starts with a crowd, then has bursts and lulls. Prompt lengths are lognormal, output lengths
Pareto. A fifth of the prompts begin with one of 32 system prompts. There are 8 tenants and 3 priorities. Each
step is compared with steps of the same kind and number of rows. The difference that remains is the effect of
the number of waiting requests, in quartiles of all steps during which requests wait.

The second phase runs the same smaller traffic with 0, 10,000, 100,000 and 1,000,000 blocks cached beforehand
over all replicas, through the cache's own interface. Traffic and steps are the same each time.

Both phases end with checks: every request has exactly its tokens, every pool passes its integrity check, and
nothing is left behind.
"""

import heapq
import itertools
import random
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from protos.steps import Decode, GroupKind, Prefill, StepPlan, StepResult
from protos.triptych.v1 import common_pb2
from scheduler_svc.dispatch.engine import Engine
from scheduler_svc.dispatch.placement import AttachedReplica
from scheduler_svc.kv.cache import KvCache
from scheduler_svc.kv.sequence import SequenceKv
from scheduler_svc.policy.order import PriorityFairOrder
from scheduler_svc.policy.rules import Turns
from scheduler_svc.replica.scheduler import ReplicaScheduler
from scheduler_svc.requests.admission import ModelLimits, Submission
from scheduler_svc.requests.request import Event
from scheduler_svc.requests.sampling import FinishReason, Sampling
from scheduler_svc.shapes.buckets import decode_buckets
from scheduler_svc.shapes.shape_config import KvGroup, ShapeConfig
from tests.bench.support.report import parser, report

REPLICAS: Final = 64
SLOTS: Final = 16
BLOCK_SIZE: Final = 16
CHUNK: Final = 128
MAX_MODEL_LEN: Final = 4096
CACHED: Final = (0, 10_000, 100_000, 1_000_000)
# Per replica; a little more than a million in all.
NUM_BLOCKS: Final = 20_000
CHUNK_S: Final = 0.010
DECODE_S: Final = 0.008
ROW_S: Final = 0.00005
VOCAB_SIZE: Final = 1 << 30


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request of the traffic."""

    at_s: float
    submission: Submission
    num_tokens: int


def sampling(max_tokens: int) -> Sampling:
    """Returns greedy parameters for exactly `max_tokens` tokens."""
    return Sampling(common_pb2.SamplingParams(max_tokens=max_tokens, ignore_eos=True))


def traffic(count: int, *, seed: int, crowd: int) -> list[Arrival]:
    """Returns ``count`` requests; the first ``crowd`` arrive together."""
    dice = random.Random(seed)
    fresh = itertools.count(1)
    systems = [list(itertools.islice(fresh, dice.randrange(100, 1500))) for _ in range(32)]
    arrivals = []
    now = 0.0
    for index in range(count):
        if index >= crowd:
            # In two of seven seconds, more requests arrive than the fleet can serve.
            now += dice.expovariate(1800.0 if now % 7 < 2 else 100.0)
        own = max(1, min(int(dice.lognormvariate(5.5, 1.0)), 2000))
        prompt = [*(dice.choice(systems) if dice.random() < 0.2 else ()), *itertools.islice(fresh, own)]
        num_tokens = min(int(16 * dice.paretovariate(1.3)), 400)
        arrivals.append(Arrival(now, Submission(
            request_id=f"request-{index}", prompt_token_ids=tuple(prompt), sampling=sampling(num_tokens),
            priority=dice.choices((0, 1, 2), (1, 8, 1))[0], tenant=f"tenant-{min(int(dice.paretovariate(1.0)), 8)}",
        ), num_tokens))  # fmt: skip
    return arrivals


class Counts:
    """Receives the events of every request; counts tokens and records how each request ended."""

    def __init__(self) -> None:
        self.tokens: Counter[str] = Counter()
        self.endings: dict[str, FinishReason | None] = {}

    def push(self, event: Event) -> None:
        """Counts an event."""
        self.tokens[event.request_id] += len(event.token_ids)
        if event.finish_reason is not None or event.error is not None:
            assert event.request_id not in self.endings, "a request ends once"
            self.endings[event.request_id] = event.finish_reason

    def push_tokens(self, request_ids: Sequence[str], token_ids: Sequence[int]) -> None:
        """Counts one token for each request."""
        self.tokens.update(request_ids)


@dataclass(frozen=True, slots=True)
class Sample:
    """One step: the number of waiting requests, its kind and rows, and its CPU time in microseconds."""

    waiting: int
    shape: tuple[str, int]
    spent_us: float


@dataclass
class Fleet:
    """An engine with its replicas and their clock."""

    now: float = 0.0
    samples: list[Sample] = field(default_factory=list)
    submits_us: list[float] = field(default_factory=list)
    sink: Counts = field(default_factory=Counts)

    def __post_init__(self) -> None:
        """Attaches the replicas."""
        self.engine = Engine(
            max_waiting=1 << 20,
            max_waiting_tokens=1 << 40,
            clock=lambda: self.now,
            order=PriorityFairOrder(30.0),
        )
        self.engine.model = ModelLimits(
            MAX_MODEL_LEN, VOCAB_SIZE, frozenset({"temperature"}), 0, frozenset({2})
        )
        shapes = ShapeConfig(MAX_MODEL_LEN, SLOTS, CHUNK, BLOCK_SIZE, decode_buckets("exp", max_batch=SLOTS))
        self.schedulers: list[ReplicaScheduler] = []
        self._idle: set[int] = set()
        # A heap of the steps in flight: end, replica, plan, and CPU time so far.
        self._running: list[tuple[float, int, StepPlan, float]] = []
        for index in range(REPLICAS):
            kv = KvCache(shapes, [KvGroup(GroupKind.FULL)], [NUM_BLOCKS], model="fleet")
            scheduler = ReplicaScheduler(shapes, kv, self.engine, Turns(1), clock=lambda: self.now)
            self.schedulers.append(scheduler)
            self._idle.add(index)
            self.engine.attach(f"replica-{index}", AttachedReplica(scheduler, lambda: None))

    def fill(self, num_cached: int) -> None:
        """Caches `num_cached` blocks, spread evenly over the replicas."""
        blocks_each = num_cached // REPLICAS
        fresh = itertools.count(1 << 24)
        for scheduler in self.schedulers:
            left = blocks_each * BLOCK_SIZE // CHUNK * CHUNK
            while left:
                size = min(left, MAX_MODEL_LEN - CHUNK)
                tokens = list(itertools.islice(fresh, size))
                filler = SequenceKv(tokens)
                kv = scheduler.kv
                assert kv.admit(filler)
                for start in range(0, size, CHUNK):
                    assert kv.grow(filler, start + CHUNK) is not None
                    kv.prefixes.index_chunk(filler, start, start + CHUNK)
                    filler.num_computed = start + CHUNK
                kv.release(filler)
                left -= size

    @property
    def num_cached(self) -> int:
        """Number of cached blocks over all replicas."""
        return sum(group.pool.num_cached for one in self.schedulers for group in one.kv.groups)

    def run(self, arrivals: Sequence[Arrival]) -> None:
        """Plays the traffic to its end and checks the result."""
        coming = iter(arrivals)
        following = next(coming, None)
        while following is not None or self._running:
            if following is not None and (not self._running or following.at_s <= self._running[0][0]):
                self.now = max(self.now, following.at_s)
                started = time.thread_time()
                self.engine.submit(following.submission, self.sink)
                self.submits_us.append((time.thread_time() - started) * 1e6)
                following = next(coming, None)
                # A woken replica starts at once.
                self._start_idle()
                continue
            self._finish_one()
        self._check(arrivals)

    def _start_idle(self) -> None:
        for index in [index for index in self._idle if self.schedulers[index].num_running]:
            self._start(index)

    def _start(self, index: int) -> None:
        scheduler = self.schedulers[index]
        started = time.thread_time()
        self.engine.dispatch()
        plan = scheduler.next_plan()
        spent = time.thread_time() - started
        if plan is None:
            self._idle.add(index)
            return
        self._idle.discard(index)
        duration = 0.0
        if isinstance(plan.work, Prefill):
            duration = CHUNK_S
        elif isinstance(plan.work, Decode):
            duration = DECODE_S + ROW_S * plan.work.bucket
        heapq.heappush(self._running, (self.now + duration, index, plan, spent))

    def _finish_one(self) -> None:
        self.now, index, plan, spent = heapq.heappop(self._running)
        shape: tuple[str, int] = ("none", 0)
        tokens: tuple[int, ...] = ()
        if isinstance(plan.work, Decode):
            shape, tokens = ("decode", len(plan.work.slots)), (7,) * len(plan.work.slots)
        elif isinstance(plan.work, Prefill):
            shape, tokens = ("prefill", int(plan.work.sample)), (7,) if plan.work.sample else ()
        result = StepResult(plan.step, token_ids=tokens, num_steps=int(plan.work is not None))
        waiting = len(self.engine.waiting)
        started = time.thread_time()
        self.schedulers[index].update(result)
        spent += time.thread_time() - started
        self.samples.append(Sample(waiting, shape, spent * 1e6))
        self._start(index)
        # Other replicas may take requeued and preempted requests.
        self._start_idle()

    def _check(self, arrivals: Sequence[Arrival]) -> None:
        wanted = {one.submission.request_id: one.num_tokens for one in arrivals}
        assert dict(self.sink.tokens) == wanted, "every request has exactly its tokens"
        assert set(self.sink.endings) == set(wanted)
        assert set(self.sink.endings.values()) == {FinishReason.LENGTH}
        assert self.engine.num_running == self.engine.num_waiting == 0
        for scheduler in self.schedulers:
            scheduler.kv.check_integrity()
            assert scheduler.kv.usage == 0


def relative(samples: Iterable[Sample]) -> list[tuple[Sample, float]]:
    """Returns each step with its cost divided by the median of steps of its shape."""
    shapes: defaultdict[tuple[str, int], list[Sample]] = defaultdict(list)
    for sample in samples:
        shapes[sample.shape].append(sample)
    result = []
    for members in shapes.values():
        median = statistics.median(one.spent_us for one in members)
        result += [(one, one.spent_us / median) for one in members]
    return result


def summary(samples: Sequence[Sample]) -> dict[str, float]:
    """Returns the number of steps, and their median and 99th percentile in microseconds."""
    spent = sorted(one.spent_us for one in samples)
    return {
        "steps": len(spent),
        "median_us": round(statistics.median(spent), 1),
        "p99_us": round(spent[len(spent) * 99 // 100], 1),
        "longest_us": round(spent[-1], 1),
    }


def by_waiting(samples: Sequence[Sample]) -> tuple[list[dict[str, float]], float]:
    """Returns a row per quartile of waiting requests, and the last quartile's cost over the first's."""
    ranked = sorted(relative(one for one in samples if one.waiting), key=lambda pair: pair[0].waiting)
    size = len(ranked) // 4
    quartiles = [ranked[i * size : (i + 1) * size] for i in range(4)]
    rows = []
    medians = []
    for members in quartiles:
        medians.append(statistics.median(cost for _, cost in members))
        waiting = {"waiting_from": members[0][0].waiting, "waiting_to": members[-1][0].waiting}
        rows.append({**waiting, **summary([one for one, _ in members]), "relative": round(medians[-1], 3)})
    return rows, medians[-1] / medians[0]


def main() -> None:
    """Runs the bench and prints its line."""
    options = parser(__doc__, "a fifth of the requests")
    quick = options.parse_args().quick
    count, crowd = (4000, 2500) if quick else (20_000, 8000)

    fleet = Fleet()
    fleet.run(traffic(count, seed=1, crowd=crowd))
    quartiles, waiting_ratio = by_waiting(fleet.samples)
    for row in quartiles:
        print(row)
    preemptions = sum((one.stats.preemptions for one in fleet.schedulers), Counter[str]())
    totals = {
        "requests": count,
        "tokens": fleet.sink.tokens.total(),
        "steps": len(fleet.samples),
        "simulated_s": round(fleet.now, 2),
        "cached_blocks": fleet.num_cached,
        "hit_tokens": sum(one.kv.stats.hit_tokens for one in fleet.schedulers),
        "preemptions": dict(preemptions),
        "submit_median_us": round(statistics.median(fleet.submits_us), 1),
    }
    print(totals)

    cached: dict[str, dict[str, float]] = {}
    arrivals = traffic(1000 if quick else 3000, seed=2, crowd=500)
    for level in CACHED:
        fleet = Fleet()
        fleet.fill(level)
        before = fleet.num_cached
        fleet.run(arrivals)
        cached[str(level)] = {"cached_blocks": before, **summary(fleet.samples)}
        print(cached[str(level)])
    ratios = {
        "waiting_high_over_low": waiting_ratio,
        "cached_1m_over_0": cached[str(CACHED[-1])]["median_us"] / cached["0"]["median_us"],
    }
    report("fleet", {"by_waiting": quartiles, "totals": totals, "by_cached": cached}, ratios)


if __name__ == "__main__":
    main()
