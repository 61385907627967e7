"""Chooses the replica that runs a request."""

from typing import Protocol

from scheduler_svc.adapters.device_slots import AdapterSlots
from scheduler_svc.requests.request import Request


class PlacementTarget(Protocol):
    """The facts about a replica that a placement policy reads."""

    @property
    def num_running(self) -> int:
        """Requests with a slot."""

    @property
    def prefill_backlog(self) -> int:
        """Tokens that running requests still have to prefill."""

    @property
    def adapters(self) -> AdapterSlots:
        """The LoRA adapters on the device."""

    def cached_tokens(self, request: Request) -> int:
        """Returns how many leading tokens of the request are cached or being computed."""


class PlacementPolicy(Protocol):
    """Compares replicas that have a free slot."""

    def cost(self, request: Request, replica: PlacementTarget) -> float:
        """Returns the cost of running the request on the replica; the lowest wins."""


class PrefixAndLoad:
    """Counts the tokens to prefill before the request's first token: backlog and own uncached tokens.

    A running request makes every later step slightly longer; its cost is expressed in the same unit, tokens.
    So is that of copying the request's LoRA adapter to a device, where it displaces another one.
    """

    def __init__(self, tokens_per_running: float = 16.0, tokens_per_adapter: float = 512.0) -> None:
        """Counts each running request, and a copied adapter, as so many tokens of prefill."""
        self._tokens_per_running = tokens_per_running
        self._tokens_per_adapter = tokens_per_adapter

    def cost(self, request: Request, replica: PlacementTarget) -> float:
        """See :class:`PlacementPolicy`."""
        load = replica.prefill_backlog + self._tokens_per_running * replica.num_running
        if not replica.adapters.holds(request.adapter):
            load += self._tokens_per_adapter
        return load + len(request.token_ids) - replica.cached_tokens(request)
