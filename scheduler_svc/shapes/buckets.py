"""Buckets: the sizes of compiled steps, by the settings or fitted to observed traffic.

Decode buckets count rows, prefill buckets the tokens of a chunk.

Pure functions. The strategies and their settings follow vLLM-RBLN (``VLLM_RBLN_DECODE_BATCH_BUCKET_*``). They
start at the largest size and go down by division (exponential) or subtraction (linear), until a bucket would
be below the minimum or the limit of buckets is reached. Manual buckets are sorted; repeated sizes count once.
"""

from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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
    """Returns the buckets, ascending; the last is ``max_batch``.

    Example:
        >>> decode_buckets("exp", max_batch=32, minimum=2, step=2, limit=4)
        (4, 8, 16, 32)

    Raises:
        ValueError: naming the bad setting and the rule.
    """
    if max_batch < 1:
        raise ValueError(f"the largest decode batch must be at least 1, not {max_batch}")
    if strategy == "manual":
        return _manual(manual, max_batch, "", "the largest batch")
    if not 1 <= minimum <= max_batch:
        raise ValueError(
            f"the smallest bucket must be between 1 and the largest batch {max_batch}, not {minimum}"
        )
    return tuple(sorted(_descend(strategy, max_batch, minimum, step, limit, "")[:limit]))


SMALLEST_CHUNK = 64
"""The default of the smallest prefill bucket, tokens: below, GPUs and NPUs save no time, and CPUs little."""


def prefill_buckets(
    strategy: BucketStrategy,
    *,
    chunk: int,
    block_size: int,
    minimum: int = SMALLEST_CHUNK,
    step: int = 2,
    limit: int = 4,
    manual: Sequence[int] = (),
) -> tuple[int, ...]:
    """Returns the sizes of compiled prefill chunks, ascending; the last is ``chunk``.

    Sizes that neither divide ``block_size`` nor are multiples of it are left out.

    Example:
        >>> prefill_buckets("exp", chunk=512, block_size=16)
        (64, 128, 256, 512)

    Raises:
        ValueError: naming the bad setting and the rule.
    """
    if strategy == "manual":
        chosen = _manual(manual, chunk, "prefill ", "the largest chunk")
        if bad := [size for size in chosen if not divides(size, block_size)]:
            raise ValueError(
                f"the prefill bucket {bad[0]} and block_size {block_size} must divide one another"
            )
        return chosen
    sizes = _descend(strategy, chunk, min(minimum, chunk), step, limit, "prefill ")
    return tuple(sorted([size for size in sizes if divides(size, block_size)][:limit]))


def divides(chunk: int, block_size: int) -> bool:
    """Whether chunks of a size line up with blocks: one is a multiple of the other."""
    return chunk % block_size == 0 or block_size % chunk == 0


def _descend(
    strategy: BucketStrategy, largest: int, minimum: int, step: int, limit: int, kind: str
) -> list[int]:
    """Returns the sizes from the largest down to the minimum; `kind` is for errors."""
    if strategy not in get_args(BucketStrategy):
        raise ValueError(f"unknown bucket strategy {strategy!r}: use exponential (exp), linear or manual")
    if limit < 1:
        raise ValueError(f"the number of {kind}buckets must be at least 1, not {limit}")
    exponential = strategy in ("exponential", "exp")
    if step < (2 if exponential else 1):
        raise ValueError(
            f"the {kind}bucket step must be at least {2 if exponential else 1} for {strategy} buckets, not {step}"
        )
    if not exponential:
        return list(range(largest, minimum - 1, -step))
    sizes = []
    while largest >= minimum:
        sizes.append(largest)
        largest //= step
    return sizes


def _manual(buckets: Sequence[int], largest: int, kind: str, name: str) -> tuple[int, ...]:
    if not buckets:
        raise ValueError(f"manual {kind}buckets need a list, for example 1,2,4,8")
    if any(size < 1 for size in buckets):
        raise ValueError(f"manual {kind}buckets must be at least 1: {list(buckets)}")
    chosen = tuple(sorted(set(buckets)))
    if chosen[-1] != largest:
        raise ValueError(f"the largest manual {kind}bucket must equal {name} {largest}, not {chosen[-1]}")
    return chosen


def stage_batch(max_num_seqs: int, stages: int) -> int:
    """Returns the most rows of a decode step: the slots of a replica divided among its pipeline stages."""
    if max_num_seqs < stages:
        raise ValueError(
            f"max_num_seqs {max_num_seqs} is smaller than the {stages} pipeline stages; each runs a decode batch "
            f"of its own, of max_num_seqs // {stages} rows"
        )
    return max_num_seqs // stages


def chunk_for(rest: int, buckets: Sequence[int]) -> int:
    """Returns the bucket of a prompt's next chunk: the smallest that holds the rest, else the largest."""
    return bucket_for(min(rest, buckets[-1]), buckets)


def bucket_for(batch: int, buckets: Sequence[int]) -> int:
    """Returns the smallest bucket that holds ``batch`` rows; `ValueError` if none does."""
    index = bisect_left(buckets, batch)
    if index == len(buckets):
        raise ValueError(f"no bucket holds {batch} rows; the largest is {buckets[-1]}")
    return buckets[index]


@dataclass(frozen=True, slots=True)
class BucketUsage:
    """How the steps of a histogram use a set of buckets. Rows of prefill steps are tokens."""

    buckets: tuple[int, ...]
    """Ascending."""
    num_steps: int
    """Steps."""
    num_rows: int
    """Rows that belong to requests."""
    padded_rows: int
    """Rows that are padding."""

    @property
    def rows_run(self) -> int:
        """Rows that run, padding included."""
        return self.num_rows + self.padded_rows

    @property
    def padding_share(self) -> float:
        """Share of padding among all rows, 0 to 1."""
        return self.padded_rows / self.rows_run if self.rows_run else 0.0


@dataclass(frozen=True, slots=True)
class BucketPlan:
    """The current and the best buckets, for the same steps."""

    current: BucketUsage
    best: BucketUsage

    @property
    def gain(self) -> float:
        """Share of the rows that the best buckets save, 0 to 1; negative if they are too few."""
        return 1 - self.best.rows_run / self.current.rows_run if self.current.rows_run else 0.0


def usage_of(counts: Mapping[int, int], buckets: Sequence[int]) -> BucketUsage:
    """Returns how steps with these numbers of rows use these buckets.

    Raises:
        ValueError: if a step has more rows than the largest bucket.
    """
    num_steps = num_rows = total = 0
    for rows, steps in counts.items():
        num_steps += steps
        num_rows += steps * rows
        total += steps * bucket_for(rows, buckets)
    return BucketUsage(tuple(buckets), num_steps, num_rows, total - num_rows)


def plan_buckets(
    counts: Mapping[int, int], current: Sequence[int], *, max_batch: int, graphs: int
) -> BucketPlan:
    """Returns the current and the best buckets, at most ``graphs``, for steps by number of rows.

    Raises:
        ValueError: naming the bad value and the rule.
    """
    best = best_buckets(counts, max_batch=max_batch, graphs=graphs)
    return BucketPlan(current=usage_of(counts, current), best=usage_of(counts, best))


def plan_chunks(
    counts: Mapping[int, int], current: Sequence[int], *, block_size: int, graphs: int
) -> BucketPlan:
    """Returns the current and the best prefill buckets, at most ``graphs``, for chunks by number of tokens.

    Chunks above the largest bucket count as its size. The best buckets line up with blocks and are not below
    the first, or `SMALLEST_CHUNK`.
    """
    chunk = current[-1]
    counts = _merged(counts, range(1, chunk + 1))
    sizes = [size for size in range(min(SMALLEST_CHUNK, current[0]), chunk + 1) if divides(size, block_size)]
    best = best_buckets(_merged(counts, sizes), max_batch=chunk, graphs=graphs)
    return BucketPlan(current=usage_of(counts, current), best=usage_of(counts, best))


def _merged(counts: Mapping[int, int], sizes: Sequence[int]) -> Counter[int]:
    """Returns the counts by the smallest of the sizes that holds each, else the largest."""
    merged: Counter[int] = Counter()
    for size, steps in counts.items():
        merged[chunk_for(size, sizes)] += steps
    return merged


def best_buckets(counts: Mapping[int, int], *, max_batch: int, graphs: int) -> tuple[int, ...]:
    """Returns at most ``graphs`` buckets, the last ``max_batch``, with the fewest rows in total.

    Every bucket but the last is an observed size, because lowering it to the next such size would pad less.
    Take sizes s_1 < ... < s_n = max_batch, with P_j steps of up to s_j rows. The fewest rows for sizes up to
    s_j with k buckets are ``cost(k, j) = min over i < j of cost(k - 1, i) + (P_j - P_i) * s_j``. For a fixed
    k, these are minima of lines of falling slope (-P_i) at rising points (s_j). The convex hull trick finds
    them in O(n), so the total is O(graphs * n), in integers.

    Example:
        >>> best_buckets({1: 100, 2: 10, 5: 50, 6: 50}, max_batch=8, graphs=3)
        (1, 6, 8)

    Raises:
        ValueError: naming the bad value and the rule.
    """
    if max_batch < 1:
        raise ValueError(f"the largest decode batch must be at least 1, not {max_batch}")
    if graphs < 1:
        raise ValueError(f"the number of graphs must be at least 1, not {graphs}")
    observed = sorted(rows for rows, steps in counts.items() if steps)
    if observed and not 1 <= observed[0] <= observed[-1] <= max_batch:
        raise ValueError(
            f"steps have {observed[0]} to {observed[-1]} rows; only 1 to {max_batch} fit the largest decode batch"
        )
    sizes = observed if observed[-1:] == [max_batch] else [*observed, max_batch]
    if graphs >= len(sizes):
        return tuple(sizes)
    # Steps with up to that size; index 0 stands for no size.
    upto = [0]
    for size in sizes:
        upto.append(upto[-1] + counts.get(size, 0))
    costs = [0, *(steps * size for steps, size in zip(upto[1:], sizes, strict=True))]
    # For each number of buckets from 2 on: index of the last but one bucket, by index of the last.
    before: list[list[int]] = []
    for buckets in range(2, graphs + 1):
        costs, chosen = _one_more(costs, sizes, upto, buckets)
        before.append(chosen)
    index = len(sizes)
    best = [sizes[index - 1]]
    for chosen in reversed(before):
        index = chosen[index]
        best.append(sizes[index - 1])
    return tuple(reversed(best))


def _one_more(
    costs: list[int], sizes: list[int], upto: list[int], buckets: int
) -> tuple[list[int], list[int]]:
    """Extends the cheapest choices of ``buckets - 1`` buckets by another, by index of the last bucket."""
    new, chosen = list(costs), [0] * len(costs)
    # Indices i of lines y(x) = costs[i] - upto[i] * x that are lowest somewhere at or after the current x.
    hull: deque[int] = deque()
    for last in range(buckets, len(costs)):
        size, line = sizes[last - 1], last - 1
        while len(hull) > 1:
            first, second = hull[-2], hull[-1]
            # Wherever `line` is below `first`, it is also below `second`.
            if (costs[line] - costs[first]) * (upto[second] - upto[first]) > (
                costs[second] - costs[first]
            ) * (upto[line] - upto[first]):
                break
            hull.pop()
        hull.append(line)
        lowest = costs[hull[0]] - upto[hull[0]] * size
        while len(hull) > 1 and (following := costs[hull[1]] - upto[hull[1]] * size) <= lowest:
            hull.popleft()
            lowest = following
        chosen[last] = hull[0]
        new[last] = upto[last] * size + lowest
    return new, chosen
