"""How long property tests run: briefly by default, ``TRIPTYCH_PROPERTY_SCALE`` times as long on request."""

import os

from hypothesis import HealthCheck, settings

_SCALE = int(os.environ.get("TRIPTYCH_PROPERTY_SCALE", "1"))


def machine(*, max_examples: int, stateful_step_count: int) -> settings:
    """Returns settings for a state machine; the scale multiplies the number of examples."""
    return settings(
        max_examples=max_examples * _SCALE,
        stateful_step_count=stateful_step_count,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
    )


def scaled(max_examples: int) -> settings:
    """Returns settings for a property whose examples take long."""
    return settings(max_examples=max_examples * _SCALE, deadline=None)
