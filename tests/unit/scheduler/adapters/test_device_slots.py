"""Adapter slots of a device: users, placements, least recently used, claims."""

import pytest

from protos.errors import Internal
from protos.steps import AdapterPlacement, StepPlan
from scheduler_svc.adapters.device_slots import AdapterSlots
from scheduler_svc.adapters.registry import Adapter


def adapter(adapter_id: int) -> Adapter:
    return Adapter(adapter_id, f"a{adapter_id}", "")


def slots_with(*adapter_ids: int, num_slots: int = 2) -> AdapterSlots:
    """Returns slots that adapters lie in, used once each, in this order; their placements are answered."""
    slots = AdapterSlots(num_slots)
    for adapter_id in adapter_ids:
        slots.acquire(adapter_id)
    slots.answered(StepPlan(1, place=slots.take_placements(1)))
    for adapter_id in adapter_ids:
        slots.release(adapter_id)
    return slots


def test_an_adapter_is_placed_once_and_shared() -> None:
    """The first user takes an empty slot, and the next plan places the adapter there; others share it."""
    slots = AdapterSlots(2)
    assert slots.acquire(7) == slots.acquire(7) == 0
    assert slots.acquire(8) == 1
    assert slots.take_placements(1) == (AdapterPlacement(0, 7), AdapterPlacement(1, 8))
    assert slots.take_placements(2) == ()
    assert (slots.users_of(7), slots.users_of(8)) == (2, 1)


def test_an_unused_adapter_stays_until_its_slot_is_needed() -> None:
    """A later request needs no placement; a new adapter takes the slot that was used least recently."""
    slots = slots_with(7, 8)
    assert slots.acquire(7) == 0
    assert slots.take_placements(2) == ()
    slots.release(7)
    assert slots.acquire(9) == 1, "adapter 8 was used before adapter 7"
    assert slots.take_placements(3) == (AdapterPlacement(1, 9),)
    assert slots.slot_of(8) is None


def test_no_slot_is_taken_from_a_user() -> None:
    """While requests use all adapters, another one finds no room."""
    slots = AdapterSlots(1)
    slots.acquire(7)
    assert not slots.has_room(adapter(8), (0.0, 1))
    with pytest.raises(Internal):
        slots.acquire(8)
    slots.release(7)
    assert slots.has_room(adapter(8), (0.0, 1))


def test_a_placement_that_was_not_sent_is_taken_back() -> None:
    """The slot of a request that leaves before its plan is empty again: no plan has filled it."""
    slots = slots_with(7, num_slots=1)
    slots.acquire(8)
    slots.release(8)
    assert slots.take_placements(2) == ()
    assert slots.slot_of(7) is slots.slot_of(8) is None
    slots.check_integrity()


def test_an_adapter_stays_on_the_host_while_a_plan_needs_it() -> None:
    """Neither its users nor the plan that places it may be outstanding."""
    slots = AdapterSlots(1)
    slots.acquire(7)
    place = slots.take_placements(1)
    slots.release(7)
    assert not slots.may_leave_host(7)
    assert slots.answered(StepPlan(1, place=place))
    assert slots.may_leave_host(7)
    slots.acquire(7)
    assert not slots.may_leave_host(7)


def test_a_claimed_slot_gets_no_new_users_of_later_rank() -> None:
    """Requests that rank before the claim still use the slot; a claim ends with the next look at all."""
    slots = AdapterSlots(1)
    slots.acquire(7)
    slots.claim(8, (5.0, 0))
    assert slots.has_room(adapter(7), (4.0, 0))
    assert not slots.has_room(adapter(7), (6.0, 0))
    slots.clear_claims()
    assert slots.has_room(adapter(7), (6.0, 0))


def test_each_waiting_adapter_claims_one_slot() -> None:
    """The slot with the fewest users is claimed first, then the next one; there is one claim an adapter."""
    slots = AdapterSlots(2)
    for adapter_id in (7, 7, 8):
        slots.acquire(adapter_id)
    slots.claim(9, (5.0, 0))
    slots.claim(9, (4.0, 0))
    assert slots.has_room(adapter(7), (6.0, 0))
    assert not slots.has_room(adapter(8), (4.5, 0)), "the first request of the adapter counts"
    slots.claim(10, (6.0, 0))
    assert not slots.has_room(adapter(7), (7.0, 0))
    slots.claim(11, (7.0, 0))
    slots.check_integrity()
