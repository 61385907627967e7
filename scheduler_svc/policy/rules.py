"""The kind of a replica's next step, and the request that yields its slot."""

from collections.abc import Iterable, Mapping
from typing import Literal

from scheduler_svc.requests.request import Request

# Sums of shares are exact up to this.
_ROUNDING = 1e-9

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


def preemption_victim(running: Iterable[Request]) -> Request | None:
    """Returns the running request with the largest rank, so that the first in order always makes progress."""
    return max(running, key=lambda request: request.rank, default=None)


def join_prefill(prefilling: list[Request], request: Request) -> None:
    """Inserts a request into a replica's prefill order.

    Requests come in the order of the queue and keep it, except that one goes before those that it outranks.
    One that decodes already and has tokens forced by its grammar goes first: its client waits for them.
    """
    index = 0 if request.prefills_forced else len(prefilling)
    while index and outranks(request, prefilling[index - 1]):
        index -= 1
    prefilling.insert(index, request)


def below_share(
    waiting: Request, running: Iterable[tuple[Request, float]], shares: Mapping[str, float]
) -> list[Request]:
    """Returns the running requests that may give way to one of a tenant far below its share, in order.

    A tenant is far below its share with less than half of it. The tenant furthest above its share gives
    first, its least important request, and none gives so much that it would fall below its own share. So an
    exchange is never undone by the next one.

    Args:
        waiting: the request; more urgent ones do not give way.
        running: the running requests, each with the share of the deployment that it occupies.
        shares: of all tenants, see :meth:`Tenants.shares`.
    """
    surplus = {tenant: -share for tenant, share in shares.items()}
    able: dict[str, list[tuple[Request, float]]] = {}
    for request, footprint in running:
        surplus[request.tenant] += footprint
        if request.tenant != waiting.tenant and request.priority >= waiting.priority:
            able.setdefault(request.tenant, []).append((request, footprint))
    if surplus[waiting.tenant] > -shares[waiting.tenant] / 2:
        return []
    for requests in able.values():
        requests.sort(key=lambda one: one[0].rank)
    leaving = []
    while able:
        tenant = max(able, key=surplus.__getitem__)
        request, footprint = able[tenant].pop()
        surplus[tenant] -= footprint
        if surplus[tenant] < -_ROUNDING or not able[tenant]:
            del able[tenant]
        if surplus[tenant] >= -_ROUNDING:
            leaving.append(request)
    return leaving


def outranks(waiting: Request, running: Request) -> bool:
    """Whether a waiting request may preempt a running one: of lower priority, and not promoted by ageing.

    A later arrival does not undo a promotion.
    """
    return waiting.priority < running.priority and waiting.rank < running.rank
