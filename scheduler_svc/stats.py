"""What a replica's scheduler counts while it runs; ``metrics`` turns it into metrics."""

from collections import Counter
from dataclasses import dataclass, field


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
        generated_tokens: tokens sampled.
        buckets: decode steps by bucket.
        preemptions: requests that had to give way, by why: "memory", "priority" or "fault".
        deferred: requests that waited for a prefix that another one computed.
        stall_s: seconds that decoding requests stood still for chunks between two decode steps, in total.
        longest_stall_s: the longest single one.
    """

    chunks: int = 0
    prefill_tokens: int = 0
    generated_tokens: int = 0
    buckets: dict[int, BucketStats] = field(default_factory=dict)
    preemptions: Counter[str] = field(default_factory=Counter)
    deferred: int = 0
    stall_s: float = 0.0
    longest_stall_s: float = 0.0
