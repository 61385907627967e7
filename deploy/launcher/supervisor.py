"""Keeps child processes running and stops them in order."""

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from deploy.launcher.log_tail import last_lines
from deploy.launcher.process import Child, ChildSpec, describe_exit

BAD_SETTING = 2
"""The exit code of a service that refuses its settings. A restart would not help."""


class LaunchError(Exception):
    """The launcher cannot serve; the message tells the user why."""

    exit_code: int
    """The launcher's exit code."""

    def __init__(self, message: str, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code


@dataclass(frozen=True)
class RestartPolicy:
    """How long a dead child waits for its restart, and when the launcher gives up."""

    first_delay_s: float = 0.5
    """Delay after the first death."""
    longest_delay_s: float = 30.0
    """Each consecutive death doubles the delay, up to this limit."""
    forgive_after_s: float = 60.0
    """The count of deaths restarts after a child ran this long."""
    failed_starts: int = 3
    """Consecutive deaths of one child after which the launcher gives up, unless it has already served."""

    def delay_s(self, deaths: int) -> float:
        """Returns the seconds to wait after `deaths` consecutive deaths."""
        return float(min(self.first_delay_s * 2 ** (deaths - 1), self.longest_delay_s))


class Supervisor:
    """Starts all children, restarts a child that dies, and stops them stage by stage."""

    def __init__(
        self,
        stages: Sequence[Sequence[ChildSpec]],
        report: Callable[[str], None],
        *,
        policy: RestartPolicy | None = None,
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
        self._served = False

    def mark_served(self) -> None:
        """Records that the stack has served. From now on the supervisor restarts children without limit."""
        self._served = True

    async def run(self) -> None:
        """Keeps the children running until cancelled, and stops all of them in any case.

        Raises:
            ExceptionGroup: With a `LaunchError`: a child refuses its settings, or keeps dying before the
                stack has served.
        """
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._rotate_logs())
                for stage in self._stages:
                    for child in stage:
                        group.create_task(self._keep_running(child))
        finally:
            await self._stop()

    def kill(self) -> None:
        """Kills every child at once, without waiting for `run` to stop them."""
        for stage in self._stages:
            for child in stage:
                child.kill()

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
            await child.start()
            status = await child.wait()
            lived_s = self._clock() - started
            deaths = 1 if lived_s >= self._policy.forgive_after_s else deaths + 1
            self._raise_if_hopeless(child.spec, status, deaths, first=first)
            first = False
            delay_s = self._policy.delay_s(deaths)
            self._report(
                f"{_describe_death(child.spec, status)}\n{child.spec.name} restarts in {delay_s:g} s."
            )
            await asyncio.sleep(delay_s)

    def _raise_if_hopeless(self, spec: ChildSpec, status: int, deaths: int, *, first: bool) -> None:
        """Raises `LaunchError` if a restart of the child would not help."""
        if status == BAD_SETTING and first and not self._served:
            lines = last_lines(spec.log, 1)
            raise LaunchError(lines[0] if lines else f"{spec.name} refused its settings", BAD_SETTING)
        if not self._served and deaths >= self._policy.failed_starts:
            raise LaunchError(
                f"{_describe_death(spec, status)}\nIt died {deaths} times before it served; giving up."
            )

    async def _stop(self) -> None:
        for stage in self._stages:
            running = [child for child in stage if child.running]
            ended = await asyncio.gather(*(child.stop(self._grace_s) for child in running))
            for child, in_time in zip(running, ended, strict=True):
                if not in_time:
                    self._report(f"{child.spec.name} did not exit within {self._grace_s:g} s and was killed.")


def _describe_death(spec: ChildSpec, status: int) -> str:
    lines = [f"{spec.name} died ({describe_exit(status)}). Its log: {spec.log}"]
    return "\n".join(lines + [f"  | {line}" for line in last_lines(spec.log, 5)])
