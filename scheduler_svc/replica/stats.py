"""Counters of a replica, exported by the metrics module."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from protos.errors import NotFinite, TriptychError
from protos.steps import PoolShape
from protos.triptych.v1.worker_pb2 import WorkerReport
from scheduler_svc.policy.learned_times import LearnedTimes
from scheduler_svc.requests.request import Request

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
    """Step times on the worker."""


@dataclass(slots=True)
class ReplicaStats:
    """Counters of every replica, from its start."""

    times: LearnedTimes = field(default_factory=LearnedTimes)
    """Seconds of a step."""
    report: WorkerReport = field(default_factory=WorkerReport)
    """The latest report of the worker."""
    queue_s: Distribution = field(default_factory=Distribution)
    """Seconds from a request's arrival until its first slot."""
    not_finite: int = 0
    """Requests failed because the model computed NaN or infinity."""

    def count_start(self, request: Request, now_s: float) -> None:
        """Notes that a request got a slot."""
        delivery = request.delivery
        if delivery.first_scheduled_s is None:
            delivery.first_scheduled_s = now_s
            self.queue_s.observe(now_s - delivery.accepted_s)
        if request.trace is not None:
            request.trace.runs(now_s)

    def count_fault(self, request: Request, error: TriptychError) -> TriptychError:
        """Counts a request failed by the worker; returns the error for its client."""
        if not isinstance(error, NotFinite):
            return error
        self.not_finite += 1
        return NotFinite(f"{error.message} for request {request.request_id}")


@dataclass(slots=True)
class PoolStats(ReplicaStats):
    """Counters of a replica of a pooling model."""

    batches: Counter[PoolShape] = field(default_factory=Counter)
    """Steps by shape."""
    rows: Counter[PoolShape] = field(default_factory=Counter)
    """Requests in these steps by shape; the other rows were padding."""
    tokens: Counter[PoolShape] = field(default_factory=Counter)
    """Prompt tokens in these steps by shape; the other tokens were padding."""
    seconds: dict[PoolShape, Distribution] = field(default_factory=dict)
    """Step times on the worker, by shape."""


@dataclass(slots=True)
class SchedulerStats(ReplicaStats):
    """Counters of a replica of a generating model."""

    prefills: dict[int, BucketStats] = field(default_factory=dict)
    """Prefill steps by bucket."""
    chunk_tokens: Distribution = field(default_factory=lambda: Distribution(STEP_TOKENS))
    """Tokens by prefill step."""
    observe_chunk: Callable[[int], None] = lambda _: None
    """Receives the tokens of each prefill step."""
    buckets: dict[int, BucketStats] = field(default_factory=dict)
    """Decode steps by bucket."""
    step_rows: Counter[int] = field(default_factory=Counter)
    """Decode steps by their requests."""
    observe_batch: Callable[[int], None] = lambda _: None
    """Receives the requests of each decode step."""
    plans: int = 0
    """Plans with work."""
    plans_ahead: int = 0
    """Those sent before the answer to an earlier plan."""
    grammar_compile_s: Distribution = field(default_factory=lambda: Distribution(STEP_SECONDS))
    """Seconds of the worker to compile a grammar."""
    prompt_tokens: int = 0
    """Prompt tokens of requests with a first event."""
    cached_prompt_tokens: int = 0
    """Those served by prefix hits."""
    generated_tokens: int = 0
    """New tokens."""
    forced_tokens: int = 0
    """New tokens forced by a grammar; they needed no forward pass."""
    preemptions: Counter[str] = field(default_factory=Counter)
    """Preempted requests by reason: "memory", "priority", "share" or "fault"."""
    num_preempted: int = 0
    """Their sum."""
    deferred: int = 0
    """Requests deferred until another request had computed their prefix."""
    forks: int = 0
    """Sequences started from a prompt computed by another sequence of their request."""
    stall_s: float = 0.0
    """Total seconds for which prefill chunks kept decoding requests waiting between two decode steps."""
    longest_stall_s: float = 0.0
    """The longest single stall."""
    prefill_s: Distribution = field(default_factory=Distribution)
    """Seconds from a request's first slot until its first token."""
    decode_s: Distribution = field(default_factory=Distribution)
    """Seconds from its first token until its last."""
    inference_s: Distribution = field(default_factory=Distribution)
    """Seconds from its first slot until its last token."""
    request_preemptions: Distribution = field(default_factory=lambda: Distribution(REQUEST_PREEMPTIONS))
    """Preemptions of each request that ended by itself."""
    computed_tokens: Distribution = field(default_factory=lambda: Distribution(REQUEST_TOKENS))
    """Prompt tokens of each request not served by a prefix hit."""

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
        """Counts a decode step with its requests and its time on the worker."""
        stats = self.buckets.get(bucket)
        if stats is None:
            stats = self.buckets[bucket] = BucketStats()
        stats.steps += 1
        stats.rows += num_rows
        stats.seconds.observe(seconds)
        self.step_rows[num_rows] += 1
        self.times.decode.observe(num_rows, seconds)
        self.observe_batch(num_rows)

    def count_stall(self, seconds: float) -> None:
        """Counts a stall."""
        self.stall_s += seconds
        self.longest_stall_s = max(self.longest_stall_s, seconds)

    def count_end(self, request: Request, now_s: float) -> None:
        """Counts a request that ended by itself."""
        delivery = request.delivery
        if delivery.first_token_s is not None:
            self.decode_s.observe(now_s - delivery.first_token_s)
        if delivery.first_scheduled_s is not None:
            self.inference_s.observe(now_s - delivery.first_scheduled_s)
        self.request_preemptions.observe(delivery.num_preemptions)
        self.computed_tokens.observe(max(0, request.num_prompt_tokens - request.kv.num_cached))
