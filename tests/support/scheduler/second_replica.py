"""A second replica of a rig's engine."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from protos.errors import Internal, TriptychError
from protos.steps import StepResult
from scheduler_svc.adapters.registry import Adapter, LoadedAdapter
from scheduler_svc.dispatch.adapter_queue import AdapterHost
from scheduler_svc.dispatch.placement import AttachedReplica
from scheduler_svc.kv.cache import KvCache
from scheduler_svc.policy.rules import Turns
from scheduler_svc.replica.scheduler import ReplicaScheduler
from scheduler_svc.shapes.shape_config import ShapeConfig
from tests.support.scheduler.factories import FULL, Rig
from tests.support.scheduler.simulated_device import SimulatedDevice, StepFailedError


@dataclass
class Second:
    """A second replica of a rig's engine."""

    scheduler: ReplicaScheduler
    device: SimulatedDevice
    failed: int = 0
    """Steps that failed."""
    hosted: dict[int, str] = field(default_factory=dict)
    """The adapters on its host by id, with their weights."""
    loads: deque[Adapter] = field(default_factory=deque)
    """Adapters that it is asked to load and has not answered."""

    def answer_loads(self, rig: Rig, name: str = "replica-1", *, error: TriptychError | None = None) -> None:
        """Loads the adapters that the replica was asked for; their sources are their weights.

        With an error, it fails to load them.
        """
        while self.loads:
            adapter = self.loads.popleft()
            if error is not None:
                rig.engine.adapters.answered(name, adapter, error)
                continue
            self.hosted[adapter.adapter_id] = adapter.source
            rig.engine.adapters.answered(name, adapter, LoadedAdapter(8, adapter.source))

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
    failing: Callable[[], bool] = lambda: False, adapter_slots: int = 0, max_cpu_loras: int = 0,
) -> Second:  # fmt: skip
    hosted: dict[int, str] = {}
    loads: deque[Adapter] = deque()
    lora = AdapterHost(max_cpu_loras, loads.append, hosted.__delitem__) if adapter_slots else None
    shapes = shapes or rig.shapes
    kv = KvCache(shapes, (FULL,), [num_blocks], model="m")
    scheduler = ReplicaScheduler(
        shapes, kv, rig.engine, Turns(1), clock=lambda: rig.now, adapter_slots=adapter_slots
    )
    rig.engine.attach(name, AttachedReplica(scheduler, lambda: None, failing=failing, lora=lora))
    device = SimulatedDevice(shapes, num_adapter_slots=adapter_slots, hosted=hosted)
    return Second(scheduler, device, hosted=hosted, loads=loads)


def run(rig: Rig, second: Second) -> None:
    """Steps both replicas until neither has work."""
    for _ in range(1000):
        if not [bool(rig.step()), second.step()].count(True):
            return
    raise AssertionError("the replicas never became idle")
