"""The planned buckets are the best ones, compared with trying all of them."""

from itertools import combinations

import hypothesis.strategies as st
import pytest
from hypothesis import given

from scheduler_svc.shapes.buckets import best_buckets, usage_of
from tests.support.property_settings import scaled

pytestmark = pytest.mark.property


@given(
    max_batch=st.integers(1, 11),
    graphs=st.integers(1, 12),
    data=st.data(),
)
@scaled(400)
def test_no_other_buckets_pad_less(max_batch: int, graphs: int, data: st.DataObject) -> None:
    """No set of at most that many sizes that ends with the largest batch runs fewer rows."""
    counts = data.draw(st.dictionaries(st.integers(1, max_batch), st.integers(0, 50) | st.just(10**12)))
    best = best_buckets(counts, max_batch=max_batch, graphs=graphs)
    assert list(best) == sorted(set(best))
    assert best[-1] == max_batch
    assert len(best) <= graphs
    least = min(
        usage_of(counts, (*chosen, max_batch)).padded_rows
        for others in range(min(graphs, max_batch))
        for chosen in combinations(range(1, max_batch), others)
    )
    assert usage_of(counts, best).padded_rows == least


@given(st.dictionaries(st.integers(1, 300), st.integers(1, 10**6), min_size=1), st.integers(1, 40))
@scaled(200)
def test_the_convex_hull_finds_what_the_plain_recursion_finds(counts: dict[int, int], graphs: int) -> None:
    """On larger histograms, both run the same number of rows."""
    sizes = sorted({*counts, 300})
    upto = [0]
    for size in sizes:
        upto.append(upto[-1] + counts.get(size, 0))
    costs: list[float] = [0.0] + [float("inf")] * len(sizes)
    least = float("inf")
    for _ in range(graphs):
        costs = [float("inf")] + [
            min(costs[i] + (upto[j] - upto[i]) * sizes[j - 1] for i in range(j)) for j in range(1, len(upto))
        ]
        least = min(least, costs[-1])
    usage = usage_of(counts, best_buckets(counts, max_batch=300, graphs=graphs))
    assert usage.num_rows + usage.padded_rows == least
