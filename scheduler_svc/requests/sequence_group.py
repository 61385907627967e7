"""The sequences of one client request (n > 1): requests that share a prompt and report to one client.

The prompt is computed once. One sequence prefills all of it but the last token; the others wait and are then
forked from it: whole blocks are shared, blocks that are written are copied. Every sequence runs the last
prompt token in a decode step and samples its own first token. See ``ReplicaScheduler.admit``.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from scheduler_svc.requests.request import Event, SequenceGroup

SEQUENCES_PER_SLOT = 16
"""Most sequences of one request for each slot of the deployment: a client occupies all slots that many times
over."""


@dataclass(frozen=True, slots=True)
class Resumed:
    """The part of a sequence that the client has received already."""

    sequence: int
    """Index of the sequence."""
    token_ids: tuple[int, ...] = ()
    """Tokens received; generation continues behind them."""
    finished: bool = False
    """Whether the sequence is complete and must not run again."""


class SequenceSink:
    """Turns a sequence's events into events of its client request."""

    __slots__ = ("_group", "_sequence")

    def __init__(self, group: SequenceGroup, sequence: int) -> None:
        """Passes the events of ``sequence`` on to the group's sink."""
        self._group = group
        self._sequence = sequence

    def push(self, event: Event) -> None:
        """Passes an event on unless the request has failed; only one event of the group is its first."""
        group = self._group
        if group.failed:
            return
        first = event.first and not group.announced
        group.announced = group.announced or event.first
        group.failed = event.error is not None
        group.sink.push(replace(event, request_id=group.request_id, sequence=self._sequence, first=first))

    def push_tokens(self, request_ids: Sequence[str], token_ids: Sequence[int]) -> None:
        """See ``Sink``."""
        del request_ids  # the client knows its request by another id
        group = self._group
        for token_id in token_ids:
            if not group.failed:
                group.sink.push(Event(group.request_id, (token_id,), sequence=self._sequence))


def sequence_id(request_id: str, sequence: int) -> str:
    """Returns the id of a sequence among the scheduler's requests."""
    return f"{request_id}#{sequence}"


def unfinished(n: int, resumed: Sequence[Resumed]) -> dict[int, tuple[int, ...]]:
    """Returns the sequences among 0 .. n-1 that must run, with the tokens that the client has received."""
    known = {one.sequence: one for one in resumed}
    return {
        sequence: known[sequence].token_ids if sequence in known else ()
        for sequence in range(n)
        if not (sequence in known and known[sequence].finished)
    }
