"""What tenants get from one another's load, in virtual time."""

from collections import Counter
from collections.abc import Callable

import pytest

from scheduler_svc.settings import Settings
from scheduler_svc.simulation.requests import SimulatedRequest
from scheduler_svc.simulation.run import Simulation
from tests.support.scheduler.simulated import H100_8B, simulated


def streams(number: int, turns: int, prompt: int, output: int, *, tenant: str) -> list[SimulatedRequest]:
    """Returns requests of clients that send the next one when the last has ended."""
    return [
        SimulatedRequest(0.0, prompt, output, tenant=tenant, session=f"{tenant}{stream}")
        for stream in range(number)
        for _ in range(turns)
    ]


class Watched(Simulation):
    """A simulation that ends at a time and calls a function every 10 ms."""

    def __init__(self, requests: list[SimulatedRequest], until_s: float, **settings: object) -> None:
        """Prepares the simulation; `settings` are fields of the scheduler's."""
        super().__init__(requests, Settings(**settings), [H100_8B])  # type: ignore[arg-type]
        self._until_s = until_s
        self.watch: Callable[[], None] = lambda: None

    def _look(self) -> None:
        self.watch()
        self._look_s = self.now + 0.01
        if self.now > self._until_s:
            raise TimeoutError

    def served(self) -> dict[str, int]:
        """Returns the tokens that each tenant was served, computed ones of prompts included."""
        return {
            name: one.tokens + one.prompt_tokens - one.hit_tokens
            for name, one in self._measures.tenants.items()
        }


def test_a_backlog_of_one_tenant_does_not_hold_up_another() -> None:
    """While 800 requests of one tenant wait, another's are next, however old the others are."""
    flood = streams(864, 2, 500, 50, tenant="a")
    others = [SimulatedRequest(float(at), 100, 100, tenant="b") for at in range(5, 40, 10)]
    figures = simulated(flood + others, ageing_s=1.0)
    assert figures["tenants"]["a"]["ttft_s"]["p50"] > 6
    assert figures["tenants"]["b"]["ttft_s"]["p99"] <= 2.6


@pytest.mark.parametrize(
    ("a", "b"),
    [
        pytest.param((250, 100, 200), (200, 100, 200), marks=pytest.mark.slow),
        pytest.param((100, 2000, 30), (200, 100, 200), marks=pytest.mark.slow),
        pytest.param((250, 100, 300), (100, 3000, 20), marks=pytest.mark.slow),
        pytest.param((250, 200, 800), (200, 100, 50), marks=pytest.mark.slow),
        ((70, 100, 400), (20, 1000, 400)),
    ],
)
def test_weights_are_shares_of_tokens_under_any_backlog(
    a: tuple[int, int, int], b: tuple[int, int, int]
) -> None:
    """A tenant of four times the weight gets four times the tokens, whatever each sends."""
    requests = [
        *streams(a[0], 50, *a[1:], tenant="a"),
        *streams(b[0], 50, *b[1:], tenant="b"),
    ]
    model = Watched(requests, 90.0, max_num_seqs=32, tenant_weights={"a": 4.0})
    served: list[dict[str, int]] = []
    model.watch = lambda: served.append(model.served()) if model.now > 10 * (1 + len(served)) else None
    with pytest.raises(TimeoutError):
        model.run()
    ratio = (served[-1]["a"] - served[0]["a"]) / (served[-1]["b"] - served[0]["b"])
    assert 3.6 <= ratio <= 4.4


def test_a_tenant_gets_a_place_back_from_one_that_holds_them_all() -> None:
    """It need not wait until one of 64 long answers ends, whether slots or memory are taken."""
    for prompt, blocks in ((100, None), (5000, 64 * 50)):
        holders = streams(64, 1, prompt, 4000, tenant="a")
        late = [SimulatedRequest(20.0 + 3 * number, 1000, 100, tenant="b") for number in range(3)]
        figures = simulated(holders + late, num_blocks=blocks)
        assert figures["tenants"]["b"]["ttft_s"]["p99"] <= 2.6
        assert blocks is not None or figures["preemptions"] <= 3


def test_shares_of_places_do_not_swing() -> None:
    """A tenant takes back half of its share at most; the rest comes when answers end."""
    requests = streams(64, 2, 100, 2000, tenant="a")
    requests += [SimulatedRequest(5.0, 100, 2000, tenant="b") for number in range(128)]
    model = Watched(requests, 200.0)
    held: list[Counter[str]] = []
    model.watch = lambda: held.append(
        Counter(one.tenant for one in model.engine.live() if one.slot is not None)
    )
    figures = model.run()
    assert max(one["b"] for one in held[:2000]) >= 16
    assert figures["preemptions"] <= 32
