"""Places and pauses of requests that wait for a scheduler with a ready worker."""

import asyncio
import random
from collections.abc import Coroutine
from typing import Any, Final, TypeVar

from protos.errors import Unavailable

T = TypeVar("T")

# What clients are told to wait before they send a request again that found no place or waited in vain.
_RETRY_AFTER_MS = 5000


class StartupQueue:
    """The new requests that wait. Anything hashable may stand for a request."""

    timeout_s: float
    """How long a request may wait."""

    def __init__(self, max_requests: int = 1024, timeout_s: float = 60.0) -> None:
        """Starts without requests.

        Args:
            max_requests: the number of places.
            timeout_s: how long a request may wait, seconds; 0: no request waits.
        """
        self.timeout_s = timeout_s
        self._max_requests = max_requests
        self._parked: set[object] = set()

    def __len__(self) -> int:
        return len(self._parked)

    def __contains__(self, request: object) -> bool:
        return request in self._parked

    def has_room(self, count: int) -> bool:
        """Returns whether `count` more requests may wait."""
        return self.timeout_s > 0 and len(self._parked) + count <= self._max_requests

    def enter(self, request: object) -> bool:
        """Gives ``request`` a place, once; returns whether it holds a place now."""
        if request not in self._parked:
            if not self.has_room(1):
                return False
            self._parked.add(request)
        return True

    def leave(self, request: object) -> None:
        """Frees the place of ``request``, if any."""
        self._parked.discard(request)

    def full(self, reason: str) -> Unavailable:
        """Returns the error of a request without a place; ``reason`` says why it would have to wait."""
        return Unavailable(
            f"{reason}; no further request can wait for it, send this one again later",
            retry_after_ms=_RETRY_AFTER_MS,
        )

    def expired(self) -> Unavailable:
        """Returns the error of a request that waited in vain."""
        return Unavailable(
            f"no worker became ready within {self.timeout_s:g} s; send the request again later",
            retry_after_ms=_RETRY_AFTER_MS,
        )

    async def wait_for(self, work: Coroutine[Any, Any, T], reason: str) -> T:
        """Returns the result of ``work``, which waits for a scheduler, and holds a place meanwhile.

        Raises:
            Unavailable: if there is no place, or the time is up.
        """
        place = object()
        if not self.enter(place):
            work.close()
            raise self.full(reason)
        try:
            async with asyncio.timeout(self.timeout_s):
                return await work
        except TimeoutError:
            raise self.expired() from None
        finally:
            self.leave(place)


_SPREAD: Final = 0.5


def jittered(pause_s: float) -> float:
    """Returns a pause between ``pause_s`` and half as much again."""
    return pause_s * random.uniform(1, 1 + _SPREAD)  # noqa: S311 - no secret
