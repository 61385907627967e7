"""Counters of a replica's scheduler, which the metrics module exports."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from protos.triptych.v1.worker_pb2 import WorkerReport
from scheduler_svc.policy.learned_times import LearnedTimes

# vLLM's histogram bounds, so that its dashboards keep working: seconds of a request's phases, tokens of steps
# and of requests, and preemptions of a request. vLLM ends the tokens of a request at the longest sequence;
# so does `/metrics`.
PHASE_SECONDS: Final = (
    0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680,
)  # fmt: skip
STEP_TOKENS: Final = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
REQUEST_TOKENS: Final = tuple(digit * 10**power for power in range(7) for digit in (1, 2, 5))
REQUEST_PREEMPTIONS: Final = (1, 2, 3, 4, 5, 10, 20)

STEP_SECONDS: Final = (
    0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1, 2, 5, 10, 30,
)  # fmt: skip
"""Bounds for the time of a step, or of a grammar's compilation."""


class Distribution:
    """A histogram with fixed bounds."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...] = PHASE_SECONDS) -> None:
        """Starts empty."""
        self.bounds = bounds
        """Upper bounds, inclusive, ascending."""
        self.counts = [0] * (len(bounds) + 1)
        """Observations by bound, not cumulated; the last entry counts values above all bounds."""
        self.total = 0.0
        """Sum of the values."""

    def observe(self, value: float, times: int = 1) -> None:
        """Counts a value ``times`` times."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    def __copy__(self) -> "Distribution":
        same = Distribution(self.bounds)
        same.add(self)
        return same

    def add(self, other: "Distribution") -> None:
        """Adds the counts of another distribution with the same bounds."""
        self.counts = [mine + theirs for mine, theirs in zip(self.counts, other.counts, strict=True)]
        self.total += other.total


@dataclass(slots=True)
class BucketStats:
    """Steps of one compiled size."""

    steps: int = 0
    rows: int = 0
    """Requests in decode steps, tokens in prefill steps; ``steps * bucket - rows`` were padding."""
    seconds: Distribution = field(default_factory=lambda: Distribution(STEP_SECONDS))
    """The time that the steps took on the worker."""


@dataclass(slots=True)
class SchedulerStats:
    """Counters from the start of a replica."""

    times: LearnedTimes = field(default_factory=LearnedTimes)
    """Seconds that a step takes."""
    prefills: dict[int, BucketStats] = field(default_factory=dict)
    """Prefill steps by bucket."""
    chunk_tokens: Distribution = field(default_factory=lambda: Distribution(STEP_TOKENS))
    """Tokens by prefill step."""
    observe_chunk: Callable[[int], None] = lambda _: None
    """Receives the tokens of each prefill step."""
    step_rows: Counter[int] = field(default_factory=Counter)
    """Decode steps by their requests."""
    plans: int = 0
    """Plans with work that were sent."""
    plans_ahead: int = 0
    """Those that the worker got before it had answered the plan before."""
    report: WorkerReport = field(default_factory=WorkerReport)
    """What the worker reported last."""
    grammar_compile_s: Distribution = field(default_factory=lambda: Distribution(STEP_SECONDS))
    """Seconds from asking for a grammar until the worker had it."""
    prompt_tokens: int = 0
    """Prompt tokens of requests that sent their first event."""
    cached_prompt_tokens: int = 0
    """Those of them that a prefix hit served."""
    generated_tokens: int = 0
    """New tokens."""
    forced_tokens: int = 0
    """New tokens that a grammar left no choice about; they needed no forward pass."""
    buckets: dict[int, BucketStats] = field(default_factory=dict)
    """Decode steps by bucket."""
    preemptions: Counter[str] = field(default_factory=Counter)
    """Preempted requests by reason: "memory", "priority" or "fault"."""
    num_preempted: int = 0
    """Their sum."""
    deferred: int = 0
    """Requests that waited for a prefix that another request computed."""
    not_finite: int = 0
    """Requests that failed because the model computed NaN or infinity."""
    forks: int = 0
    """Sequences that continued from the prompt that another sequence of their request computed."""
    stall_s: float = 0.0
    """Total seconds for which prefill chunks kept decoding requests waiting between two decode steps."""
    longest_stall_s: float = 0.0
    """The longest single stall."""
    queue_s: Distribution = field(default_factory=Distribution)
    """Seconds from a request's arrival until it first got a slot."""
    prefill_s: Distribution = field(default_factory=Distribution)
    """Seconds from its first slot until its first token."""
    decode_s: Distribution = field(default_factory=Distribution)
    """Seconds from its first token until its last."""
    inference_s: Distribution = field(default_factory=Distribution)
    """Seconds from its first slot until its last token."""
    request_preemptions: Distribution = field(default_factory=lambda: Distribution(REQUEST_PREEMPTIONS))
    """Preemptions of each request that ended by itself."""
    computed_tokens: Distribution = field(default_factory=lambda: Distribution(REQUEST_TOKENS))
    """Prompt tokens of each request that no prefix hit served."""

    def count_chunk(self, bucket: int, tokens: int, seconds: float) -> None:
        """Counts a prefill step with its tokens and its time on the worker."""
        run = self.prefills.setdefault(bucket, BucketStats())
        run.steps += 1
        run.rows += tokens
        run.seconds.observe(seconds)
        self.chunk_tokens.observe(tokens)
        self.times.observe_chunk(tokens, bucket, seconds)
        self.observe_chunk(tokens)

    def count_decode(self, num_rows: int, bucket: int, seconds: float) -> None:
        """Counts a decode step that took that long on the worker."""
        stats = self.buckets.get(bucket)
        if stats is None:
            stats = self.buckets[bucket] = BucketStats()
        stats.steps += 1
        stats.rows += num_rows
        stats.seconds.observe(seconds)
        self.step_rows[num_rows] += 1
        self.times.decode.observe(num_rows, seconds)

    def count_plan(self, has_work: bool, *, ahead: bool) -> None:
        """Counts a plan that is sent; `ahead` says whether another one is in flight."""
        self.plans += has_work
        self.plans_ahead += has_work and ahead
