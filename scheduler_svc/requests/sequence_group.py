"""The sequences of one request (n > 1): requests of their own that share a prompt, and whose events are the client's one request's.

The prompt is computed once. One sequence prefills all of it but the last token, the others wait for that and are then forked from it: whole
blocks are shared, what is written on is copied. Every sequence runs the last token itself, in a decode step, and so chooses its own first token.
See ``ReplicaScheduler.admit``.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from scheduler_svc.requests.request import Event, Request, Sink

MAX_SEQUENCES = 128
"""Sequences of one request at most, as OpenAI takes them (vLLM: ``VLLM_MAX_N_SEQUENCES``, 16384); each costs the scheduler as much as a request."""

SEQUENCES_PER_SLOT = 16
"""For each slot of the deployment, how many sequences one request may have: that many turns of all slots belong to one client then."""


@dataclass(frozen=True, slots=True)
class Resumed:
    """What a client has of a sequence already.

    Attributes:
        sequence: which.
        token_ids: its tokens; generation goes on behind them.
        finished: nothing more is wanted of it.
    """

    sequence: int
    token_ids: tuple[int, ...] = ()
    finished: bool = False


@dataclass(slots=True, eq=False)
class Family:
    """The sequences of one request that have not ended.

    Attributes:
        request_id: what the client calls the request.
        sink: where its events go.
        members: the sequences.
        announced: whether the client was told about the prompt.
        failed: one sequence failed, and with it the request; nobody hears of the others any more.
    """

    request_id: str
    sink: Sink
    members: list[Request] = field(default_factory=list)
    announced: bool = False
    failed: bool = False


class SequenceSink:
    """Makes a sequence's events those of its request."""

    __slots__ = ("_family", "_sequence")

    def __init__(self, family: Family, sequence: int) -> None:
        """Passes the events of ``sequence`` on to the family's sink."""
        self._family = family
        self._sequence = sequence

    def push(self, event: Event) -> None:
        """Passes an event on, unless the request has failed; what is said of the prompt is said once."""
        family = self._family
        if family.failed:
            return
        first = event.first and not family.announced
        family.announced = family.announced or event.first
        family.failed = event.error is not None
        family.sink.push(replace(event, request_id=family.request_id, sequence=self._sequence, first=first))

    def push_token(self, request_id: str, token_id: int) -> None:
        """See ``Sink``."""
        del request_id  # the client knows its request by another
        family = self._family
        if not family.failed:
            family.sink.push(Event(family.request_id, (token_id,), sequence=self._sequence))


def sequence_id(request_id: str, sequence: int) -> str:
    """What a sequence of a request is called among the scheduler's requests."""
    return f"{request_id}#{sequence}"


def unfinished(n: int, resumed: Sequence[Resumed]) -> dict[int, tuple[int, ...]]:
    """The sequences to run, 0 .. n-1, each with the tokens that the client has of it."""
    known = {one.sequence: one for one in resumed}
    return {
        sequence: known[sequence].token_ids if sequence in known else ()
        for sequence in range(n)
        if not (sequence in known and known[sequence].finished)
    }
