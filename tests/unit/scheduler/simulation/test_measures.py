"""Gaps between tokens, from the events of rows that decode together."""

from collections import Counter

from scheduler_svc.requests.request import Event
from scheduler_svc.simulation.measures import Measures


def test_a_row_that_misses_a_step_has_a_gap_of_its_own() -> None:
    now = 0.0
    measures = Measures(lambda: now, lambda _: None)
    for name in "ab":
        measures.arrived(name, "", 0.0)
        measures.push(Event(name, (7,)))
    for rows in ("ab", "ab", "b", "ab", "ab"):
        now += 1.0
        measures.push_tokens([*rows], [7] * len(rows))
    assert measures.tenants[""].gaps_us == Counter({1_000_000: 8, 2_000_000: 1})
