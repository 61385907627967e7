"""Keeps processes ready that have imported all that a worker needs, so that a dead worker is back soon."""

import asyncio
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from deploy.launcher.deaths import BAD_SETTING, RestartPolicy, describe_death
from deploy.launcher.process import Child, ChildSpec
from worker_svc.standby_messages import Orders

# Resident memory of a process that has imported what a worker needs.
_STANDBY_MIB = 450


def standby_spec(worker: ChildSpec) -> ChildSpec:
    """Returns the command of a standby for a worker and those that differ in addresses and devices only."""
    command = (sys.executable, "-m", "deploy.launcher.standby_worker", *(worker.worker_flags or ()))
    return ChildSpec("standby", command, worker.run_dir, has_log=worker.has_log)


def memory_note(count: int) -> str:
    """Says how much memory several standbys take; empty for one or none."""
    if count <= 1:
        return ""
    gib = count * _STANDBY_MIB / 1024
    return (
        f"{count} standbys take about {gib:.1f} GiB, one for each rank that can die at once;"
        " --standby-workers 0 keeps none."
    )


@dataclass
class _Standby:
    """A process that waits."""

    child: Child
    taken: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the process has become a worker."""


class Standbys:
    """Runs standbys, replaces those that die or become workers, and hands them out.

    All workers share them: they differ in flags and variables only, which a standby gets when it is taken.
    """

    def __init__(
        self,
        spec: ChildSpec | None,
        count: int,
        report: Callable[[str], None],
        *,
        policy: RestartPolicy | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Starts nothing.

        Args:
            spec: from `standby_spec`; may be `None` if there are no standbys.
            count: number of standbys.
            report: receives messages for the user.
            policy: how long the replacement of a dead standby waits.
            clock: monotonic seconds.
        """
        self._specs = (
            [] if spec is None else [replace(spec, name=f"{spec.name}-{index}") for index in range(count)]
        )
        self._report = report
        self._policy = policy or RestartPolicy()
        self._clock = clock
        self._waiting: list[_Standby] = []

    def has_one_for(self, spec: ChildSpec) -> bool:
        """Whether a standby runs that could become this child."""
        return spec.worker_flags is not None and bool(self._waiting)

    def take(self, spec: ChildSpec) -> asyncio.subprocess.Process | None:
        """Turns a standby into a worker. The caller owns the process from now on.

        Returns:
            The process, or `None` if no standby runs or the child is not a worker.
        """
        if spec.worker_flags is None:
            return None
        log = str(spec.log.absolute()) if spec.has_log else None
        orders = Orders(spec.worker_flags, spec.environment, log).to_line()
        while self._waiting:
            standby = self._waiting.pop(0)
            process = standby.child.hand_over(orders)
            if process is not None:
                standby.taken.set()
                return process
        return None

    async def keep(self) -> None:
        """Keeps the standbys running until cancelled."""
        async with asyncio.TaskGroup() as group:
            for spec in self._specs:
                group.create_task(self._keep_one(spec))

    def kill(self) -> None:
        """Kills the standbys at once: they hold nothing that could be lost."""
        for standby in self._waiting:
            standby.child.kill()

    async def stop(self) -> None:
        """Kills the standbys and waits for their ends."""
        self.kill()
        await asyncio.gather(*(standby.child.wait() for standby in self._waiting))

    async def _keep_one(self, spec: ChildSpec) -> None:
        deaths = 0
        while True:
            spec.log.unlink(missing_ok=True)
            standby = _Standby(Child(spec))
            started = self._clock()
            await standby.child.start(with_input=True)
            self._waiting.append(standby)
            status = await _end_of(standby)
            if status is None:
                deaths = 0
                continue
            if standby in self._waiting:
                self._waiting.remove(standby)
            if status == BAD_SETTING:
                self._report(f"{describe_death(spec, status)}\nNo other standby takes its place.")
                return
            lived_s = self._clock() - started
            deaths = 1 if lived_s >= self._policy.forgive_after_s else deaths + 1
            delay_s = self._policy.delay_s(deaths)
            self._report(f"{describe_death(spec, status)}\nAnother standby starts in {delay_s:g} s.")
            await asyncio.sleep(delay_s)


async def _end_of(standby: _Standby) -> int | None:
    """Waits until a standby dies or is taken. Returns its exit status, or `None` if it was taken."""
    death = asyncio.create_task(standby.child.wait())
    taking = asyncio.create_task(standby.taken.wait())
    try:
        await asyncio.wait((death, taking), return_when=asyncio.FIRST_COMPLETED)
        return None if taking.done() else death.result()
    finally:
        death.cancel()
        taking.cancel()
