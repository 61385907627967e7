"""What a replica's worker must keep for requests, and what its late answers mean."""

from scheduler_svc.adapters.registry import Adapter
from scheduler_svc.adapters.seats import AdapterSeats

A, B, C = (Adapter(number, name, name) for number, name in enumerate("abc", start=1))


def held(*adapters: Adapter, awaited: bool = False) -> AdapterSeats:
    """Returns the seats of a replica that takes two adapters at once, holds three and has these."""
    seats = AdapterSeats(2, 3, lambda: 0.0)
    for adapter in adapters:
        seats.loading[adapter.adapter_id] = 10 * adapter.adapter_id
        seats.loaded(adapter.adapter_id, (), awaited=awaited)
    return seats


def test_the_adapters_that_a_load_must_not_displace() -> None:
    """Those in use, those that were loaded for a waiting request, and those that are being loaded."""
    seats = held(A, B)
    assert seats.needed == []
    seats.acquire(A.adapter_id)
    seats.loading[C.adapter_id] = 30
    assert sorted(seats.needed) == [10, 30]
    seats.loaded(C.adapter_id, (20,), awaited=True)
    assert sorted(seats.needed) == [10, 30]
    assert not seats.holds(B)
    seats.awaited.discard(C.adapter_id)
    seats.release(A.adapter_id)
    assert seats.needed == []


def test_a_host_full_of_needed_adapters_takes_no_other() -> None:
    """Neither a load nor an idle adapter, which the worker may be about to forget for a load."""
    seats = held(A, B, awaited=True)
    seats.loading[C.adapter_id] = 30
    assert not seats.may_need_more
    assert seats.has_room(A, (0.0, 0)), "it was loaded for this request"
    seats.awaited.discard(B.adapter_id)
    assert seats.has_room(B, (0.0, 0))
    seats = held(A, B, C)
    seats.acquire(A.adapter_id)
    seats.loading[4], seats.loading[5] = 40, 50
    assert not seats.has_room(B, (0.0, 0))


def test_an_early_load_that_is_gone_says_nothing_of_a_later_one() -> None:
    """The worker's refusal of an admission, or its report, may come after the adapter was loaded again."""
    seats = held(A)
    first = seats.acquire(A.adapter_id)
    seats.lost(A.adapter_id, first)
    assert not seats.holds(A)
    seats.loading[A.adapter_id] = 11
    seats.loaded(A.adapter_id, (), awaited=False)
    seats.lost(A.adapter_id, first)
    assert seats.holds(A)
    assert seats.acquire(A.adapter_id) == 11


def test_an_adapter_that_is_in_use_again_is_not_lost() -> None:
    """The worker forgot it on the host: it still lies on the device, or the admission is refused."""
    seats = held(A, B)
    seats.loading[C.adapter_id] = 30
    seats.acquire(A.adapter_id)
    seats.loaded(C.adapter_id, (10,), awaited=False)
    assert seats.holds(A)
