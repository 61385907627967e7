"""Requests deferred until another request on the replica computes a prefix, or their whole prompt.

Prefill runs chunk by chunk, so a second request with the same prefix loses nothing by waiting, and the
replica computes the prefix once.
"""

from typing import TypeAlias

from scheduler_svc.kv.block_pool import BlockKey
from scheduler_svc.kv.copies import CopyQueue
from scheduler_svc.kv.prefix_index import PrefixIndex
from scheduler_svc.replica.stats import SchedulerStats
from scheduler_svc.requests.request import Request, RequestState, SequenceGroup

Awaited: TypeAlias = BlockKey | SequenceGroup
"""The target of a wait: a possible end of a hit, or the prompt shared by the sequences of a request."""


class PrefixWaiters:
    """Prefixes in progress, the requests computing them, and the requests waiting for them."""

    def __init__(self, prefixes: PrefixIndex, copies: CopyQueue, stats: SchedulerStats) -> None:
        """Starts empty, with the replica's prefix cache, queue of block copies and counters."""
        self._prefixes = prefixes
        self._copies = copies
        self._stats = stats
        self._computing: dict[Awaited, Request] = {}
        # The ids of requests computing a prompt.
        self._sources: set[str] = set()
        self._waiters: dict[Awaited, list[Request]] = {}
        # By request id.
        self._awaited: dict[str, Awaited] = {}
        # Their prefix is computed, but the copy of its window travels with the next plan: the number of the
        # plan before that, and the request.
        self._waiting_for_copies: list[tuple[int, Request]] = []

    def __len__(self) -> int:
        """The number of waiting requests."""
        return len(self._awaited) + len(self._waiting_for_copies)

    def cached_tokens(self, request: Request) -> int:
        """Returns how many leading tokens of a request are cached or being computed."""
        keys, limit = self._prefixes.lookup_keys(request.kv)
        computing = self._longest(keys, limit)
        return max(self._prefixes.longest_hit(keys, limit), computing) * self._prefixes.hash_block_size

    # ---- waiting ----

    def defer_for_prefix(self, request: Request) -> bool:
        """Defers a request if an earlier request is computing more of its prompt than is cached.

        Returns:
            Whether the request waits now.
        """
        keys, limit = self._prefixes.lookup_keys(request.kv)
        shared = self._longest(keys, limit)
        if not shared:
            return False
        key = keys[shared - 1]
        computing = self._computing[key]
        # A less urgent request could take long.
        if computing.rank >= request.rank or shared <= self._prefixes.longest_hit(keys, limit):
            return False
        computing.kv.junction = max(computing.kv.junction, shared)
        self._defer(request, key, computing)
        return True

    def defer_for_prompt(self, request: Request, origin: Request) -> None:
        """Defers a sequence until ``origin``, another sequence of its request, computes their prompt."""
        assert request.group is not None
        self._defer(request, request.group, origin)

    def cancel(self, request: Request) -> None:
        """Removes a waiting request."""
        key = self._awaited.pop(request.request_id, None)
        if key is None:
            self._waiting_for_copies = [pair for pair in self._waiting_for_copies if pair[1] is not request]
            return
        waiters = self._waiters[key]
        waiters.remove(request)
        if not waiters:
            del self._waiters[key]

    def clear(self) -> list[Request]:
        """Removes and returns all waiting requests."""
        waiting = [request for waiters in self._waiters.values() for request in waiters]
        waiting += [request for _, request in self._waiting_for_copies]
        self._waiters.clear()
        self._awaited.clear()
        self._sources.clear()
        self._waiting_for_copies.clear()
        return waiting

    # ---- computing ----

    def start(self, request: Request) -> None:
        """Records that a request will compute the rest of its prompt."""
        self._sources.add(request.request_id)
        keys, limit = self._prefixes.lookup_keys(request.kv)
        for boundary in self._prefixes.boundaries(request.kv.num_computed, limit):
            self._computing.setdefault(keys[boundary - 1], request)

    def reached(self, request: Request, start: int, end: int, latest: int) -> list[Request]:
        """Returns the requests able to resume now, because ``request`` computed the tokens ``[start, end)``.

        Others wait until a window is copied, by a plan after ``latest``, the last number sent.
        """
        keys, limit = self._prefixes.lookup_keys(request.kv)
        last = min(limit, end // self._prefixes.hash_block_size)
        ends = self._prefixes.boundaries(start, last)
        waiters = [waiter for boundary in ends for waiter in self._finish(keys[boundary - 1])]
        if not self._copies:
            return waiters
        self._waiting_for_copies += [(latest, waiter) for waiter in waiters]
        return []

    def prompt_computed(self, origin: Request) -> list[Request]:
        """Returns the requests that waited for the prompt of their group, computed by ``origin``."""
        self._sources.discard(origin.request_id)
        return [] if origin.group is None else self._finish(origin.group)

    def copies_done(self, plan: int) -> list[Request]:
        """Returns the requests that waited for a window copied by plan number ``plan``, now done."""
        if not self._waiting_for_copies:
            return []
        done = [request for latest, request in self._waiting_for_copies if latest < plan]
        self._waiting_for_copies = [pair for pair in self._waiting_for_copies if pair[0] >= plan]
        return done

    def stop(self, request: Request) -> list[Request]:
        """Ends the computation of a prompt, if it goes on; returns the requests that waited for its rest."""
        if request.request_id not in self._sources:
            return []
        self._sources.remove(request.request_id)
        keys, limit = self._prefixes.lookup_keys(request.kv)
        awaited: list[Awaited] = [*keys[:limit]]
        if request.group is not None:
            awaited.append(request.group)
        released = []
        for key in awaited:
            if self._computing.get(key) is request:
                released += self._finish(key)
        return released

    # ---- internals ----

    def _longest(self, keys: list[BlockKey], limit: int) -> int:
        """Returns the last boundary of a prompt that is being computed, in hash blocks; 0 if none is."""
        if not self._computing:
            return 0
        ends = reversed(self._prefixes.boundaries(0, limit))
        return next((end for end in ends if keys[end - 1] in self._computing), 0)

    def _defer(self, request: Request, awaited: Awaited, computing: Request) -> None:
        # Several sequences may compute their prompt at once; wait for the end of exactly this one.
        self._computing[awaited] = computing
        self._waiters.setdefault(awaited, []).append(request)
        self._awaited[request.request_id] = awaited
        request.state, request.replica_id = RequestState.DEFERRED, computing.replica_id
        self._stats.deferred += 1

    def _finish(self, key: Awaited) -> list[Request]:
        """Ends the computation of ``key``; returns the requests that waited for it."""
        self._computing.pop(key, None)
        waiters = self._waiters.pop(key, [])
        for request in waiters:
            del self._awaited[request.request_id]
        return waiters
