"""What a replica's scheduler counts while it runs; ``metrics`` turns it into metrics."""

from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field
from typing import Final

# vLLM's bucket bounds: dashboards made for it keep working. Seconds of a request's phases, and tokens of a step.
PHASE_SECONDS: Final = (
    0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680,
)  # fmt: skip
STEP_TOKENS: Final = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


class Distribution:
    """How often values fell between fixed bounds.

    Attributes:
        bounds: upper bounds, inclusive, ascending; what is above the last one counts, too.
        counts: observations by bound, not cumulated; the last entry is those above all bounds.
        total: sum of the values.
    """

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...] = PHASE_SECONDS) -> None:
        """Starts empty."""
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Counts a value."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    def add(self, other: "Distribution") -> None:
        """Counts everything that another one with the same bounds has counted."""
        self.counts = [mine + theirs for mine, theirs in zip(self.counts, other.counts, strict=True)]
        self.total += other.total


@dataclass(slots=True)
class BucketStats:
    """Decode steps at one compiled batch size.

    Attributes:
        steps: how many.
        rows: requests in them; ``steps * bucket - rows`` rows were padding.
    """

    steps: int = 0
    rows: int = 0


@dataclass(slots=True)
class SchedulerStats:
    """Counters from the start of a replica.

    Attributes:
        chunks: prefill steps.
        prefill_tokens: tokens in them; the rest of ``chunks * chunk`` was padding.
        chunk_tokens: the same by chunk.
        generated_tokens: new tokens.
        forced_tokens: those of them that a grammar left no choice about, so that no forward pass was needed.
        buckets: decode steps by bucket.
        preemptions: requests that had to give way, by why: "memory", "priority" or "fault".
        deferred: requests that waited for a prefix that another one computed.
        forks: sequences that went on from the prompt that another sequence of their request computed.
        stall_s: seconds that decoding requests stood still for chunks between two decode steps, in total.
        longest_stall_s: the longest single one.
        queue_s: by request, seconds from its arrival until it first got a slot.
        prefill_s: by request, seconds from then until its first token.
        decode_s: by request, seconds from then until its last token.
    """

    chunks: int = 0
    prefill_tokens: int = 0
    chunk_tokens: Distribution = field(default_factory=lambda: Distribution(STEP_TOKENS))
    generated_tokens: int = 0
    forced_tokens: int = 0
    buckets: dict[int, BucketStats] = field(default_factory=dict)
    preemptions: Counter[str] = field(default_factory=Counter)
    deferred: int = 0
    forks: int = 0
    stall_s: float = 0.0
    longest_stall_s: float = 0.0
    queue_s: Distribution = field(default_factory=Distribution)
    prefill_s: Distribution = field(default_factory=Distribution)
    decode_s: Distribution = field(default_factory=Distribution)
