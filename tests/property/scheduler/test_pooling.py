"""Random arrivals, aborts, failed steps and losses: each pooling request ends once, in the smallest shape."""

from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from protos.errors import ContextExceeded, Internal
from protos.steps import Pool, PoolShape, SlotOutput, StepPlan, StepResult
from scheduler_svc.engine.engine import Engine
from scheduler_svc.engine.placement import AttachedReplica
from scheduler_svc.policy.order import PriorityFairOrder
from scheduler_svc.replica.pooling import PoolScheduler
from scheduler_svc.replica.quarantine import Loss
from scheduler_svc.requests.sampling import FinishReason
from scheduler_svc.shapes.shape_config import PACKED_TOKENS
from tests.support.property_settings import machine
from tests.support.scheduler.factories import ListSink, make_pool_submission, make_pooled_model

pytestmark = pytest.mark.property

# With packed shapes, lengths are so many times as large: some are above PACKED_TOKENS.
SCALE = 64


def _shapes(*, packed: bool) -> st.SearchStrategy[list[PoolShape]]:
    lengths = st.integers(1, 12).map(lambda length: length * (SCALE if packed else 1))
    shape = st.builds(PoolShape, lengths, st.integers(1, 5), st.just(packed))
    return st.lists(shape, min_size=1, max_size=5, unique=True)


class Machine(RuleBasedStateMachine):
    """An engine with up to three replicas, driven by hand."""

    @initialize(shapes=st.booleans().flatmap(lambda packed: _shapes(packed=packed)))
    def start(self, shapes: list[PoolShape]) -> None:
        self.shapes = sorted(shapes)
        self.packs = shapes[0].packed
        self.now = 0.0
        self.engine = Engine(
            max_waiting=1000, max_waiting_tokens=100_000, clock=lambda: self.now, order=PriorityFairOrder()
        )
        self.engine.model = make_pooled_model(*self.shapes)
        self.sinks: dict[str, ListSink] = {}
        self.prompts: dict[str, tuple[int, ...]] = {}
        self.replicas: dict[str, PoolScheduler] = {}
        self.plans: dict[str, StepPlan | None] = {}
        self.woken: set[str] = set()
        self.count = 0

    @rule(
        length=st.integers(1, 14),
        extra=st.integers(0, SCALE - 1),
        priority=st.integers(-1, 1),
        tenant=st.sampled_from("ab"),
    )
    def submit(self, length: int, extra: int, priority: int, tenant: str) -> None:
        self.count += 1
        if self.packs:
            length = (length - 1) * SCALE + 1 + extra
        name, prompt = f"r{self.count}", tuple(range(1, 1 + length))
        sink = ListSink()
        submission = make_pool_submission(prompt, request_id=name, priority=priority, tenant=tenant)
        if length > self.shapes[-1].prompt_len:
            with pytest.raises(ContextExceeded):
                self.engine.submit(submission, sink)
            return
        self.engine.submit(submission, sink)
        self.sinks[name], self.prompts[name] = sink, prompt

    @rule(pick=st.randoms(use_true_random=False))
    def abort(self, pick: Any) -> None:
        live = [name for name in self.sinks if self._is_live(name)]
        if live:
            name = pick.choice(live)
            assert self.engine.abort(name)
            assert self.sinks[name].events[-1].finish_reason is FinishReason.ABORT

    @rule(name=st.sampled_from("xyz"))
    def attach(self, name: str) -> None:
        if name in self.replicas:
            return
        scheduler = PoolScheduler(self.shapes, 2, self.engine, clock=lambda: self.now)
        self.replicas[name], self.plans[name] = scheduler, None
        self.engine.attach(name, AttachedReplica(scheduler, lambda: self.woken.add(name)))

    @rule(name=st.sampled_from("xyz"), loss=st.sampled_from([Loss.LEFT, Loss.DIED]))
    def lose(self, name: str, loss: Loss) -> None:
        if self.replicas.pop(name, None) is not None:
            plan = self.plans.pop(name)
            self.woken.discard(name)
            running = sum(self._is_live(one.request_id) for one in plan.admit) if plan else 0
            detached = self.engine.detach(name, loss)
            # Without a plan, at most the first request of the next batch, which is to blame for nothing.
            left = detached.num_requeued + len(detached.failed)
            assert left == running if plan else left <= 1
            assert len(detached.suspects) == (running if loss.blames else 0)
            assert not detached.failed or (loss.blames and running == len(plan.admit if plan else ()) == 1)

    @rule(name=st.sampled_from("xyz"), seconds=st.floats(0, 10), fails=st.booleans())
    def drive(self, name: str, seconds: float, fails: bool) -> None:
        """Does what a driver does when it is woken or its step is answered."""
        self.now += seconds
        if name in self.replicas:
            self._drive(name, Internal("the device failed") if fails else None)

    def _drive(self, name: str, error: Internal | None = None) -> None:
        scheduler = self.replicas[name]
        plan = self.plans[name]
        if plan is not None:
            outputs = tuple(
                SlotOutput(one.slot, (), pooled=(float(len(one.token_ids)), 0.0)) for one in plan.admit
            )
            scheduler.update(StepResult(plan.step, outputs=() if error else outputs, error=error))
        elif name not in self.woken:
            return
        self.woken.discard(name)
        self.engine.dispatch()
        self.plans[name] = scheduler.next_plan()
        if (plan := self.plans[name]) is not None:
            self._check(plan)

    def _check(self, plan: StepPlan) -> None:
        assert isinstance(plan.work, Pool)
        assert plan.work.shape in self.shapes
        assert plan.work.slots == tuple(one.slot for one in plan.admit)
        assert 1 <= len(plan.work.slots) <= plan.work.shape.batch
        assert all(self._is_live(one.request_id) for one in plan.admit), "an ended request runs"
        suspects = [one for one in plan.admit if self._is_suspect(one.request_id)]
        assert not suspects or len(plan.admit) == 1, "a suspect shares a batch"
        lengths = [len(one.token_ids) for one in plan.admit]
        if not self.packs:
            assert all(plan.work.shape.prompt_len == self._smallest(length) for length in lengths)
            return
        total, count = sum(lengths), len(lengths)
        assert total <= max(PACKED_TOKENS, self._smallest(lengths[0]))
        holding = [shape for shape in self.shapes if shape.prompt_len >= total and shape.batch >= count]
        assert plan.work.shape == holding[0]

    def _smallest(self, length: int) -> int:
        """Returns the smallest length of a shape that a prompt fits into."""
        return min(shape.prompt_len for shape in self.shapes if shape.prompt_len >= length)

    def _is_live(self, name: str) -> bool:
        return not any(event.error or event.finish_reason for event in self.sinks[name].events)

    def _is_suspect(self, name: str) -> bool:
        request = self.engine.find(name)
        return request is not None and request.suspect

    @invariant()
    def no_request_is_forgotten(self) -> None:
        """Every live request waits or runs, and no free replica sleeps while one that it may run waits."""
        if not hasattr(self, "engine"):
            return
        live = {name for name in self.sinks if self._is_live(name)}
        assert self.engine.num_waiting + self.engine.load().num_running == len(live)
        idle = {name for name, plan in self.plans.items() if plan is None}
        for request in self.engine.waiting:
            # One that failed somewhere waits for a replica that it has not failed on.
            usable = set(self.replicas) - request.failed_on or set(self.replicas)
            assert not idle & usable or self.woken & idle

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        self.attach("x")
        while self.engine.num_waiting or self.engine.load().num_running:
            for name in list(self.replicas):
                self._drive(name)
        for name, sink in self.sinks.items():
            (event,) = (event for event in sink.events if event.error or event.finish_reason)
            if event.finish_reason is FinishReason.STOP:
                assert list(event.pooled) == [float(len(self.prompts[name])), 0.0]


Machine.TestCase.settings = machine(max_examples=60, stateful_step_count=40)
TestPooling = Machine.TestCase
