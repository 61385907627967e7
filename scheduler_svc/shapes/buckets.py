"""Decode buckets: the batch sizes that decode graphs are compiled for.

Pure functions. The strategies and their settings follow vLLM-RBLN (``VLLM_RBLN_DECODE_BATCH_BUCKET_*``). They
start at the largest batch and go down by division (exponential) or subtraction (linear), until a bucket would
be below the minimum or the limit of buckets is reached. Manual buckets are sorted; repeated sizes count once.
"""

from bisect import bisect_left
from collections.abc import Sequence
from typing import Literal, get_args

BucketStrategy = Literal["exponential", "exp", "linear", "manual"]


def decode_buckets(
    strategy: BucketStrategy,
    *,
    max_batch: int,
    minimum: int = 1,
    step: int = 2,
    limit: int = 32,
    manual: Sequence[int] = (),
) -> tuple[int, ...]:
    """Returns the buckets, ascending; the last one is ``max_batch``.

    Example:
        >>> decode_buckets("exp", max_batch=32, minimum=2, step=2, limit=4)
        (4, 8, 16, 32)

    Raises:
        ValueError: naming the bad setting and the rule.
    """
    if max_batch < 1:
        raise ValueError(f"the largest decode batch must be at least 1, not {max_batch}")
    if strategy == "manual":
        return _manual(manual, max_batch)
    if strategy not in get_args(BucketStrategy):
        raise ValueError(f"unknown bucket strategy {strategy!r}: use exponential (exp), linear or manual")
    if not 1 <= minimum <= max_batch:
        raise ValueError(
            f"the smallest bucket must be between 1 and the largest batch {max_batch}, not {minimum}"
        )
    if limit < 1:
        raise ValueError(f"the number of buckets must be at least 1, not {limit}")
    exponential = strategy in ("exponential", "exp")
    if step < (2 if exponential else 1):
        raise ValueError(
            f"the bucket step must be at least {2 if exponential else 1} for {strategy} buckets, not {step}"
        )
    buckets: list[int] = []
    size = max_batch
    while size >= minimum and len(buckets) < limit:
        buckets.append(size)
        size = size // step if exponential else size - step
    return tuple(reversed(buckets))


def _manual(buckets: Sequence[int], max_batch: int) -> tuple[int, ...]:
    if not buckets:
        raise ValueError("manual buckets need a list, for example 1,2,4,8")
    if any(size < 1 for size in buckets):
        raise ValueError(f"manual buckets must be at least 1: {list(buckets)}")
    chosen = tuple(sorted(set(buckets)))
    if chosen[-1] != max_batch:
        raise ValueError(
            f"the largest manual bucket must equal the largest batch {max_batch}, not {chosen[-1]}"
        )
    return chosen


def stage_batch(max_num_seqs: int, stages: int) -> int:
    """Returns the most rows of a decode step: the requests of a replica are divided among its stages.

    Args:
        max_num_seqs: slots of the replica.
        stages: pipeline stages, at least 1.

    Raises:
        ValueError: if a stage would have no row.
    """
    if max_num_seqs < stages:
        raise ValueError(
            f"max_num_seqs {max_num_seqs} is smaller than the {stages} pipeline stages; each runs a decode batch "
            f"of its own, of max_num_seqs // {stages} rows"
        )
    return max_num_seqs // stages


def bucket_for(batch: int, buckets: Sequence[int]) -> int:
    """Returns the smallest bucket that holds ``batch`` rows.

    Raises:
        ValueError: if none does.
    """
    index = bisect_left(buckets, batch)
    if index == len(buckets):
        raise ValueError(f"no bucket holds {batch} rows; the largest is {buckets[-1]}")
    return buckets[index]
