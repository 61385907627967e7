"""Random operations with LoRA adapters: requests of several adapters on few slots and few places on the host.

The simulated device keeps adapters as a worker does and computes with those in its slots, so a wrong adapter
shows in the tokens. It fails a request of more adapters than it has slots for.
"""

from collections import Counter

import hypothesis.strategies as st
import pytest
from hypothesis import given
from hypothesis.stateful import invariant, precondition, rule

from protos.errors import Overloaded
from scheduler_svc.adapters.registry import Adapter
from tests.property.scheduler.test_machines import SchedulerMachine
from tests.support.property_settings import machine, scaled
from tests.support.scheduler.factories import make_rig, make_shapes, make_submission

pytestmark = pytest.mark.property

NAMES = ("a", "b", "c", "d")


class AdapterMachine(SchedulerMachine):
    """Requests of the base and of four adapters, which are replaced and unloaded meanwhile."""

    adapter_slots = (1, 2, 3)

    def __init__(self) -> None:
        super().__init__()
        # The weights that each name stands for.
        self.weights: dict[str, str] = {}
        self.versions = 0

    def isolated_by(self, salt: str) -> tuple[str, str, str]:
        return "", salt, self.weights.get(salt, "")

    @rule(
        prompt=st.lists(st.integers(3, 4), min_size=1, max_size=20), max_tokens=st.integers(1, 20),
        salt=st.sampled_from(["", *NAMES]), priority=st.integers(0, 1), n=st.sampled_from([1, 1, 1, 2, 3]),
        stop_at=st.sampled_from([None, None, 0, 5]),
    )  # fmt: skip
    def submit(
        self, prompt: list[int], max_tokens: int, salt: str, priority: int, n: int, stop_at: int | None
    ) -> None:
        if salt and salt not in self.weights:
            self.load(salt, same=False)
        if not salt or salt in self.weights:
            super().submit(prompt, max_tokens, salt, priority, n, stop_at)

    @rule(name=st.sampled_from(NAMES), same=st.booleans())
    def load(self, name: str, same: bool) -> None:
        """Loads an adapter, or replaces it by one with the same or other weights."""
        self.versions += 1
        weights = self.weights[name] if same and name in self.weights else f"{name}{self.versions}"
        try:
            self.rig.answer_loads()
            loaded = self.rig.load_adapter(name, weights, in_place=True)
        except Overloaded:
            return  # requests use every adapter on the host
        assert isinstance(loaded, Adapter)
        self.weights[name] = weights

    @precondition(lambda self: self.weights)
    @rule(data=st.data())
    def unload(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.weights)))
        self.rig.engine.adapters.unload(name)
        del self.weights[name]

    @rule(extra=st.integers(0, 2))
    def replace_host(self, extra: int) -> None:
        """The replica is replaced by one whose host holds more, or fewer, adapters."""
        self.rig.max_cpu_loras = self.rig.adapter_slots + extra
        self.crash(False)

    @precondition(lambda self: self.rig.hosted)
    @rule(data=st.data())
    def lose_an_adapter(self, data: st.DataObject) -> None:
        """One left the host for another one whose load then failed: the scheduler was not told."""
        assert self.rig.adapters is not None
        self.rig.adapters.store.unload(data.draw(st.sampled_from(sorted(self.rig.hosted))))

    @rule(at_once=st.booleans())
    def loads_take_time(self, at_once: bool) -> None:
        self.rig.loads_at_once = at_once
        if at_once:
            self.rig.answer_loads()

    @invariant()
    def adapter_slots_are_sound(self) -> None:
        if not hasattr(self, "rig"):
            return
        scheduler = self.rig.scheduler
        seats = scheduler.adapters
        assert len(seats._users) <= seats.max_used
        assert len(seats._users) + len(seats.loading) + len(seats.awaited) <= seats.max_held
        assert seats.awaited <= seats.held.keys() - seats._users.keys()
        assert not seats.held.keys() & seats.loading.keys()
        queues = self.rig.engine._queues
        waiting = [*queues, *queues._deferred.values()]
        assert queues.waiting.tenants.requests == Counter(one.tenant for one in waiting)
        assert queues.waiting.tenants.num_tokens == sum(len(one.token_ids) for one in waiting)
        users = Counter(one.adapter.adapter_id for one in scheduler._slots.requests if one.adapter)
        assert seats._users == users

    def teardown(self) -> None:
        if hasattr(self, "rig"):
            self.rig.loads_at_once = True
            self.rig.answer_loads()
        super().teardown()

    def check_that_nothing_is_left(self) -> None:
        super().check_that_nothing_is_left()
        for name in list(self.weights):
            self.rig.engine.adapters.unload(name)
        self.rig.engine.dispatch()
        assert not self.rig.hosted, "unloaded adapters leave the host"
        assert not self.rig.engine.adapters._users


class AdapterPipelineMachine(AdapterMachine):
    """The same on a pipeline."""

    stages = (2, 3)


@scaled(40)
@given(
    slots=st.integers(1, 2), extra=st.integers(0, 1), seats=st.integers(2, 4), tenants=st.booleans(),
    stream=st.lists(st.tuples(st.sampled_from("ab"), st.integers(1, 10)), min_size=200, max_size=200),
)  # fmt: skip
def test_no_request_starves(
    slots: int, extra: int, seats: int, tenants: bool, stream: list[tuple[str, int]]
) -> None:
    """However many requests of adapters on the device follow, one of another adapter runs and ends soon."""
    shapes = make_shapes(max_num_seqs=seats, buckets=(1, 2, 4))
    rig = make_rig(shapes, adapter_slots=slots, max_cpu_loras=slots + extra)
    for name in "vab":
        rig.load_adapter(name)
    for number, (name, max_tokens) in enumerate(stream):
        rig.submit(
            make_submission(
                [5, 6, number % 90 + 3], request_id=f"r{number}", lora_name=name, max_tokens=max_tokens,
                tenant=name if tenants else "",
            )
        )  # fmt: skip
        if number == seats:
            rig.submit(make_submission(request_id="v", lora_name="v", max_tokens=4, tenant="v" * tenants))
        rig.step()
        if number > seats and (events := rig.sinks["v"].events) and events[-1].finish_reason:
            return
    raise AssertionError("the request of the other adapter did not end")


TestAdapters = AdapterMachine.TestCase
TestAdapters.settings = machine(max_examples=100, stateful_step_count=50)
TestAdapterPipeline = AdapterPipelineMachine.TestCase
TestAdapterPipeline.settings = machine(max_examples=60, stateful_step_count=50)
