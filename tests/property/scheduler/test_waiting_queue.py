"""A waiting queue under random operations, checked against a plain model of its order after every step."""

from collections import Counter

import hypothesis.strategies as st
import pytest
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from scheduler_svc.engine.waiting import WaitingQueue
from scheduler_svc.policy.order import PriorityFairOrder
from scheduler_svc.requests.request import Request
from tests.support.property_settings import machine
from tests.support.scheduler.factories import make_request

pytestmark = pytest.mark.property

# All numbers are multiples of a quarter, so floats hold all sums and quotients exactly.
TENANTS = {"a": 1.0, "b": 2.0, "c": 0.5, "d": 1.0}


class NaiveCounters:
    """The virtual token counters as the paper defines them, without forgetting tenants."""

    def __init__(self) -> None:
        self.counters: dict[str, float] = {}
        self.last: str | None = None

    def floor(self, active: set[str]) -> float:
        if active:
            return min(self.counters[tenant] for tenant in active)
        return 0.0 if self.last is None else self.counters[self.last]


class WaitingMachine(RuleBasedStateMachine):
    """Compares a queue with a list that is searched at every check."""

    @initialize(ageing=st.sampled_from([None, 0.25, 1.0, 2.5]))
    def start(self, ageing: float | None) -> None:
        self.ageing = ageing
        self.order = PriorityFairOrder(ageing, TENANTS)
        self.queue = WaitingQueue(self.order)
        self.naive = NaiveCounters()
        self.now = 0.0
        self.waiting: list[tuple[str, Request]] = []
        self.running: list[tuple[str, Request]] = []
        # Members of `waiting` that are skipped.
        self.skipped: list[tuple[str, Request]] = []

    @property
    def in_line(self) -> list[tuple[str, Request]]:
        return [member for member in self.waiting if member not in self.skipped]

    @property
    def active(self) -> set[str]:
        return {tenant for tenant, _ in self.waiting}

    def next_of(self, members: list[tuple[str, Request]]) -> tuple[str, Request] | None:
        """The member served least and earliest, of the most urgent and of those that waited long enough."""
        most_urgent = min((request.priority for _, request in members), default=0)
        candidates = [
            (tenant, request)
            for tenant, request in members
            if request.priority == most_urgent
            or (
                self.ageing is not None
                and self.now - request.arrival_s >= (request.priority - most_urgent) * self.ageing
            )
        ]
        return min(
            candidates, key=lambda member: (self.naive.counters[member[0]], member[1].arrival), default=None
        )

    def put(self, member: tuple[str, Request]) -> None:
        tenant, request = member
        floor = self.naive.floor(self.active)
        if tenant not in self.active:
            self.naive.counters[tenant] = max(self.naive.counters.get(tenant, 0.0), floor)
        self.waiting.append(member)
        self.queue.add(request)

    def take(self, member: tuple[str, Request]) -> None:
        self.waiting.remove(member)
        self.skipped = [other for other in self.skipped if other is not member]
        if not self.waiting:
            self.naive.last = member[0]
        assert self.queue.remove(member[1])
        assert member[1] not in self.queue
        assert not self.queue.remove(member[1])

    @rule(tenant=st.sampled_from(sorted(TENANTS)), priority=st.integers(-2, 3), tokens=st.integers(1, 9))
    def arrive(self, tenant: str, priority: int, tokens: int) -> None:
        request = make_request([5] * tokens, tenant=tenant, priority=priority, arrival_s=self.now)
        request.rank = self.order.rank(request)
        self.put((tenant, request))

    @rule(quarters=st.integers(1, 40))
    def time_passes(self, quarters: int) -> None:
        self.now += quarters / 4

    @precondition(lambda self: self.in_line)
    @rule(data=st.data())
    def skip(self, data: st.DataObject) -> None:
        member = data.draw(st.sampled_from(self.in_line))
        self.queue.skip(member[1], member[0])
        self.skipped.append(member)

    @rule(tenant=st.sampled_from([None, *sorted(TENANTS)]))
    def bring_back(self, tenant: str | None) -> None:
        for each in TENANTS if tenant is None else [tenant]:
            group = [member for member in self.skipped if member[0] == each]
            if group:
                self.skipped.remove(min(group, key=lambda member: member[1].arrival))
        self.queue.bring_back(tenant)

    @precondition(lambda self: self.in_line)
    @rule()
    def admit(self) -> None:
        member = self.next_of(self.in_line)
        assert member is not None
        self.take(member)
        self.running.append(member)
        self.serve(member[0], len(member[1].token_ids))

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.take(data.draw(st.sampled_from(self.waiting)))

    @precondition(lambda self: self.running)
    @rule()
    def decode(self) -> None:
        for tenant in sorted({tenant for tenant, _ in self.running}):
            self.serve(tenant, sum(other == tenant for other, _ in self.running))

    def serve(self, tenant: str, tokens: int) -> None:
        self.queue.tenants.charge(tenant, tokens)
        self.naive.counters[tenant] += tokens / TENANTS[tenant]

    @precondition(lambda self: self.running)
    @rule(data=st.data(), returns=st.booleans())
    def leave(self, data: st.DataObject, returns: bool) -> None:
        member = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        if returns:
            member[1].token_ids.append(5)
            self.put(member)

    @rule(size=st.integers(1, 4), longest=st.integers(1, 9))
    def take_batch(self, size: int, longest: int) -> None:
        """Takes the next requests of some lengths, and charges for each before the next is chosen."""
        before, batch = self.in_line, list[Request]()

        def joins(request: Request) -> bool | None:
            if len(batch) == size:
                return None
            member = self.next_of([one for one in before if one in self.waiting])
            assert member is not None
            assert request is member[1]
            before.remove(member)
            if len(request.token_ids) > longest:
                return False
            batch.append(request)
            self.running.append(member)
            self.serve(member[0], len(request.token_ids))
            self.waiting.remove(member)
            if not self.waiting:
                self.naive.last = member[0]
            return True

        self.queue.take(self.now, joins)

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "queue"):
            return
        head = self.next_of(self.in_line)
        assert self.queue.peek(self.now) is (head[1] if head else None)
        assert len(self.queue) == len(self.waiting)
        tenants = self.queue.tenants
        assert tenants.requests == Counter(tenant for tenant, _ in self.waiting)
        assert tenants.num_tokens == sum(len(request.token_ids) for _, request in self.waiting)
        assert all(request in self.queue for _, request in self.waiting)
        assert not any(request in self.queue for _, request in self.running)

    @invariant()
    def keeps_little(self) -> None:
        if not hasattr(self, "queue"):
            return
        assert len(self.order._urgent) + len(self.order._later) <= 2 * len(self.waiting) + 20
        for line in self.order._classes.values():
            assert len(line._heap) <= 2 * len(line.requests) + 20

    def teardown(self) -> None:
        if not hasattr(self, "queue"):
            return
        while self.waiting:
            self.agrees()
            self.take(self.next_of(self.in_line) or self.waiting[0])
        assert self.queue.peek(self.now) is None
        assert not self.order._classes


TestWaiting = WaitingMachine.TestCase
TestWaiting.settings = machine(max_examples=200, stateful_step_count=60)
