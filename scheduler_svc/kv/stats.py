"""Counters of one replica's KV cache."""

from dataclasses import dataclass


@dataclass(slots=True)
class KvStats:
    """Counters from the start of a replica."""

    queried_tokens: int = 0
    """Known tokens of admitted requests."""
    hit_tokens: int = 0
    """Tokens of admitted requests that a prefix hit spared."""
    copies: int = 0
    """Block copies planned."""
    kept_windows: int = 0
    """Copies that keep a sliding window for later requests."""
