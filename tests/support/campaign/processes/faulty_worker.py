"""A worker whose device fails when a file says so, and dies of poison."""

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Literal, TypeAlias

from protos.steps import Decode, Prefill, StepPlan
from tests.support.campaign.processes.tiny_chat_model import SPECIAL
from worker_svc import service
from worker_svc.execution.worker import Worker
from worker_svc.pending_step import PendingStep
from worker_svc.settings import Settings

POISON: Final = (SPECIAL.index("<pad>"),) * 2
"""A prompt that begins with these tokens kills every worker that computes it."""

STEP_S: Final = 0.015
"""How long a step takes at least. Python's clients could not follow a tiny model otherwise."""

DeviceFault: TypeAlias = Literal["broken", "hung", "crash"]


@dataclass(frozen=True)
class DeviceOrder:
    """What a worker's device shall do; one process obeys it."""

    kind: DeviceFault
    """broken: every step raises until the file is gone; hung: one step never ends; crash: the process dies
    between two decode steps of a plan."""
    after: int
    """Steps that still work."""

    def write(self, file: Path) -> None:
        """Gives the order."""
        part = file.with_suffix(".part")
        part.write_text(json.dumps([self.kind, self.after]))
        part.rename(file)


class FaultyWorker(Worker):
    """The real worker, which obeys the orders in `file`."""

    file: Path

    def __init__(self, settings: Settings, give_up: Callable[[str], None]) -> None:
        """Starts without an order."""
        super().__init__(settings, give_up)
        self._order: DeviceOrder | None = None
        self._left = 0
        self._last_decode = -1
        self._poisoned: set[int] = set()

    def launch(self, plan: StepPlan) -> PendingStep:
        """Runs a step, unless the device fails."""
        started = time.monotonic()
        self._obey(plan)
        self._swallow_poison(plan)
        launched = super().launch(plan)
        if plan.work is not None:
            time.sleep(max(0.0, STEP_S - (time.monotonic() - started)))
        return launched

    def reset(self) -> None:
        """Frees every slot."""
        self._poisoned.clear()
        super().reset()

    def _obey(self, plan: StepPlan) -> None:
        if self._order is None:
            try:
                self._order = DeviceOrder(*json.loads(self.file.read_text()))
            except FileNotFoundError:
                return
            self._left = self._order.after
            if self._order.kind != "broken":
                self.file.unlink()
        self._left -= 1
        if self._left >= 0:
            return
        if self._order.kind == "broken":
            if self.file.exists():
                # The host's part of the plan is done; the kernels fail.
                super().launch(replace(plan, work=None))
                raise RuntimeError("the device is gone")
            self._order = None
        elif self._order.kind == "hung":
            threading.Event().wait()
        elif isinstance(plan.work, Decode):
            # The second step of a plan.
            if self._last_decode == plan.step:
                os.kill(os.getpid(), signal.SIGKILL)
            self._last_decode = plan.step

    def _swallow_poison(self, plan: StepPlan) -> None:
        self._poisoned.difference_update(plan.release)
        for admission in plan.admit:
            if tuple(admission.token_ids[: len(POISON)]) == POISON:
                self._poisoned.add(admission.slot)
        slots: Sequence[int] = ()
        if isinstance(plan.work, Decode):
            slots = plan.work.slots
        elif isinstance(plan.work, Prefill):
            slots = (plan.work.slot,)
        if self._poisoned.intersection(slots):
            os.kill(os.getpid(), signal.SIGKILL)


def install(file: Path) -> None:
    """Makes the worker of this process obey `file`."""
    FaultyWorker.file = file
    vars(service)["Worker"] = FaultyWorker
