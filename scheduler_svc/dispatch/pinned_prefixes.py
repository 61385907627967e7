"""Pinned prefixes of all replicas: cached blocks that must not be evicted."""

from collections.abc import Callable
from dataclasses import dataclass

from protos.errors import Overloaded
from scheduler_svc.kv.cache import PinnedPrefix
from scheduler_svc.replica.scheduler import ReplicaScheduler
from scheduler_svc.requests.request import Request

# Pins per replica. Pinning walks all pins of the replica, so their number bounds its cost.
MAX_PINS = 1000


@dataclass(slots=True)
class _Pin:
    replica_id: str
    scheduler: ReplicaScheduler
    prefix: PinnedPrefix
    on_end: Callable[[], None]


class PinnedPrefixes:
    """Pins by id."""

    def __init__(self, max_share: float) -> None:
        """Starts without pins.

        Args:
            max_share: share of each KV group's blocks that all pins of a replica may hold together.
        """
        self._max_share = max_share
        self._pins: dict[str, _Pin] = {}

    def pin(
        self, pin_id: str, replica_id: str, scheduler: ReplicaScheduler, probe: Request, on_end: Callable[[], None]
    ) -> int:  # fmt: skip
        """Pins the cached prefix of `probe` on a replica and calls `on_end` when the pin ends for any reason.

        Returns:
            The tokens that are pinned.

        Raises:
            Overloaded: the pins of the replica would be too many or hold more than their share of memory.
        """
        held = [pin.prefix for pin in self._pins.values() if pin.replica_id == replica_id]
        if len(held) >= MAX_PINS:
            raise Overloaded(
                f"{MAX_PINS} prefixes are pinned on that replica; unpin some", retry_after_ms=10_000
            )
        prefix = scheduler.kv.pin(probe.kv, held, self._max_share)
        if prefix is None:
            raise Overloaded(
                f"pinned prefixes may hold {self._max_share:.0%} of the KV memory and this one does not fit; "
                "unpin others or raise max_pinned_share",
                retry_after_ms=10_000,
            )
        self._pins[pin_id] = _Pin(replica_id, scheduler, prefix, on_end)
        return prefix.num_tokens

    def unpin(self, pin_id: str) -> bool:
        """Ends a pin; returns False if the id is unknown or the pin has ended."""
        pin = self._pins.pop(pin_id, None)
        if pin is None:
            return False
        pin.scheduler.kv.unpin(pin.prefix)
        pin.on_end()
        return True

    def drop(self, scheduler: ReplicaScheduler) -> bool:
        """Ends all pins of a replica; returns whether it had any."""
        dropped = [pin_id for pin_id, pin in self._pins.items() if pin.scheduler is scheduler]
        for pin_id in dropped:
            self.unpin(pin_id)
        return bool(dropped)

    def drop_all(self) -> None:
        """Ends all pins."""
        for pin_id in list(self._pins):
            self.unpin(pin_id)

    def replica_lost(self, replica_id: str) -> None:
        """Ends the pins of a lost replica; their memory is gone with it."""
        for pin_id in [pin_id for pin_id, pin in self._pins.items() if pin.replica_id == replica_id]:
            self._pins.pop(pin_id).on_end()

    def count(self, replica_id: str) -> int:
        """Returns the number of pins on a replica."""
        return sum(pin.replica_id == replica_id for pin in self._pins.values())
