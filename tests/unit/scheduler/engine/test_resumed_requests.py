"""Requests that a client submits again because it lost the scheduler that had accepted them."""

import pytest

from protos.errors import Overloaded
from scheduler_svc.engine.waiting import RESUMED_FACTOR
from scheduler_svc.policy.order import ArrivalOrder, PriorityFairOrder
from scheduler_svc.replica.quarantine import Loss
from tests.support.scheduler.factories import expected_tokens, make_rig, make_shapes, make_submission


def test_a_new_scheduler_takes_all_requests_of_the_one_before() -> None:
    """The limits of the queue do not apply, with and without tokens received; new requests are refused."""
    rig = make_rig(max_waiting=6, max_waiting_tokens=30)
    rig.engine.detach("replica-0", Loss.DIED)
    sinks = [
        rig.submit(
            make_submission(
                [5, 6, 7], request_id=f"r{n}", age_s=1.0, resumed=expected_tokens([5, 6, 7], 8)[: n % 3]
            )
        )
        for n in range(10)
    ]
    with pytest.raises(Overloaded):
        rig.submit(make_submission(request_id="new"))
    rig.start()
    rig.run()
    for n, sink in enumerate(sinks):
        assert sink.tokens == expected_tokens([5, 6, 7], 8)[n % 3 :]


@pytest.mark.parametrize("order", [ArrivalOrder(), PriorityFairOrder(), PriorityFairOrder(ageing_s=10.0)])
def test_a_resumed_request_keeps_its_age(order: PriorityFairOrder) -> None:
    """It is served before requests that came after it, to whichever scheduler they came."""
    rig = make_rig(make_shapes(max_num_seqs=1, buckets=(1,)), order=order)
    rig.now = 50.0
    rig.submit(make_submission(request_id="running"))
    for name, age_s in (("new", None), ("young", 5.0), ("old", 200.0)):
        rig.submit(make_submission(request_id=name, age_s=age_s))
    ended: list[str] = []
    while rig.step():
        ended += [
            name
            for name, sink in rig.sinks.items()
            if sink.events and sink.events[-1].finish_reason and name not in ended
        ]
    assert ended == ["running", "old", "young", "new"]


def test_ageing_counts_the_time_under_the_scheduler_before() -> None:
    """A less urgent request that waited long enough there is served before an urgent one."""
    rig = make_rig(make_shapes(max_num_seqs=1, buckets=(1,)), order=PriorityFairOrder(ageing_s=10.0))
    rig.submit(make_submission(request_id="running", priority=-1))
    rig.step()
    urgent = rig.submit(make_submission(request_id="urgent", priority=-1))
    old = rig.submit(make_submission(request_id="old", age_s=21.0))
    while not old.events:
        rig.step()
    assert not urgent.events


def test_the_time_in_queue_counts_from_the_resubmission() -> None:
    """The time under the scheduler before is in that one's statistics."""
    rig = make_rig()
    rig.now = 100.0
    sink = rig.submit(make_submission(age_s=60.0))
    rig.run()
    assert sink.events[0].first
    assert sink.events[0].queue_s == 0.0


def test_the_first_event_names_the_seed() -> None:
    """A client that submits a request again needs the seed that the scheduler drew."""
    rig = make_rig()
    sink = rig.submit(make_submission(seed=42))
    rig.run()
    assert sink.events[0].seed == 42


def test_a_claim_to_have_been_accepted_has_a_limit() -> None:
    """Nothing proves the claim, so a client that makes it falsely cannot fill the memory."""
    rig = make_rig(max_waiting=3, max_waiting_tokens=1000)
    room = RESUMED_FACTOR * 3 + rig.shapes.max_num_seqs
    for number in range(room):
        rig.submit(make_submission(request_id=f"r{number}", age_s=1.0))
    with pytest.raises(Overloaded):  # noqa: PT012 - running requests do not count, so it is one of several
        for number in range(room, room + rig.shapes.max_num_seqs + 1):
            rig.submit(make_submission(request_id=f"r{number}", age_s=1.0))
    with pytest.raises(Overloaded):
        rig.submit(make_submission(request_id="new"))
