"""The live requests of an engine, by the ids that clients use."""

import asyncio
import contextlib
from collections.abc import Collection, Iterable

from scheduler_svc.requests.request import Request, SequenceGroup


class LiveRequests:
    """Registry of every request that has not ended.

    A request with several sequences is one :class:`Request` per sequence; the client's id finds all of them.
    """

    def __init__(self) -> None:
        self._by_id: dict[str, Request] = {}
        self._groups: dict[str, SequenceGroup] = {}
        # Groups in which a sequence failed. Their other sequences are aborted before the next decision.
        self._failed: list[SequenceGroup] = []
        self._empty: asyncio.Event | None = None

    def __len__(self) -> int:
        """The number of live sequences."""
        return len(self._by_id)

    def in_use(self, request_id: str, sequence_ids: Collection[str]) -> bool:
        """Returns whether a live request has this id or one of these sequence ids."""
        return request_id in self._groups or not self._by_id.keys().isdisjoint(sequence_ids)

    def add(self, requests: Iterable[Request]) -> None:
        """Adds the sequences of one request."""
        for request in requests:
            self._by_id[request.request_id] = request
            if request.group is not None:
                self._groups[request.group.request_id] = request.group

    def sequences_of(self, request_id: str) -> list[Request]:
        """Returns the live sequences of the request that the client calls `request_id`."""
        if request_id in self._groups:
            return list(self._groups[request_id].members)
        request = self._by_id.get(request_id)
        return [] if request is None or request.group is not None else [request]

    def remove(self, request: Request) -> None:
        """Removes a sequence that has ended."""
        self._by_id.pop(request.request_id, None)
        group = request.group
        if group is not None:
            group.members.remove(request)
            if (group.failed or not group.members) and self._groups.get(group.request_id) is group:
                del self._groups[group.request_id]
                self._failed.append(group)
        if not self._by_id and self._empty is not None:
            self._empty.set()

    def take_failed(self) -> list[Request]:
        """Returns the live sequences of groups that have failed since the last call."""
        if not self._failed:
            return []
        failed, self._failed = self._failed, []
        return [request for group in failed for request in group.members]

    async def drained(self, timeout_s: float) -> bool:
        """Waits until no request is live; returns False if some still are after `timeout_s` seconds."""
        if not self._by_id:
            return True
        self._empty = asyncio.Event()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._empty.wait(), timeout_s)
        return not self._by_id
