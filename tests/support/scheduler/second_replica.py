"""A second replica of a rig's engine."""

from collections.abc import Callable
from dataclasses import dataclass

from protos.errors import Internal
from protos.steps import StepResult
from scheduler_svc.dispatch.placement import AttachedReplica
from scheduler_svc.kv.cache import KvCache
from scheduler_svc.policy.interleave import Interleave
from scheduler_svc.replica.scheduler import ReplicaScheduler
from scheduler_svc.shapes.geometry import Geometry
from tests.support.scheduler.factories import FULL, Rig
from tests.support.scheduler.simulated_device import SimulatedDevice, StepFailedError


@dataclass
class Second:
    """A second replica of a rig's engine."""

    scheduler: ReplicaScheduler
    device: SimulatedDevice
    failed: int = 0
    """Steps that failed."""

    def step(self) -> bool:
        plan = self.scheduler.step()
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
    rig: Rig, *, num_blocks: int = 65, name: str = "replica-1", geometry: Geometry | None = None,
    failing: Callable[[], bool] = lambda: False,
) -> Second:  # fmt: skip
    geometry = geometry or rig.geometry
    kv = KvCache(geometry, (FULL,), [num_blocks], model="m")
    scheduler = ReplicaScheduler(geometry, kv, rig.engine, Interleave(1), clock=lambda: rig.now)
    rig.engine.attach(name, AttachedReplica(scheduler, lambda: None, failing=failing))
    return Second(scheduler, SimulatedDevice(geometry))


def run(rig: Rig, second: Second) -> None:
    """Steps both replicas until neither has work."""
    for _ in range(1000):
        if not [rig.step() is not None, second.step()].count(True):
            return
    raise AssertionError("the replicas never became idle")
