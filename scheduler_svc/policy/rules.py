"""The replica that runs a request, the kind of its next step, and the request that yields its slot."""

from collections.abc import Iterable
from typing import Literal, Protocol

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


StepKind = Literal["prefill", "decode"]


class Interleave:
    """Bounded stall: while both kinds of work exist, a fixed number of decode steps follows every chunk.

    vLLM-RBLN runs all prefill first, which stalls running requests as long as prompts keep arriving. Here the
    longest gap between two tokens of a request is one chunk plus one decode step.

    On a pipeline, each decode step is one micro-batch's, and a stage spends only its share of the time on a
    chunk. So a round of all micro-batches with a chunk behind each takes as long as one chunk and one step of
    the whole model. Where only some stages have a micro-batch, several chunks may follow each step.
    """

    def __init__(self, decode_steps_per_chunk: int) -> None:
        """Runs ``decode_steps_per_chunk`` decode steps between two chunks; 0 runs all chunks first."""
        self._ratio = decode_steps_per_chunk
        # Decode steps that no chunk has been sent for. The first chunk may start at once.
        self._decodes = decode_steps_per_chunk

    @property
    def prefill_due(self) -> bool:
        """Whether enough decode steps have run since the last chunk."""
        return self._decodes >= self._ratio

    def choose(self, *, prefill: bool, decode: bool, turns: int = 1) -> StepKind | None:
        """Returns the kind of the next step.

        Args:
            prefill: whether there is a chunk to run.
            decode: whether there is a decode step to run.
            turns: pipeline stages for each micro-batch; a decode step counts as that many.
        """
        if prefill and (not decode or self.prefill_due):
            self._decodes = max(0, min(self._decodes, self._ratio * turns) - self._ratio)
            return "prefill"
        if decode:
            self._decodes += turns
            return "decode"
        return None

    def decoded(self) -> None:
        """Counts a decode step that a lease ran, beyond those chosen here."""
        self._decodes += 1

    def withdraw(self) -> None:
        """Takes back a decode step that was chosen here, but has not run."""
        self._decodes -= 1


class PreemptionPolicy(Protocol):
    """Chooses among running requests. A preempted request loses its blocks, keeps its tokens."""

    def victim(self, running: Iterable[Request]) -> Request | None:
        """Returns the running request to preempt; None if none runs."""

    def outranks(self, waiting: Request, running: Request) -> bool:
        """Whether a waiting request may preempt a running one; only if its ``priority`` is a lower number."""


class LatestOfLeastUrgent:
    """Preempts the running request with the largest rank, so that the first in order always makes progress.

    A waiting request preempts only requests of lower priority that ageing has not promoted before it: a later
    arrival does not undo a promotion.
    """

    def victim(self, running: Iterable[Request]) -> Request | None:
        """See :class:`PreemptionPolicy`."""
        return max(running, key=lambda request: request.rank, default=None)

    def outranks(self, waiting: Request, running: Request) -> bool:
        """See :class:`PreemptionPolicy`."""
        return waiting.priority < running.priority and waiting.rank < running.rank
