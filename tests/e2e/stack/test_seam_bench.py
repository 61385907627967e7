"""The bench of the seam measures real processes: a scheduler and a worker with a null model."""

from pathlib import Path

import pytest

from tests.bench.seam import measure, null_model, summary

pytestmark = [pytest.mark.e2e, pytest.mark.stack, pytest.mark.slow]


async def test_the_bench_measures_a_null_model_through_the_services(tmp_path: Path) -> None:
    """All rows decode for the steps asked for, and lease, idle share and ratio follow from them."""
    rounds, steps = await measure(null_model((1, 4)), 400, 1, tmp_path)
    assert [one.batch for one in rounds] == [1, 4]
    for one in rounds:
        # The first token of the last row is not in the window, nor are steps between arrivals.
        assert one.window.tokens >= one.batch * 390
        assert len(one.window.lengths) == one.batch
        figures = summary([one], steps)
        assert figures["lease_steps"] > 1
        assert 0 <= figures["idle"] < 1
        assert one.step_s >= 0.0005
        assert figures["ratio"] > 0
