"""Runs what rank 0 announces, on a rank that the scheduler does not drive itself."""

import asyncio
import threading
from functools import partial

from protos.service.logs import get_logger
from worker_svc.api.model_thread import ModelThread
from worker_svc.api.watchdog import STEP
from worker_svc.execution.lockstep import Follower

# A scheduler asks all ranks at the same time. A rank that had the sizes until rank 0 dropped them may have
# answered already, and then nothing asks it again.
_ASKED_WITHIN_S = 60.0


class Following:
    """Hands announced steps to the model thread as they arrive."""

    def __init__(self, follower: Follower, thread: ModelThread, *, step_limit_s: float) -> None:
        """Starts waiting for announcements. Requires a running event loop."""
        self._follower = follower
        self._thread = thread
        self._loop = asyncio.get_running_loop()
        self._begun = asyncio.Event()
        self.step_limit_s = step_limit_s
        """How long a step may take before the process counts as hung, seconds; 0 for any time."""
        threading.Thread(target=self._run, name="rank-plans", daemon=True).start()

    async def may_begin(self) -> None:
        """Waits until rank 0 has begun a configuration that this rank has not."""
        while True:
            self._begun.clear()
            if self._follower.may_begin:
                return
            await self._begun.wait()

    def _run(self) -> None:
        while True:
            try:
                announcement = self._follower.wait()
            except RuntimeError:
                return  # the follower has reported it
            self._thread.post(partial(self._launch, announcement), what=STEP, limit_s=self.step_limit_s)

    def _launch(self, announcement: bytes) -> None:
        try:
            rest = self._follower.run(announcement)
        except Exception:  # noqa: BLE001 - the follower has reported it, and the process ends
            get_logger().exception("step_failed")
            return
        if rest is not None:
            self._thread.defer(rest)
        if self._follower.may_begin:
            self._loop.call_soon_threadsafe(self._may_begin)

    def _may_begin(self) -> None:
        self._begun.set()
        self._loop.call_later(_ASKED_WITHIN_S, self._follower.end_if_unasked, self._follower.num_begun)
