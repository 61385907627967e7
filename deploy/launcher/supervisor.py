"""Keeps children running, and ends them in order."""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from deploy.launcher.log_tail import last_lines
from deploy.launcher.process import Child, ChildSpec, describe_exit

BAD_SETTING = 2
"""The exit code of a service that refuses its settings: starting it again would not help."""


class LaunchError(Exception):
    """Nothing can be served; the message is for people.

    Attributes:
        exit_code: what the launcher exits with.
    """

    def __init__(self, message: str, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code


@dataclass(frozen=True)
class RestartPolicy:
    """When a child that died is started again."""

    first_delay_s: float = 0.5
    longest_delay_s: float = 30.0
    """Each death in a row doubles the delay up to here."""
    forgive_after_s: float = 60.0
    """A child that ran this long starts again with the first delay."""
    failed_starts: int = 3
    """Deaths in a row of one child after which the launcher gives up, as long as nothing was ever served."""

    def delay_s(self, deaths: int) -> float:
        """Seconds to wait after that many deaths in a row."""
        return float(min(self.first_delay_s * 2 ** (deaths - 1), self.longest_delay_s))


class Supervisor:
    """Starts every child, restarts those that die, and stops them stage by stage."""

    def __init__(
        self,
        stages: Sequence[Sequence[ChildSpec]],
        tell: Callable[[str], None],
        *,
        policy: RestartPolicy | None = None,
        grace_s: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Prepares the children; :meth:`run` starts them.

        Args:
            stages: who is stopped together, first those that are stopped first. All are started at once.
            tell: receives lines for people.
            policy: when to restart.
            grace_s: seconds that each stage has to end by itself.
            clock: monotonic seconds.
        """
        self._stages = [[Child(spec) for spec in stage] for stage in stages]
        self._tell = tell
        self._policy = policy or RestartPolicy()
        self._grace_s = grace_s
        self._clock = clock
        self._served = False

    def mark_served(self) -> None:
        """Notes that the children once worked together: from now on no number of deaths makes the launcher give up."""
        self._served = True

    async def run(self) -> None:
        """Keeps the children running until cancelled; however it ends, no child is left.

        Raises:
            LaunchError: in an exception group: a child refuses its settings, or dies again and again before anything was served.
        """
        try:
            async with asyncio.TaskGroup() as group:
                for stage in self._stages:
                    for child in stage:
                        group.create_task(self._keep_running(child))
        finally:
            await self._stop()

    def kill(self) -> None:
        """Kills every child at once: for those who cannot wait for :meth:`run` to end them."""
        for stage in self._stages:
            for child in stage:
                child.kill()

    async def _keep_running(self, child: Child) -> None:
        deaths = 0
        first = True
        while True:
            started = self._clock()
            await child.start()
            status = await child.wait()
            lived_s = self._clock() - started
            deaths = 1 if lived_s >= self._policy.forgive_after_s else deaths + 1
            self._judge(child.spec, status, deaths, first=first)
            first = False
            delay_s = self._policy.delay_s(deaths)
            self._tell(f"{_epitaph(child.spec, status)}\n{child.spec.name} starts again in {delay_s:g} s.")
            await asyncio.sleep(delay_s)

    def _judge(self, spec: ChildSpec, status: int, deaths: int, *, first: bool) -> None:
        """Raises `LaunchError` if starting the child again makes no sense."""
        if status == BAD_SETTING and first and not self._served:
            lines = last_lines(spec.log, 1)
            raise LaunchError(lines[0] if lines else f"{spec.name} refused its settings", BAD_SETTING)
        if not self._served and deaths >= self._policy.failed_starts:
            raise LaunchError(
                f"{_epitaph(spec, status)}\nIt died {deaths} times and never served; giving up."
            )

    async def _stop(self) -> None:
        for stage in self._stages:
            running = [child for child in stage if child.running]
            ended = await asyncio.gather(*(child.stop(self._grace_s) for child in running))
            for child, by_itself in zip(running, ended, strict=True):
                if not by_itself:
                    self._tell(f"{child.spec.name} did not end within {self._grace_s:g} s and was killed.")


def _epitaph(spec: ChildSpec, status: int) -> str:
    lines = [f"{spec.name} died ({describe_exit(status)}). Its log: {spec.log}"]
    return "\n".join(lines + [f"  | {line}" for line in last_lines(spec.log, 5)])
