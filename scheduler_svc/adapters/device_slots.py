"""The adapter slots of one replica's device: which adapter lies in each, and which requests use it.

Admitted requests keep their adapter in its slot. A slot without users keeps its adapter, too, until another
adapter takes the place: an empty slot goes first, then the one that was used least recently.

A waiting request whose adapter finds no place *claims* a slot. From then on, requests that rank behind it
get no new use of that slot, so that the running ones end and the slot becomes free in bounded time. Claims
last until the waiting requests are looked at again.
"""

from typing import TypeAlias

from protos.errors import Internal
from protos.steps import AdapterPlacement, StepPlan
from scheduler_svc.adapters.registry import Adapter

Rank: TypeAlias = tuple[float, int]
"""Place of a request among others; the smallest is first."""


class AdapterSlots:
    """The slots, the adapters in them, and the placements that the next plan tells the worker.

    Invariants:
        1. An adapter lies in one slot at most.
        2. A slot with users keeps its adapter.
        3. A placement that was not sent has a user, whose admission was not sent either.
    """

    def __init__(self, num_slots: int) -> None:
        """Starts with ``num_slots`` empty slots; 0 for a replica that runs no adapters."""
        self._users = [0] * num_slots
        # Slots by adapter, the one that was used least recently first.
        self._slots: dict[int, int] = {}
        self._empty = list(range(num_slots - 1, -1, -1))
        # Adapters by slot: placements that the next plan carries.
        self._unsent: dict[int, int] = {}
        # Adapters in placements that were sent, with the number of the last plan that has one.
        self._sent: dict[int, int] = {}
        # By slot: the adapter that waits for it, and the rank of its first request.
        self._claims: dict[int, tuple[int, Rank]] = {}

    def __len__(self) -> int:
        """The number of slots."""
        return len(self._users)

    def slot_of(self, adapter_id: int) -> int | None:
        """Returns the slot of an adapter; None if it lies in none."""
        return self._slots.get(adapter_id)

    def users_of(self, adapter_id: int) -> int:
        """Returns how many admitted requests use the adapter."""
        slot = self._slots.get(adapter_id)
        return 0 if slot is None else self._users[slot]

    def holds(self, adapter: Adapter | None) -> bool:
        """Whether a request with this adapter needs no placement."""
        return adapter is None or adapter.adapter_id in self._slots

    def has_room(self, adapter: Adapter | None, rank: Rank) -> bool:
        """Whether a request of this rank may use the adapter now: its slot is not claimed, or one is free."""
        if adapter is None:
            return True
        slot = self._slots.get(adapter.adapter_id)
        if slot is None:
            return bool(self._empty) or not all(self._users)
        claim = self._claims.get(slot)
        return claim is None or rank <= claim[1]

    def acquire(self, adapter_id: int) -> int:
        """Adds a user to an adapter; one that lies in no slot takes a slot without users.

        Returns:
            The slot.

        Raises:
            Internal: no slot is free.
        """
        slot = self._slots.pop(adapter_id, None)
        if slot is None:
            slot = self._take_slot()
            self._unsent[slot] = adapter_id
        self._slots[adapter_id] = slot
        self._users[slot] += 1
        return slot

    def _take_slot(self) -> int:
        if self._empty:
            return self._empty.pop()
        for adapter_id, slot in self._slots.items():
            if not self._users[slot]:
                del self._slots[adapter_id]
                return slot
        raise Internal("no adapter slot is free")

    def release(self, adapter_id: int) -> None:
        """Ends one use of an adapter."""
        slot = self._slots.pop(adapter_id)
        self._slots[adapter_id] = slot
        self._users[slot] -= 1
        if not self._users[slot] and slot in self._unsent:
            del self._unsent[slot]
            self.forget(adapter_id)

    def forget(self, adapter_id: int) -> None:
        """Empties the slot of an adapter without users; does nothing if the adapter lies in no slot.

        Its memory on the host is about to be freed, or the content of the slot is unknown.
        """
        slot = self._slots.pop(adapter_id, None)
        if slot is not None:
            assert not self._users[slot]
            self._empty.append(slot)

    def take_placements(self, step: int) -> tuple[AdapterPlacement, ...]:
        """Returns the placements for plan number ``step``, which is sent now."""
        if not self._unsent:
            return ()
        self._sent.update((adapter_id, step) for adapter_id in self._unsent.values())
        placements = tuple([AdapterPlacement(slot, adapter_id) for slot, adapter_id in self._unsent.items()])
        self._unsent.clear()
        return placements

    def answered(self, plan: StepPlan) -> bool:
        """Notes that a plan was answered; returns whether an adapter may leave its host because of that."""
        answered = [one.adapter_id for one in plan.place if self._sent.get(one.adapter_id) == plan.step]
        for adapter_id in answered:
            del self._sent[adapter_id]
        return bool(answered)

    def may_leave_host(self, adapter_id: int) -> bool:
        """Whether no request uses the adapter, and no plan that was sent needs it on the host."""
        return not self.users_of(adapter_id) and adapter_id not in self._sent

    # ---- claims ----

    def claim(self, adapter_id: int, rank: Rank) -> None:
        """Claims the slot with the fewest users for an adapter that waits; does nothing if all are claimed.

        Args:
            adapter_id: the adapter; it has one claim at most.
            rank: the rank of the request that waits for it.
        """
        for slot, (waiting, first) in self._claims.items():
            if waiting == adapter_id:
                self._claims[slot] = (waiting, min(first, rank))
                return
        # The least recently used comes first among those with equally many users.
        free = [slot for slot in self._slots.values() if slot not in self._claims]
        if free:
            self._claims[min(free, key=lambda slot: self._users[slot])] = (adapter_id, rank)

    def clear_claims(self) -> None:
        """Ends all claims, before the waiting requests are looked at again."""
        self._claims.clear()

    def check_integrity(self) -> None:
        """Checks the invariants.

        Raises:
            AssertionError: one does not hold.
        """
        taken = list(self._slots.values())
        assert sorted([*taken, *self._empty]) == list(range(len(self._users)))
        assert all(self._users[slot] == 0 for slot in self._empty)
        assert all(self._slots.get(adapter_id) == slot for slot, adapter_id in self._unsent.items())
        assert all(self._users[slot] > 0 for slot in self._unsent)
