"""Counters of a replica's scheduler, which the metrics module exports."""

from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field
from typing import Final

# vLLM's histogram bounds, so that its dashboards keep working: seconds of a request's phases, and tokens of a
# step.
PHASE_SECONDS: Final = (
    0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680,
)  # fmt: skip
STEP_TOKENS: Final = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


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

    def add(self, other: "Distribution") -> None:
        """Adds the counts of another distribution with the same bounds."""
        self.counts = [mine + theirs for mine, theirs in zip(self.counts, other.counts, strict=True)]
        self.total += other.total


@dataclass(slots=True)
class BucketStats:
    """Decode steps at one compiled batch size."""

    steps: int = 0
    rows: int = 0
    """Requests in the steps; ``steps * bucket - rows`` rows were padding."""


@dataclass(slots=True)
class SchedulerStats:
    """Counters from the start of a replica."""

    chunks: int = 0
    """Prefill steps."""
    prefill_tokens: int = 0
    """Tokens in the prefill steps; the rest of ``chunks * chunk`` was padding."""
    chunk_tokens: Distribution = field(default_factory=lambda: Distribution(STEP_TOKENS))
    """Tokens by prefill step."""
    generated_tokens: int = 0
    """New tokens."""
    forced_tokens: int = 0
    """New tokens that a grammar left no choice about; they needed no forward pass."""
    buckets: dict[int, BucketStats] = field(default_factory=dict)
    """Decode steps by bucket."""
    preemptions: Counter[str] = field(default_factory=Counter)
    """Preempted requests by reason: "memory", "priority" or "fault"."""
    deferred: int = 0
    """Requests that waited for a prefix that another request computed."""
    forks: int = 0
    """Sequences that continued from the prompt that another sequence of their request computed."""
    adapter_placements: int = 0
    """LoRA adapters copied to the device."""
    adapter_loads: int = 0
    """LoRA adapters loaded into the memory of the replica's hosts."""
    adapter_evictions: int = 0
    """LoRA adapters whose memory there was freed for others."""
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
