"""Keeps child processes running and stops them in order."""

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence

from deploy.launcher.deaths import BAD_SETTING, RestartPolicy, describe_death
from deploy.launcher.log_tail import last_lines
from deploy.launcher.process import Child, ChildSpec
from deploy.launcher.standbys import Standbys


class LaunchError(Exception):
    """The launcher cannot serve; the message tells the user why."""

    exit_code: int
    """The launcher's exit code."""

    def __init__(self, message: str, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def first_launch_error(group: ExceptionGroup[Exception]) -> Exception:
    """Returns the first `LaunchError` in a group, or the group if it has none."""
    for error in group.exceptions:
        found = first_launch_error(error) if isinstance(error, ExceptionGroup) else error
        if isinstance(found, LaunchError):
            return found
    return group


class Supervisor:
    """Starts all children, restarts a child that dies, and stops them stage by stage."""

    def __init__(
        self,
        stages: Sequence[Sequence[ChildSpec]],
        report: Callable[[str], None],
        *,
        policy: RestartPolicy | None = None,
        standbys: Standbys | None = None,
        grace_s: float = 10.0,
        max_log_bytes: int = 64 << 20,
        look_every_s: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Prepares the children; `run` starts them.

        Args:
            stages: children that stop together, in stopping order. All of them start at once.
            report: receives messages for the user.
            policy: when to restart a child.
            standbys: processes that can replace a dead worker; they are prepared once the stack has served.
            grace_s: seconds that each stage has to exit before it is killed.
            max_log_bytes: size above which a log is rotated.
            look_every_s: seconds between two looks at the sizes of logs.
            clock: monotonic seconds.
        """
        self._max_log_bytes = max_log_bytes
        self._look_every_s = look_every_s
        self._stages = [[Child(spec) for spec in stage] for stage in stages]
        self._report = report
        self._policy = policy or RestartPolicy()
        self._grace_s = grace_s
        self._clock = clock
        self._standbys = standbys or Standbys(None, 0, report)
        self._served = asyncio.Event()

    def mark_served(self) -> None:
        """Records that the stack has served. From now on the supervisor restarts children without limit."""
        self._served.set()

    async def run(self) -> None:
        """Keeps the children running until cancelled, and stops all of them in any case.

        Raises:
            ExceptionGroup: With a `LaunchError`: a child refuses its settings, or keeps dying before the
                stack has served.
        """
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._rotate_logs())
                group.create_task(self._keep_standbys())
                for stage in self._stages:
                    for child in stage:
                        group.create_task(self._keep_running(child))
        finally:
            await self._stop()

    def kill(self) -> None:
        """Kills every child at once, without waiting for `run` to stop them."""
        self._standbys.kill()
        for stage in self._stages:
            for child in stage:
                child.kill()

    async def _keep_standbys(self) -> None:
        await self._served.wait()  # until then they would slow down the first start
        await self._standbys.keep()

    async def _rotate_logs(self) -> None:
        while True:
            for stage in self._stages:
                for child in stage:
                    with contextlib.suppress(OSError):  # a log must not end the services
                        await asyncio.to_thread(child.rotate_log, self._max_log_bytes)
            await asyncio.sleep(self._look_every_s)

    async def _keep_running(self, child: Child) -> None:
        deaths = 0
        first = True
        while True:
            started = self._clock()
            standby = self._standbys.take(child.spec)
            if standby is None:
                await child.start()
            else:
                child.adopt(standby)
            status = await child.wait()
            lived_s = self._clock() - started
            deaths = 1 if lived_s >= self._policy.forgive_after_s else deaths + 1
            self._raise_if_hopeless(child.spec, status, deaths, first=first)
            first = False
            death = describe_death(child.spec, status)
            if deaths == 1 and self._standbys.has_one_for(child.spec):
                self._report(f"{death}\nA standby takes the place of {child.spec.name}.")
                continue
            delay_s = self._policy.delay_s(deaths)
            self._report(f"{death}\n{child.spec.name} restarts in {delay_s:g} s.")
            await asyncio.sleep(delay_s)

    def _raise_if_hopeless(self, spec: ChildSpec, status: int, deaths: int, *, first: bool) -> None:
        """Raises `LaunchError` if a restart of the child would not help."""
        if status == BAD_SETTING and first and not self._served.is_set():
            lines = last_lines(spec.log, 1, longest=None)
            raise LaunchError(lines[0] if lines else f"{spec.name} refused its settings", BAD_SETTING)
        if not self._served.is_set() and deaths >= self._policy.failed_starts:
            raise LaunchError(
                f"{describe_death(spec, status)}\nIt died {deaths} times before it served; giving up."
            )

    async def _stop(self) -> None:
        await self._standbys.stop()
        for stage in self._stages:
            running = [child for child in stage if child.running]
            ended = await asyncio.gather(*(child.stop(self._grace_s) for child in running))
            for child, in_time in zip(running, ended, strict=True):
                if not in_time:
                    self._report(f"{child.spec.name} did not exit within {self._grace_s:g} s and was killed.")
