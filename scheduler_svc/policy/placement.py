"""Which replica runs a request."""

from typing import Protocol

from scheduler_svc.requests.request import Request


class Place(Protocol):
    """What a policy may ask about a replica."""

    @property
    def num_running(self) -> int:
        """Requests with a slot."""

    @property
    def prefill_backlog(self) -> int:
        """Tokens that its running requests still have to prefill."""

    def cached_tokens(self, request: Request) -> int:
        """Leading tokens of the request that it has or is computing."""


class PlacementPolicy(Protocol):
    """Compares replicas that have a free slot."""

    def cost(self, request: Request, place: Place) -> float:
        """What it costs to run the request there; the lowest wins."""


class PrefixAndLoad:
    """The tokens to prefill before the request's first one: those queued before it and those of its own that are not cached.

    A request that decodes there makes every later step a little longer; that is expressed in the same unit, tokens.
    """

    def __init__(self, tokens_per_running: float = 16.0) -> None:
        """Counts each running request as that many tokens of prefill."""
        self._tokens_per_running = tokens_per_running

    def cost(self, request: Request, place: Place) -> float:
        """See the interface."""
        load = place.prefill_backlog + self._tokens_per_running * place.num_running
        return load + len(request.token_ids) - place.cached_tokens(request)
