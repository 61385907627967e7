"""The LoRA adapters of one replica: those on its worker's host, and those in use.

The worker evicts adapters from its host and its device by last use. It always finds room: running requests
use at most ``max_used`` adapters, and at most ``max_held`` are *needed*, meaning in use, loading, or loaded
for a waiting request.

A waiting request whose adapter finds no seat *claims* the seat of another adapter. Lower-ranked requests then
get no new use of that adapter, so its running users end and the seat becomes free in bounded time. Claims
last until the waiting requests are reconsidered.
"""

from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TypeAlias

from protos.errors import TriptychError
from scheduler_svc.adapters.registry import Adapter

Rank: TypeAlias = tuple[float, int]
"""Place of a request in the order; the smallest is first."""

FIRST_PAUSE_S = 5.0
"""Pause before a replica retries a load after a temporary failure; doubled each time."""
LONGEST_PAUSE_S = 300.0


@dataclass(frozen=True, slots=True)
class _Failure:
    error: TriptychError
    pause_s: float
    until_s: float


class AdapterSeats:
    """The adapters of one replica by id."""

    def __init__(self, max_used: int, max_held: int, clock: Callable[[], float]) -> None:
        """Starts empty; both limits are 0 for a replica without LoRA."""
        self.max_used = max_used
        """Different adapters in use by running requests."""
        self.max_held = max_held
        """Adapters on the worker's host."""
        self.num_loads = 0
        """Loads that succeeded."""
        self.num_displaced = 0
        """Adapters evicted from the host."""
        self._clock = clock
        self._users: Counter[int] = Counter()
        self.held: dict[int, int] = {}
        """Adapters on the host, each with its load id."""
        self.loading: dict[int, int] = {}
        """Adapters being loaded, each with its load id."""
        self.awaited: set[int] = set()
        """Adapters loaded for a waiting request and not used since."""
        self.failures: dict[int, _Failure] = {}
        """Last failed load of each adapter."""
        # By adapter in use: the adapter waiting for its seat, and the rank of its first request.
        self._claims: dict[int, tuple[int, Rank]] = {}

    # ---- requests ----

    def holds(self, adapter: Adapter | None) -> bool:
        """Whether an otherwise empty replica could run a request with this adapter now."""
        return adapter is None or adapter.adapter_id in self.held

    def uses(self, adapter: Adapter | None) -> bool:
        """Whether a running request uses the adapter, so that it is on the device; True for the base."""
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
        return len(self._users) < self.max_used and (adapter_id in self.awaited or self.may_need_more)

    def acquire(self, adapter_id: int) -> int:
        """Adds a user to an adapter on the host and returns the adapter's load id."""
        self._users[adapter_id] += 1
        self.awaited.discard(adapter_id)
        return self.held[adapter_id]

    def release(self, adapter_id: int) -> None:
        """Removes a user of an adapter."""
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
        """Drops all claims."""
        self._claims.clear()

    # ---- loads ----

    @property
    def needed(self) -> list[int]:
        """Load ids that the worker must not evict."""
        used = [self.held[one] for one in (*self._users, *self.awaited) if one in self.held]
        return [*used, *self.loading.values()]

    @property
    def may_need_more(self) -> bool:
        """Whether the host has room for another needed adapter."""
        return len(self._users) + len(self.loading) + len(self.awaited) < self.max_held

    def loaded(self, adapter_id: int, displaced: Collection[int], *, awaited: bool) -> None:
        """Records a finished load.

        Args:
            adapter_id: the adapter.
            displaced: load ids evicted for it.
            awaited: whether requests wait for the adapter.
        """
        for other, load_id in list(self.held.items()):
            # An evicted adapter in use is still on the device, or its requests are about to be refused.
            if load_id in displaced and other not in self._users:
                self.lost(other, load_id)
        self.num_loads += 1
        self.num_displaced += len(displaced)
        self.held[adapter_id] = self.loading.pop(adapter_id)
        self.failures.pop(adapter_id, None)
        if awaited:
            self.awaited.add(adapter_id)

    def lost(self, adapter_id: int, load_id: int | None) -> None:
        """Records the eviction of a load; does nothing if the adapter was loaded again since."""
        if self.held.get(adapter_id) == load_id:
            self.held.pop(adapter_id, None)
            self.awaited.discard(adapter_id)

    def failed(self, adapter_id: int, error: TriptychError) -> None:
        """Records a failed load: retryable errors start a pause, any other error is final."""
        del self.loading[adapter_id]
        earlier = self.failures.get(adapter_id)
        pause_s = FIRST_PAUSE_S if earlier is None else min(2 * earlier.pause_s, LONGEST_PAUSE_S)
        until_s = self._clock() + pause_s if error.retryable else float("inf")
        self.failures[adapter_id] = _Failure(error, pause_s, until_s)

    def failure(self, adapter_id: int) -> TriptychError | None:
        """Returns the error of the last load; None after a success or during a new load."""
        failure = self.failures.get(adapter_id)
        return None if failure is None or adapter_id in self.loading else failure.error

    def may_load(self, adapter: Adapter | None) -> bool:
        """Whether the replica runs LoRA and has not refused the adapter for good."""
        if adapter is None:
            return True
        failure = self.failures.get(adapter.adapter_id)
        return self.max_used > 0 and (failure is None or failure.error.retryable)

    def is_paused(self, adapter: Adapter | None) -> bool:
        """Whether the replica refused the adapter, or failed to load it and pauses."""
        failure = None if adapter is None else self.failures.get(adapter.adapter_id)
        return failure is not None and self._clock() < failure.until_s
