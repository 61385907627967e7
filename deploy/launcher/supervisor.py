"""Keeps child processes running, with standbys for workers, and stops them in order."""

import asyncio
import contextlib
import signal
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from deploy.launcher.log_tail import last_lines, reason, size_of
from deploy.launcher.process import COMMAND, Child, ChildSpec, describe_exit
from worker_svc.standby_messages import Orders

BAD_SETTING = 2
"""The exit code of a service that refuses to start, and for the same reason would refuse again."""


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
    """Consecutive deaths of a child that end the start of a stack."""

    def delay_s(self, deaths: int) -> float:
        """Returns the seconds to wait after `deaths` consecutive deaths."""
        return float(min(self.first_delay_s * 2 ** (deaths - 1), self.longest_delay_s))


def describe_death(spec: ChildSpec, status: int, then: str) -> str:
    """Describes a death for people: the exit, if there is a log its last lines, and what happens `then`.

    A service that was asked to stop is one line.
    """
    if status == 0:
        return f"{spec.name} was stopped. {then}"
    place = f" Its log: {spec.log}" if spec.has_log else ""
    lines = [f"{spec.name} died ({describe_exit(status)}).{place}"]
    return "\n".join([*lines, *(f"  | {line}" for line in last_lines(spec.log, 5)), then])


# Resident memory of a process that has imported what a worker needs.
_STANDBY_MIB = 450


def standby_spec(worker: ChildSpec) -> ChildSpec:
    """Returns the command of a standby for a worker and those that differ in addresses and devices only."""
    command = (*COMMAND, "standby", *(worker.worker_flags or ()))
    return ChildSpec("standby", command, worker.run_dir, has_log=worker.has_log)


def memory_note(count: int) -> str:
    """Returns a line about the memory of several standbys; empty for fewer than two."""
    if count <= 1:
        return ""
    gib = count * _STANDBY_MIB / 1024
    return (
        f"{count} standbys take about {gib:.1f} GiB, one for each rank that can die at once;"
        " --standby-workers 0 keeps none."
    )


@dataclass
class _Standby:
    """A waiting process."""

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
    ) -> None:
        """Prepares `count` standbys, none without a spec; `report` receives messages for the user."""
        self._specs = (
            [] if spec is None else [replace(spec, name=f"{spec.name}-{index}") for index in range(count)]
        )
        self._report = report
        self._policy = policy or RestartPolicy()
        self._waiting: list[_Standby] = []

    def has_one_for(self, spec: ChildSpec) -> bool:
        """Whether a standby runs that could become this child."""
        return spec.worker_flags is not None and bool(self._waiting)

    def take(self, spec: ChildSpec) -> asyncio.subprocess.Process | None:
        """Turns a standby into a worker, whose process the caller owns; `None` without a standby for it."""
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
            started = time.monotonic()
            await standby.child.start(with_input=True)
            self._waiting.append(standby)
            status = await _end_of(standby)
            if status is None:
                deaths = 0
                continue
            if standby in self._waiting:
                self._waiting.remove(standby)
            if status == BAD_SETTING:
                self._report(f"There is no {spec.name}: {reason(spec.log, 0) or describe_exit(status)}")
                return
            lived_s = time.monotonic() - started
            deaths = 1 if lived_s >= self._policy.forgive_after_s else deaths + 1
            delay_s = self._policy.delay_s(deaths)
            self._report(describe_death(spec, status, f"Another standby starts in {delay_s:g} s."))
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


class Supervisor:
    """Starts all children, restarts a child that dies, and stops them stage by stage."""

    def __init__(
        self,
        stages: Sequence[Sequence[ChildSpec]],
        report: Callable[[str], None],
        *,
        policy: RestartPolicy | None = None,
        standbys: Standbys | None = None,
        drain_s: float = 30.0,
        grace_s: float = 10.0,
        max_log_bytes: int = 64 << 20,
        look_every_s: float = 5.0,
    ) -> None:
        """Prepares the children; `run` starts them.

        Args:
            stages: children grouped by the moment of their stop, in stopping order. All start at once.
            report: receives messages for the user.
            policy: when to restart a child.
            standbys: processes that can replace a dead worker; they are prepared once the stack has served.
            drain_s: seconds from :meth:`stop` on that all stages together have for running requests.
            grace_s: seconds that each stage then has to exit before it is killed.
            max_log_bytes: size above which a log is rotated.
            look_every_s: seconds between two looks at the sizes of logs.
        """
        self._max_log_bytes = max_log_bytes
        self._look_every_s = look_every_s
        self._stages = [[Child(spec) for spec in stage] for stage in stages]
        self._report = report
        self._policy = policy or RestartPolicy()
        self._drain_s = drain_s
        self._grace_s = grace_s
        self._standbys = standbys or Standbys(None, 0, report)
        self._served = asyncio.Event()

    def mark_served(self) -> None:
        """Records that the start is over: from now on children are restarted without limit."""
        self._served.set()

    async def run(self) -> None:
        """Starts the children and keeps them running until cancelled; `stop` stops them.

        Raises:
            ExceptionGroup: With a `LaunchError`: during the start a child refuses to start or keeps dying.
        """
        async with asyncio.TaskGroup() as group:
            group.create_task(self._rotate_logs())
            group.create_task(self._keep_standbys())
            for stage in self._stages:
                for child in stage:
                    group.create_task(self._keep_running(child))

    def kill(self) -> None:
        """Kills every child at once; `stop` then ends soon."""
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
        spec, deaths, last_refusal = child.spec, 0, ""
        while True:
            started, log_start = time.monotonic(), size_of(spec.log)
            standby = self._standbys.take(spec)
            if standby is None:
                await child.start()
            else:
                child.adopt(standby)
            status = await child.wait()
            lived_s = time.monotonic() - started
            deaths = 1 if lived_s >= self._policy.forgive_after_s else deaths + 1
            delay_s = self._policy.delay_s(deaths)
            if status == BAD_SETTING:
                refusal = (
                    reason(spec.log, log_start)
                    or f"{spec.name} refuses to start, and {spec.log} has no reason; is its disk full?"
                )
                if not self._served.is_set():
                    raise LaunchError(refusal, BAD_SETTING)
                if refusal != last_refusal:
                    longest_s = self._policy.longest_delay_s
                    self._report(f"{spec.name} does not start, and is tried every {longest_s:g} s: {refusal}")
                last_refusal = refusal
                await asyncio.sleep(delay_s)
                continue
            last_refusal, describe = "", partial(describe_death, spec, status)
            if deaths >= self._policy.failed_starts and not self._served.is_set():
                raise LaunchError(describe(f"It ended {deaths} times before it served; giving up."))
            if deaths == 1 and self._standbys.has_one_for(spec):
                self._report(describe(f"A standby takes the place of {spec.name}."))
                continue
            self._report(describe(f"{spec.name} restarts in {delay_s:g} s."))
            await asyncio.sleep(delay_s)

    async def stop(self) -> None:
        """Stops the children, stage by stage. Call it after the end of `run`."""
        await self._standbys.stop()
        until = time.monotonic() + self._drain_s
        for stage in self._stages:
            running = [child for child in stage if child.running]
            drain_s = max(0.0, until - time.monotonic())
            ended = await asyncio.gather(*(child.stop(drain_s, self._grace_s) for child in running))
            for child, in_time in zip(running, ended, strict=True):
                if not in_time:
                    late_s = drain_s + self._grace_s
                    self._report(f"{child.spec.name} did not exit within {late_s:.3g} s and was killed.")


async def run_until_signal(
    supervisor: Supervisor,
    serving: Coroutine[Any, Any, None],
    *,
    complain: Callable[[LaunchError], None],
    say: Callable[[str], None] = lambda _: None,
) -> int:
    """Serves until a signal or a failure, and stops the children.

    Args:
        supervisor: of the children.
        serving: runs the supervisor.
        complain: receives a failure, before anything is stopped.
        say: receives messages about the signals.

    Returns:
        0 after a signal, 130 after a SIGINT that followed another signal, or the exit code of the failure.
    """
    loop, task, is_stopping, code = asyncio.get_running_loop(), asyncio.ensure_future(serving), False, 0

    def on_signal(number: signal.Signals) -> None:
        nonlocal is_stopping, code
        if not is_stopping:
            is_stopping = True
            say("Stopping (Ctrl-C to kill).")
            task.cancel()
        # `timeout` and process managers send SIGTERM twice; only a person in a hurry presses Ctrl-C again.
        elif number is signal.SIGINT:
            code = 130
            supervisor.kill()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, on_signal, number)
    try:
        await task
    except asyncio.CancelledError:
        pass
    except ExceptionGroup as group:
        error = _first_launch_error(group)
        complain(error)
        code = error.exit_code
    finally:
        await supervisor.stop()
    return code


def _first_launch_error(group: ExceptionGroup[Exception]) -> LaunchError:
    """Returns the first `LaunchError` in a group; raises the group if it has none."""
    for error in group.exceptions:
        found = _first_launch_error(error) if isinstance(error, ExceptionGroup) else error
        if isinstance(found, LaunchError):
            return found
    raise group
