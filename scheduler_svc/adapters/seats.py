"""The LoRA adapters of one replica: those that its worker has on the host, and the requests that use them.

The worker decides which adapter to forget for another one, on its host and on its device. It always finds
one, because requests with a slot use at most ``max_used`` adapters, and at most ``max_held`` are *needed*:
those in use, being loaded, or loaded for a waiting request.

A waiting request whose adapter finds no seat *claims* that of another adapter. From then on, requests that
rank behind it get no new use of that adapter, so that the running ones end and the seat becomes free in
bounded time. Claims last until the waiting requests are looked at again.
"""

from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TypeAlias

from protos.errors import TriptychError
from scheduler_svc.adapters.registry import Adapter

Rank: TypeAlias = tuple[float, int]
"""Place of a request among others; the smallest is first."""

FIRST_PAUSE_S = 5.0
"""How long a replica is left alone with an adapter after a failure that may pass; doubled each time."""
LONGEST_PAUSE_S = 300.0


@dataclass(frozen=True, slots=True)
class _Failure:
    error: TriptychError
    pause_s: float
    until_s: float


class AdapterSeats:
    """The adapters of one replica by id."""

    def __init__(self, max_used: int, max_held: int, clock: Callable[[], float]) -> None:
        """Starts empty; both limits are 0 for a replica that runs no adapters."""
        self.max_used = max_used
        """Different adapters that requests with a slot may use."""
        self.max_held = max_held
        """Adapters that the worker has on its host."""
        self.num_loads = 0
        """Adapters that were loaded."""
        self.num_displaced = 0
        """Adapters that left the host for others."""
        self._clock = clock
        self._users: Counter[int] = Counter()
        self.held: dict[int, int] = {}
        """Adapters on the host, each with the id of its load."""
        self.loading: dict[int, int] = {}
        """Adapters that the worker is asked to load, each with the id of its load."""
        # Adapters that were loaded for a waiting request, and that none has used since.
        self._awaited: set[int] = set()
        # By adapter in use: the adapter that waits for its seat, and the rank of its first request.
        self._claims: dict[int, tuple[int, Rank]] = {}
        self._failures: dict[int, _Failure] = {}

    # ---- requests ----

    def holds(self, adapter: Adapter | None) -> bool:
        """Whether a request with this adapter could run here if nothing else did."""
        return adapter is None or adapter.adapter_id in self.held

    def uses(self, adapter: Adapter | None) -> bool:
        """Whether a request with a slot uses the adapter, so that it is on the device; True for the base."""
        return adapter is None or adapter.adapter_id in self._users

    def has_room(self, adapter: Adapter | None, rank: Rank) -> bool:
        """Whether a request of this rank may use the adapter now."""
        if adapter is None:
            return True
        adapter_id = adapter.adapter_id
        if adapter_id not in self.held:
            return False
        if adapter_id in self._users:
            claim = self._claims.get(adapter_id)
            return claim is None or rank <= claim[1]
        return len(self._users) < self.max_used and (adapter_id in self._awaited or self.may_need_more)

    def acquire(self, adapter_id: int) -> int:
        """Adds a user to an adapter on the host, and returns the id of its load."""
        self._users[adapter_id] += 1
        self._awaited.discard(adapter_id)
        return self.held[adapter_id]

    def release(self, adapter_id: int) -> None:
        """Ends one use of an adapter."""
        self._users[adapter_id] -= 1
        if not self._users[adapter_id]:
            del self._users[adapter_id]

    def claim(self, adapter_id: int, rank: Rank) -> None:
        """Claims the seat with the fewest users for a waiting adapter; does nothing if all are claimed."""
        for used, (waiting, first) in self._claims.items():
            if waiting == adapter_id:
                self._claims[used] = (waiting, min(first, rank))
                return
        free = [used for used in self._users if used not in self._claims]
        if free:
            self._claims[min(free, key=self._users.__getitem__)] = (adapter_id, rank)

    def clear_claims(self) -> None:
        """Ends all claims, before the waiting requests are looked at again."""
        self._claims.clear()

    # ---- loads ----

    @property
    def needed(self) -> list[int]:
        """The loads that the worker must not forget."""
        used = [self.held[one] for one in (*self._users, *self._awaited) if one in self.held]
        return [*used, *self.loading.values()]

    @property
    def may_need_more(self) -> bool:
        """Whether the worker finds room for another adapter."""
        return len(self._users) + len(self.loading) + len(self._awaited) < self.max_held

    def loaded(self, adapter_id: int, displaced: Collection[int], *, awaited: bool) -> None:
        """Notes that an adapter is loaded, which loads left for it, and whether requests wait for it."""
        for other, load_id in list(self.held.items()):
            # One that is in use again still lies on the device, or its requests are about to be refused.
            if load_id in displaced and other not in self._users:
                self.lost(other, load_id)
        self.num_loads += 1
        self.num_displaced += len(displaced)
        self.held[adapter_id] = self.loading.pop(adapter_id)
        self._failures.pop(adapter_id, None)
        if awaited:
            self._awaited.add(adapter_id)

    def lost(self, adapter_id: int, load_id: int | None) -> None:
        """Notes that the worker has forgotten what a load brought; a later load of the adapter stays."""
        if self.held.get(adapter_id) == load_id:
            self.held.pop(adapter_id, None)
            self._awaited.discard(adapter_id)

    def unwanted(self, adapter_id: int) -> None:
        """Lets the worker forget an adapter: no request waits for it."""
        self._awaited.discard(adapter_id)

    def failed(self, adapter_id: int, error: TriptychError) -> None:
        """Notes why an adapter was not loaded.

        An adapter that is bad or that a worker cannot find is refused for good. Any other failure may pass: a
        deadline, a lost connection, memory that is short.
        """
        del self.loading[adapter_id]
        earlier = self._failures.get(adapter_id)
        pause_s = FIRST_PAUSE_S if earlier is None else min(2 * earlier.pause_s, LONGEST_PAUSE_S)
        until_s = self._clock() + pause_s if error.retryable else float("inf")
        self._failures[adapter_id] = _Failure(error, pause_s, until_s)

    def failure(self, adapter_id: int) -> TriptychError | None:
        """Returns why the last load of an adapter failed; None if it did not, or another one is under way."""
        failure = self._failures.get(adapter_id)
        return None if failure is None or adapter_id in self.loading else failure.error

    def forget_failure(self, adapter_id: int) -> None:
        """Lets an adapter be loaded again."""
        self._failures.pop(adapter_id, None)

    def may_load(self, adapter: Adapter | None) -> bool:
        """Whether the replica has not refused the adapter for good."""
        if adapter is None:
            return True
        failure = self._failures.get(adapter.adapter_id)
        return self.max_used > 0 and (failure is None or failure.error.retryable)

    def is_paused(self, adapter: Adapter | None) -> bool:
        """Whether the replica failed to load the adapter a short while ago, or refused it."""
        failure = None if adapter is None else self._failures.get(adapter.adapter_id)
        return failure is not None and self._clock() < failure.until_s

    def check_integrity(self) -> None:
        """Checks the limits; raises AssertionError if one is broken."""
        assert len(self._users) <= self.max_used
        assert len(self._users) + len(self.loading) + len(self._awaited) <= self.max_held
        assert all(count > 0 for count in self._users.values())
        assert self._awaited <= self.held.keys() - self._users.keys()
        assert not self.held.keys() & self.loading.keys()
