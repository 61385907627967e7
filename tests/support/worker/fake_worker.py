"""A fake of `execution.worker.Worker`: no model, no device."""

import threading
from collections.abc import Collection

from protos.steps import Decode, StepPlan
from protos.triptych.v1.worker_pb2 import WorkerReport
from worker_svc.execution.worker import Ready
from worker_svc.pending_step import PendingStep
from worker_svc.phases import PhaseProgress
from worker_svc.ranks.layout import RankLayout
from worker_svc.shapes import Shapes


class FakeWorker:
    """Accepts every configuration unless `error` is set; every token is 3."""

    grammars = None
    layout = RankLayout()
    follower = None
    epoch = ""

    def __init__(self) -> None:
        self.shapes: Shapes | None = None
        self.error: Exception | None = None
        """Fails configurations."""
        self.step_error: Exception | None = None
        """Fails steps that have work."""
        self.gate: threading.Event | None = None
        """If set, a configuration waits for it after its first progress."""
        self.resets = 0

    def prepare(self) -> None:
        """Has nothing to prepare."""

    def join(self, epoch: str) -> None:
        """Is alone."""

    def is_configured_as(self, shapes: Shapes) -> bool:
        return shapes == self.shapes

    def configure(self, shapes: Shapes, progress: PhaseProgress, *, epoch: str = "") -> Ready:
        del epoch
        if self.error is not None:
            raise self.error
        progress("load", 1, 2, "a file")
        if self.gate is not None:
            self.gate.wait()
        self.shapes = shapes
        return Ready(shapes, (64,), {"load": 0.5}, "ab12", "tensors")

    def reserve_adapter(self, adapter_id: int, needed: Collection[int]) -> list[int]:
        """Displaces adapter 7."""
        del adapter_id, needed
        return [7]

    def launch(self, plan: StepPlan) -> PendingStep:
        if plan.work is None:
            return PendingStep()
        if self.step_error is not None:
            raise self.step_error
        assert isinstance(plan.work, Decode)
        tokens = [3] * len(plan.work.slots)
        return PendingStep(plan.work, read_tokens=lambda: tokens)

    def report(self) -> WorkerReport:
        return WorkerReport()

    def reset(self) -> None:
        self.resets += 1

    def close(self) -> None:
        """Has nothing to close."""
