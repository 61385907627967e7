"""Pauses of random length."""

from gateway.scheduler_link.jitter import jittered


def test_pauses_spread() -> None:
    """Gateways that pause at the same moment come back at different ones, and never early."""
    pauses = [jittered(2.0) for _ in range(200)]
    assert all(2.0 <= pause <= 3.0 for pause in pauses)
    assert max(pauses) - min(pauses) > 0.5
