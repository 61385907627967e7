"""How many examples long property tests run.

They run a quarter of their numbers by default, all of them in the slow tier, and more on request:
``TRIPTYCH_PROPERTY_SCALE`` is the factor. ``TRIPTYCH_PROPERTY_SEEDS`` is the number of examples of each
state machine.
"""

import os
import secrets

from hypothesis import HealthCheck, settings

_SCALE = float(os.environ.get("TRIPTYCH_PROPERTY_SCALE", "0.25"))
_SEEDS = int(os.environ.get("TRIPTYCH_PROPERTY_SEEDS", "0"))


def machine(*, max_examples: int, stateful_step_count: int) -> settings:
    """Returns settings for a state machine; the scale multiplies the number of examples."""
    long = settings(scaled(max_examples), stateful_step_count=stateful_step_count)
    return settings(long, max_examples=_SEEDS) if _SEEDS else long


def scaled(max_examples: int) -> settings:
    """Returns settings for a property whose examples take long."""
    return settings(
        max_examples=max(1, round(max_examples * _SCALE)),
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
    )


def drawn_seed() -> int:
    """Returns a seed for the properties of another process: a new one at full scale, else always 0."""
    return secrets.randbits(32) if _SCALE >= 1 else 0
