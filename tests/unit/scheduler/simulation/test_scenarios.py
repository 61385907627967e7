"""The promises of the policies, each under the traffic that would break it, in virtual time."""

from collections.abc import Callable

import pytest

from tests.support.scheduler.scenarios import SCENARIOS, Figures


@pytest.mark.parametrize("quick", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["quick", "full"])
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_figures_keep_their_limits(scenario: Callable[[bool], Figures], quick: bool) -> None:
    broken = {name: figure for name, figure in scenario(quick).items() if figure.ratio_to(figure.limit) > 1}
    assert not broken
