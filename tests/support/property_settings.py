"""How long property tests of state machines run: short in CI, ``TRIPTYCH_PROPERTY_SCALE`` times as long where somebody has the time."""

import os

from hypothesis import HealthCheck, settings


def machine(*, max_examples: int, stateful_step_count: int) -> settings:
    """Settings for a machine with that many lives of that many steps, times the scale."""
    return settings(
        max_examples=max_examples * int(os.environ.get("TRIPTYCH_PROPERTY_SCALE", "1")),
        stateful_step_count=stateful_step_count,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
    )
