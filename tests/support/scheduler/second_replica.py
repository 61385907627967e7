"""A second replica of a rig's engine."""

from collections.abc import Callable
from dataclasses import dataclass

from protos.errors import Internal, TriptychError
from protos.steps import StepResult
from scheduler_svc.adapters.registry import Adapter
from scheduler_svc.engine.placement import AttachedReplica
from scheduler_svc.kv.cache import KvCache
from scheduler_svc.policy.rules import Turns
from scheduler_svc.replica.scheduler import ReplicaScheduler
from scheduler_svc.requests.sampling import Grammar
from scheduler_svc.shapes.shape_config import ShapeConfig
from tests.support.scheduler.factories import FULL, Rig, RigAdapters
from tests.support.scheduler.simulated_device import SimulatedDevice, StepFailedError


@dataclass
class Second:
    """A second replica of a rig's engine."""

    scheduler: ReplicaScheduler
    device: SimulatedDevice
    failed: int = 0
    """Steps that failed."""
    adapters: RigAdapters | None = None

    @property
    def loads(self) -> list[Adapter]:
        """Adapters that it is asked to load and has not answered."""
        assert self.adapters is not None
        return [adapter for adapter, *_ in self.adapters.loads]

    def answer_loads(self, *, error: TriptychError | None = None) -> None:
        """Loads the adapters that the replica was asked for; with an error, it fails to load them."""
        if self.adapters is not None:
            self.adapters.answer(error)

    def step(self) -> bool:
        plan = self.scheduler.next_plan()
        if plan is None:
            return False
        try:
            result = self.device.run(plan)
        except StepFailedError as failer:
            self.failed += 1
            result = StepResult(plan.step, error=Internal(f"the device failed at {failer}"))
        self.scheduler.update(result)
        return True


def add_replica(
    rig: Rig, *, num_blocks: int = 65, name: str = "replica-1", shapes: ShapeConfig | None = None,
    adapter_slots: int = 0, max_cpu_loras: int = 0, ask: Callable[[Grammar], None] = lambda _: None,
    withdraw: Callable[[Grammar], None] = lambda _: None,
) -> Second:  # fmt: skip
    adapters = (
        RigAdapters(lambda: rig.now, adapter_slots, max_cpu_loras, rig.sources) if adapter_slots else None
    )
    shapes = shapes or rig.shapes
    kv = KvCache(shapes, (FULL,), [num_blocks], model="m")
    scheduler = ReplicaScheduler(
        shapes,
        kv,
        rig.engine,
        Turns(1),
        clock=lambda: rig.now,
        adapters=adapters.seats if adapters else None,
    )
    replica = AttachedReplica(scheduler, lambda: None, ask, withdraw)
    rig.engine.attach(name, adapters.attach_to(replica) if adapters else replica)
    device = SimulatedDevice(shapes, adapters=adapters.store if adapters else None)
    return Second(scheduler, device, adapters=adapters)


def run(rig: Rig, second: Second) -> None:
    """Steps both replicas until neither has work."""
    for _ in range(1000):
        if not [bool(rig.step()), second.step()].count(True):
            return
    raise AssertionError("the replicas never became idle")
