"""Prefixes that running prefills are about to put into the cache, and the requests that wait for them.

Prefill runs one chunk at a time, so a second request with the same beginning loses nothing by waiting until the first has computed it, and
the replica saves the second computation.
"""

from collections.abc import Sequence
from typing import TypeAlias

from scheduler_svc.kv.block_pool import BlockKey
from scheduler_svc.requests.request import Request
from scheduler_svc.requests.sequence_group import Family

Awaited: TypeAlias = BlockKey | Family
"""What is waited for: a chunk boundary, or the prompt that the sequences of one request share."""


class PrefixesInProgress:
    """Which chunk boundaries and shared prompts are being computed by whom, and who waits for which of them."""

    def __init__(self) -> None:
        """Nothing is being computed."""
        self._owners: dict[Awaited, Request] = {}
        self._waiters: dict[Awaited, list[Request]] = {}
        self._awaited: dict[str, Awaited] = {}

    @property
    def num_waiting(self) -> int:
        """Requests that wait for a prefix."""
        return len(self._awaited)

    @property
    def waiting(self) -> list[Request]:
        """Requests that wait for a prefix."""
        return [request for waiters in self._waiters.values() for request in waiters]

    def start(self, request: Request, keys: Sequence[BlockKey], first: int, limit: int, unit: int) -> None:
        """``request`` is going to compute the boundaries behind ``first`` up to ``limit``, all counted in granules, ``unit`` apart."""
        for boundary in range(first + unit, limit + 1, unit):
            self._owners.setdefault(keys[boundary - 1], request)

    def longest(self, keys: Sequence[BlockKey], limit: int, unit: int) -> int:
        """The last boundary of a prompt that is being computed, in granules; 0 if none is."""
        if not self._owners:
            return 0
        return next((end for end in range(limit, 0, -unit) if keys[end - 1] in self._owners), 0)

    def owner(self, key: BlockKey) -> Request:
        """Who computes ``key``, which :meth:`longest` found."""
        return self._owners[key]

    def wait(self, request: Request, key: Awaited, owner: Request) -> None:
        """``request`` waits until ``key`` is computed, or given up by ``owner``, who computes it now."""
        # Several sequences may compute their prompt at once; the one that somebody waits for is the one whose end must be told.
        self._owners[key] = owner
        self._waiters.setdefault(key, []).append(request)
        self._awaited[request.request_id] = key

    def cancel(self, request: Request) -> bool:
        """``request`` waits no more; False if it did not."""
        key = self._awaited.pop(request.request_id, None)
        if key is None:
            return False
        waiters = self._waiters[key]
        waiters.remove(request)
        if not waiters:
            del self._waiters[key]
        return True

    def computed(self, key: Awaited) -> list[Request]:
        """A boundary was reached, or a shared prompt done; returns who waited for it."""
        self._owners.pop(key, None)
        return self._release(key)

    def given_up(self, request: Request, keys: Sequence[BlockKey]) -> list[Request]:
        """``request`` ends before it has computed all it was going to; returns who waited for the rest."""
        released = []
        given_up: list[Awaited] = [*keys] if request.family is None else [*keys, request.family]
        for key in given_up:
            if self._owners.get(key) is request:
                del self._owners[key]
                released += self._release(key)
        return released

    def _release(self, key: Awaited) -> list[Request]:
        waiters = self._waiters.pop(key, [])
        for request in waiters:
            del self._awaited[request.request_id]
        return waiters
