"""The waiting queue and its orders: priority, tenants, arrival, ageing, and removal."""

import time
from itertools import count

import pytest

from scheduler_svc.dispatch.queueing import MOST_PASSED, WaitingQueue
from scheduler_svc.policy.order import ArrivalOrder, PriorityFairOrder
from scheduler_svc.policy.tenants import Tenants
from scheduler_svc.requests.request import Request
from tests.support.scheduler.factories import make_request, queue_of, take_all


def test_lower_priority_numbers_come_first_then_arrival() -> None:
    """Requests are ordered by priority, then by arrival."""
    late, first, second = make_request(priority=1), make_request(), make_request()
    assert take_all(queue_of(late, first, second)) == [first, second, late]


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


def test_waiting_tokens_are_counted_exactly() -> None:
    """The token count follows every addition and removal."""
    one, two = make_request([5] * 5), make_request([5] * 7)
    queue = queue_of(one, two)
    assert (queue.tenants.num_tokens, list(queue)) == (12, [one, two])
    queue.remove(one)
    assert queue.tenants.num_tokens == 7
    queue.remove(two)
    assert (len(queue), queue.tenants.num_tokens, queue.peek(0.0), two in queue) == (0, 0, None, False)


def test_tenants_alternate_by_served_tokens() -> None:
    """Many requests of one tenant do not hold up a single request of another."""
    flood = [make_request(tenant="flood") for _ in range(3)]
    late = make_request(tenant="late")
    queue = queue_of(*flood, late)
    order = []
    while (head := queue.peek(0.0)) is not None:
        queue.remove(head)
        queue.tenants.charge("late" if head is late else "flood", 10)
        order.append(head)
    assert order == [flood[0], late, *flood[1:]]


def test_priority_goes_before_fairness() -> None:
    """A tenant with a high share still comes first with a more urgent request."""
    urgent, other = make_request(tenant="a", priority=-1), make_request(tenant="b")
    queue = queue_of(urgent, other)
    queue.tenants.charge("a", 1_000_000)
    assert queue.peek(0.0) is urgent


@pytest.mark.parametrize(("weight", "low", "high"), [(2.0, 1.8, 2.2), (1.0, 0.9, 1.1), (0.25, 0.225, 0.275)])
def test_tokens_are_shared_by_weight_under_saturation(weight: float, low: float, high: float) -> None:
    """Two saturated tenants get tokens in the ratio of their weights, whatever the size of their requests."""
    queue = WaitingQueue(PriorityFairOrder(tenant_weights={"heavy": weight}))
    sizes = {"heavy": 30, "light": 110}
    # The light tenant sends much faster.
    for tenant, waiting in (("light", 50), ("heavy", 3)):
        for _ in range(waiting):
            queue.add(make_request([5] * sizes[tenant], tenant=tenant))
    served = dict.fromkeys(sizes, 0)
    running: list[str] = []
    for _ in range(3000):
        head = queue.peek(0.0)
        assert head is not None
        queue.remove(head)
        tenant = next(tenant for tenant, size in sizes.items() if size == len(head.token_ids))
        running = [*running[-3:], tenant]
        for name, tokens in ((tenant, len(head.token_ids)), *((row, 1) for row in running)):
            queue.tenants.charge(name, tokens)
            served[name] += tokens
        queue.add(make_request([5] * sizes[tenant], tenant=tenant))
    assert low < served["heavy"] / served["light"] < high


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


def test_a_batch_is_taken_in_order() -> None:
    """Those that do not join keep their places; so do those behind the last that is asked."""
    requests = [make_request([5] * length) for length in (3, 9, 2, 4, 1)]
    queue = queue_of(*requests)
    asked = []

    def joins(request: Request) -> bool | None:
        asked.append(request)
        return None if request is requests[4] else len(request.token_ids) < 5

    queue.take(0.0, joins)
    assert asked == requests
    assert take_all(queue) == [requests[1], requests[4]]


def test_a_batch_passes_over_a_bounded_number() -> None:
    """However long the queue is."""
    queue = queue_of(*(make_request() for _ in range(MOST_PASSED + 9)))
    asked: list[Request] = []

    def joins(request: Request) -> bool:
        asked.append(request)
        return False

    queue.take(0.0, joins)
    assert len(asked) == MOST_PASSED


def test_running_alone_costs_a_tenant_nothing() -> None:
    """Tokens served while no other tenant is active do not count against a tenant."""
    tenants = Tenants()
    tenants.add(alone := make_request(tenant="alone"))
    tenants.remove(alone)
    tenants.charge("alone", 100)
    tenants.add(make_request(tenant="new"))
    tenants.add(alone)
    assert tenants["new"] == tenants["alone"] == 100


def test_ageing_puts_a_request_among_the_most_urgent_exactly_on_time() -> None:
    """From then on its age decides; a clock that goes back changes nothing."""
    low, high = make_request(priority=2, arrival_s=100.0), make_request(arrival_s=115.0)
    queue = queue_of(low, high, order=PriorityFairOrder(ageing_s=10.0))
    assert queue.peek(119.999) is high
    assert queue.peek(120.0) is low
    assert queue.peek(115.0) is low
    queue.add(most_urgent := make_request(priority=-1, arrival_s=121.0))
    assert queue.peek(124.999) is most_urgent
    assert queue.peek(125.0) is high
    assert queue.peek(130.0) is low


def test_ageing_never_goes_before_a_tenants_share() -> None:
    """Old requests of a tenant that was served more wait, however old they are."""
    old = [make_request(tenant="flood", priority=priority) for priority in (0, 0, 3)]
    new = make_request(tenant="new", arrival_s=1000.0)
    queue = queue_of(*old, order=PriorityFairOrder(ageing_s=30.0))
    queue.tenants.charge("flood", 5)
    queue.add(new)
    queue.tenants.charge("flood", 1)
    assert queue.peek(1000.0) is new


@pytest.mark.parametrize("ageing", [None, 0])
def test_without_ageing_waiting_changes_nothing(ageing: float | None) -> None:
    """A more urgent request comes first however late it arrives."""
    queue = queue_of(make_request(priority=1), order=PriorityFairOrder(ageing_s=ageing))
    urgent = make_request(arrival_s=1e6)
    queue.add(urgent)
    assert queue.peek(1e6) is urgent


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


@pytest.mark.parametrize("tenant", ["patient", "urgent"])
def test_ageing_prevents_starvation(tenant: str) -> None:
    """Behind an endless stream of urgent requests, a less urgent one is first once it waited long enough."""
    ageing, priority, step_s = 5.0, 4, 0.5
    low = make_request(priority=priority, tenant=tenant)
    queue = queue_of(low, order=PriorityFairOrder(ageing_s=ageing))
    for step in count():
        now = step * step_s
        # Two requests arrive for each one that is served.
        for _ in range(2):
            queue.add(make_request(arrival_s=now, tenant="urgent"))
        head = queue.peek(now)
        assert head is not None
        queue.remove(head)
        queue.tenants.charge(head.tenant, 1)
        if head is low:
            break
        assert now < priority * ageing


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


@pytest.mark.parametrize("tenants", [1, 5000])
def test_queue_operations_scale_to_20_000_requests(tenants: int) -> None:
    """Operations cost at most a few times what they cost with 100 waiting requests."""

    def turn_s(waiting: int) -> float:
        requests = [
            make_request(tenant=f"t{number % tenants}", priority=number % 3, arrival_s=number / waiting)
            for number in range(waiting)
        ]
        queue = queue_of(*requests, order=PriorityFairOrder(ageing_s=30.0))
        queue.peek(1.0)
        turns = [make_request(tenant=f"t{number % tenants}", arrival_s=1.0) for number in range(1000)]
        start = time.process_time()
        for number, request in enumerate(turns):
            queue.add(request)
            head = queue.peek(1.0 + number / 1000)
            assert head is not None
            queue.remove(head)
            queue.tenants.charge(f"t{number % tenants}", 100)
        return (time.process_time() - start) / len(turns)

    few, many = min(turn_s(100) for _ in range(3)), min(turn_s(20_000) for _ in range(3))
    assert many < 5 * few + 20e-6


def test_membership_is_by_identity() -> None:
    """Another request with the same id is not a member."""
    request = make_request()
    queue = queue_of(request)
    twin: Request = make_request()
    twin.request_id = request.request_id
    assert request in queue
    assert twin not in queue
    assert not queue.remove(twin)
