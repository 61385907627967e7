"""A worker process whose device fails: `python -m tests.support.worker.failing_process KIND FLAGS`.

It is the worker's command with a fake in place of the model. Its first configuration succeeds.
"""

import ctypes
import sys
import threading
import time
from collections.abc import Callable, Sequence

from protos.errors import ConfigurationRefused
from protos.steps import StepPlan
from tests.support.worker.fake_worker import FakeWorker
from worker_svc import __main__, service
from worker_svc.execution.worker import Ready
from worker_svc.pending_step import PendingStep
from worker_svc.phases import PhaseProgress
from worker_svc.settings import Settings
from worker_svc.shapes import ShapeConfig, Shapes

KIND = sys.argv.pop(1)
NATIVE_SLEEP_S = 120
REFUSED_LEN = 13


class FailingWorker(FakeWorker):
    """Steps fail in the way of `KIND`; "slow" configures in ten parts of 0.15 s instead."""

    def __init__(self, settings: Settings, give_up: Callable[[str], None]) -> None:
        super().__init__()
        del settings, give_up

    def configure(self, shapes: Shapes, progress: PhaseProgress, *, epoch: str = "") -> Ready:
        for part in range(10 if KIND == "slow" else 0):
            progress("compile", part, 10, "a graph")
            time.sleep(0.15)
        if isinstance(shapes, ShapeConfig) and shapes.max_model_len == REFUSED_LEN:
            raise ConfigurationRefused(f"--max-model-len {REFUSED_LEN} is refused")
        if KIND == "configuration":
            threading.Event().wait()
        return super().configure(shapes, progress, epoch=epoch)

    def launch(self, plan: StepPlan) -> PendingStep:
        if KIND == "hang":
            threading.Event().wait()
        if KIND == "native":  # keeps the interpreter's lock
            ctypes.PyDLL(None).sleep(NATIVE_SLEEP_S)
        if KIND == "hang-reading" and plan.work is not None:
            return PendingStep(plan.work, read_tokens=_hang, runs_ahead=True)
        if KIND == "broken":
            raise RuntimeError("the device is gone")
        return super().launch(plan)


def _hang() -> Sequence[int]:
    threading.Event().wait()
    return ()


if __name__ == "__main__":
    vars(service)["Worker"] = FailingWorker
    sys.exit(__main__.main())
