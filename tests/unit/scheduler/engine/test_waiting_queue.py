"""The waiting queue and its orders: priority, tenants, arrival, ageing, and removal."""

import time

import pytest

from scheduler_svc.engine.waiting import MOST_PASSED, WaitingQueue
from scheduler_svc.policy.order import ArrivalOrder, PriorityFairOrder
from scheduler_svc.policy.tenants import Tenants
from scheduler_svc.requests.request import Request
from tests.support.scheduler.factories import make_request


def queue_of(*requests: Request, order: PriorityFairOrder | None = None) -> WaitingQueue:
    """Returns a queue to which the requests were added in this order."""
    queue = WaitingQueue(order or PriorityFairOrder())
    for request in requests:
        queue.add(request)
    return queue


def take_all(queue: WaitingQueue, now: float = 0.0) -> list[Request]:
    """Removes the head until the queue is empty; returns the requests in order."""
    order = []
    while (head := queue.peek(now)) is not None:
        assert queue.remove(head)
        order.append(head)
    return order


def test_arrival_order_ignores_priority_and_tenant() -> None:
    """Priority, tenant and time change nothing in arrival order."""
    requests = [make_request(priority=priority, tenant=str(priority)) for priority in (3, -1, 0, 2)]
    queue = queue_of(*requests, order=ArrivalOrder())
    queue.tenants.charge("3", 1000)
    assert queue.peek(1e6) is requests[0]
    assert take_all(queue) == requests
    assert take_all(queue_of(*reversed(requests), order=ArrivalOrder())) == requests


@pytest.mark.parametrize("order", [ArrivalOrder, PriorityFairOrder])
def test_a_request_that_returns_keeps_its_place(order: type[PriorityFairOrder]) -> None:
    """A preempted request stays before later arrivals, even after several preemptions."""
    old, new = make_request(), make_request()
    queue = queue_of(old, new, order=order())
    for _ in range(3):
        assert queue.peek(0.0) is old
        assert queue.remove(old)
        assert old not in queue
        assert queue.peek(0.0) is new
        queue.add(old)
    assert queue.peek(0.0) is old
    assert len(queue) == 2


def test_idling_earns_no_credit() -> None:
    """A tenant that returns is level with the least served tenant, not ahead of it."""
    queue = queue_of(*(busy := [make_request(tenant="busy") for _ in range(3)]))
    queue.tenants.charge("busy", 1000)
    back = [make_request(tenant="back") for _ in range(2)]
    for request in back:
        queue.add(request)
    assert queue.peek(0.0) is busy[0]
    queue.tenants.charge("busy", 1)
    assert queue.peek(0.0) is back[0]
    queue.tenants.charge("back", 2)
    assert queue.peek(0.0) is busy[0]


def test_running_alone_costs_a_tenant_nothing() -> None:
    """Tokens served while no other tenant is active do not count against a tenant."""
    tenants = Tenants()
    tenants.add(alone := make_request(tenant="alone"))
    tenants.remove(alone)
    tenants.charge("alone", 100)
    tenants.add(make_request(tenant="new"))
    tenants.add(alone)
    assert tenants["new"] == tenants["alone"] == 100


def test_a_batch_passes_over_a_bounded_number() -> None:
    """However long the queue is."""
    queue = queue_of(*(make_request() for _ in range(MOST_PASSED + 9)))
    asked: list[Request] = []

    def joins(request: Request) -> bool:
        asked.append(request)
        return False

    queue.take(0.0, joins)
    assert len(asked) == MOST_PASSED


@pytest.mark.parametrize("ageing", [0.1, 0.3, 1 / 3, 1e-3, 1e9])
def test_promotions_terminate_with_every_ageing_time(ageing: float) -> None:
    """Ageing times that a float cannot represent neither loop nor lose a promotion."""
    queue = queue_of(make_request(priority=1), order=PriorityFairOrder(ageing_s=ageing))
    for step in range(1, 200):
        assert queue.peek(step * ageing) is not None
    queue.add(make_request(priority=0, arrival_s=200 * ageing))
    head = queue.peek(200 * ageing)
    assert head is not None
    assert head.priority == 1


def test_invalid_settings_are_refused() -> None:
    """The error names the value and its rule."""
    with pytest.raises(ValueError, match="ageing_s must be 0 or at least"):
        PriorityFairOrder(ageing_s=1e-9)
    with pytest.raises(ValueError, match="ageing_s must be 0 or at least"):
        PriorityFairOrder(ageing_s=-1.0)
    for weight in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="weight of tenant 'a' must be a positive number"):
            PriorityFairOrder(tenant_weights={"a": weight})


def test_removed_requests_leave_no_garbage() -> None:
    """Internal structures stay small while ten thousand requests pass a waiting head."""
    order = PriorityFairOrder(ageing_s=1.0)
    queue = queue_of(head := make_request(priority=-1), order=order)
    for number in range(10_000):
        request = make_request(tenant=f"t{number % 50}", priority=number % 7)
        queue.add(request)
        queue.remove(request)
    assert len(order._urgent) + len(order._later) < 100
    assert len(order._classes) == len(order._priorities) == len(order.tenants._active) == 1
    assert len(order.tenants._heap) < 200
    assert queue.peek(0.0) is head


def test_only_recent_idle_tenants_are_remembered() -> None:
    """Ten thousand tenants become idle; only the ones charged last are kept."""
    tenants = Tenants(max_idle=100)
    tenants.add(make_request(tenant="waits"))
    tenants.charge("runs", 0)
    for number in range(10_000):
        tenants.add(request := make_request(tenant=f"t{number}"))
        tenants.charge(request.tenant, 5)
        tenants.remove(request)
        tenants.charge("runs", 1)
    assert len(tenants._idle) == 100
    assert len(tenants._heap) < 200
    assert (tenants["runs"], tenants["t0"], tenants["waits"]) == (10_000, 0, 0)


def test_bounds_follow_the_tenants_shares() -> None:
    """Beyond half of the queue a tenant has its weighted share, and of a full queue that of the reserve."""
    tenants = Tenants({"paid": 3.0})

    def fill(tenant: str) -> int:
        accepted = 0
        while tenants.exceeds(tenant, 1, 1, 80, 1000) is None:
            tenants.add(make_request([5], tenant=tenant))
            accepted += 1
        return accepted

    def taken(tenant: str) -> list[int]:
        return [fill(one) for one in (tenant, "free", "paid")]

    assert taken("paid") == [80, 10, 0]
    for request in [make_request([5], tenant="paid")] * 60:
        tenants.remove(request)
    # Of 80 places, "paid" may have 60 and "free" 20.
    assert (tenants.requests["free"], fill("free"), fill("paid")) == (10, 10, 40)
    assert tenants.exceeds("other", 1, 1, 80, 1000) is None
    assert tenants.exceeds("other", 1, 1000, 80, 1000) is None
    assert tenants.exceeds("other", 1, 2000, 80, 1000) == "max_num_queued_tokens"


@pytest.mark.parametrize("tenants", [1, 2000])
def test_queue_operations_scale_to_5_000_requests(tenants: int) -> None:
    """Operations cost at most a few times what they cost with 100 waiting requests."""

    def turn_s(waiting: int) -> float:
        requests = [
            make_request(tenant=f"t{number % tenants}", priority=number % 3, arrival_s=number / waiting)
            for number in range(waiting)
        ]
        queue = queue_of(*requests, order=PriorityFairOrder(ageing_s=30.0))
        queue.peek(1.0)
        turns = [make_request(tenant=f"t{number % tenants}", arrival_s=1.0) for number in range(500)]
        start = time.process_time()
        for number, request in enumerate(turns):
            queue.add(request)
            head = queue.peek(1.0 + number / 500)
            assert head is not None
            queue.remove(head)
            queue.tenants.charge(f"t{number % tenants}", 100)
        return (time.process_time() - start) / len(turns)

    few, many = min(turn_s(100) for _ in range(3)), min(turn_s(5_000) for _ in range(3))
    assert many < 5 * few + 20e-6
