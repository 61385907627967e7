"""The faults of a campaign: what they do, and how long they last."""

import asyncio
import contextlib
import random
import resource
import signal
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Final, TypeAlias

from tests.support.campaign.load import Load
from tests.support.campaign.processes.faulty_worker import POISON, DeviceFault, DeviceOrder
from tests.support.campaign.processes.stack import Stack


@dataclass(frozen=True)
class Fault:
    """One fault and its target."""

    kind: str
    target: str
    """A service, a link, or "clients"."""

    def __str__(self) -> str:
        """Names it, for people."""
        return f"{self.kind} {self.target}"


@dataclass(frozen=True)
class Scene:
    """What faults act on."""

    stack: Stack
    load: Load
    dice: random.Random
    scale: float = 1.0
    """By what the longest times of faults are multiplied."""

    async def wait(self, least_s: float, most_s: float) -> None:
        """Lets a fault last for a random time."""
        await asyncio.sleep(self.dice.uniform(least_s, max(least_s, self.scale * most_s)))


Inject: TypeAlias = Callable[[Scene, str], Awaitable[None]]
"""Applies a fault to its target; returns once the fault has passed."""


async def kill(scene: Scene, service: str) -> None:
    """Kills a process with SIGKILL."""
    pid = await scene.stack.running(service)
    scene.stack.signal(service, signal.SIGKILL)
    await scene.stack.gone(service, pid)


async def terminate(scene: Scene, service: str) -> None:
    """Asks a process to drain and to end."""
    pid = await scene.stack.running(service)
    scene.stack.signal(service, signal.SIGTERM)
    await scene.stack.gone(service, pid)


async def freeze(scene: Scene, service: str) -> None:
    """Stops a process for up to 10 s, then lets it go on."""
    await scene.stack.running(service)
    pid = scene.stack.signal(service, signal.SIGSTOP)
    await scene.wait(0.2, 10.0)
    if scene.stack.pid(service) == pid:
        scene.stack.signal(service, signal.SIGCONT)


async def freeze_for_good(scene: Scene, service: str) -> None:
    """Stops a process that never goes on; kills it later, as a liveness probe does."""
    await scene.stack.running(service)
    pid = scene.stack.signal(service, signal.SIGSTOP)
    await scene.wait(1.0, 20.0)
    if scene.stack.pid(service) == pid:
        await kill(scene, service)


async def roll(scene: Scene, _target: str) -> None:
    """Restarts all services one after the other, each once the one before serves."""
    services = list(scene.stack.services)
    scene.dice.shuffle(services)
    for service in services:
        await terminate(scene, service)
        await scene.stack.serving()


async def cut(scene: Scene, link: str) -> None:
    """Resets all connections of a link."""
    scene.stack.links[link].cut()


async def half_open(scene: Scene, link: str) -> None:
    """Loses what a link carries for up to 25 s; then its old connections are reset."""
    scene.stack.links[link].silence()
    await scene.wait(0.5, 25.0)
    scene.stack.links[link].cut()
    scene.stack.links[link].restore()


async def stall(scene: Scene, link: str) -> None:
    """Holds what a link carries for up to 10 s, and delivers it then."""
    scene.stack.links[link].silence()
    await scene.wait(0.2, 10.0)
    scene.stack.links[link].restore()


async def slow(scene: Scene, link: str) -> None:
    """Delays each piece of data by up to 0.3 s, for up to 5 s."""
    scene.stack.links[link].slow(scene.dice.uniform(0.02, 0.3))
    await scene.wait(1.0, 5.0)
    scene.stack.links[link].slow(0)


async def full_disk(scene: Scene, service: str) -> None:
    """Lets a process write to no file for up to 3 s, neither logs nor caches."""
    pid = await scene.stack.running(service)
    _, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, hard))
    await scene.wait(0.5, 3.0)
    with contextlib.suppress(ProcessLookupError):
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (hard, hard))


def device(kind: DeviceFault) -> Inject:
    """Returns the fault of a worker's device."""

    async def inject(scene: Scene, worker: str) -> None:
        file = scene.stack.folder / f"{worker}.fault"
        pid = await scene.stack.running(worker)
        DeviceOrder(kind, scene.dice.randrange(20)).write(file)
        if kind == "broken":
            await scene.wait(1.0, 6.0)
            file.unlink()
            return
        await scene.stack.gone(worker, pid)

    return inject


async def poison(scene: Scene, _target: str) -> None:
    """Sends a request that kills every worker that computes it; the request must fail, and alone."""
    question = scene.dice.choice(list(scene.load.expected))
    await scene.load.ask_poison(replace(question, name="poison", prompt=(*POISON, *question.prompt)))


async def slow_readers(scene: Scene, _target: str) -> None:
    """A third of the clients read nothing for up to 5 s."""
    running = sorted(scene.load.running, key=lambda stream: stream.number)
    streams = scene.dice.sample(running, len(running) // 3)
    for stream in streams:
        stream.reads.clear()
    await scene.wait(1.0, 5.0)
    for stream in streams:
        stream.reads.set()


ON_SERVICES: Final[dict[str, Inject]] = {
    "kill": kill,
    "terminate": terminate,
    "freeze": freeze,
    "freeze for good": freeze_for_good,
    "full disk": full_disk,
}
ON_WORKERS: Final[dict[str, Inject]] = {
    "broken device": device("broken"),
    "hung step": device("hung"),
    "crash between steps": device("crash"),
}
ON_LINKS: Final[dict[str, Inject]] = {"cut": cut, "half-open": half_open, "stall": stall, "slow": slow}
ON_ALL: Final[dict[str, Inject]] = {
    "poison": poison,
    "slow readers": slow_readers,
    "rolling restart": roll,
}
INJECT: Final = ON_SERVICES | ON_WORKERS | ON_LINKS | ON_ALL


def plan(count: int, stack: Stack, dice: random.Random) -> list[Fault]:
    """Returns `count` faults in random order: every kind before any kind twice, with random targets."""
    targets = {
        **dict.fromkeys(ON_SERVICES, stack.services),
        **dict.fromkeys(ON_WORKERS, stack.workers),
        **dict.fromkeys(ON_LINKS, tuple(stack.links)),
        **dict.fromkeys(ON_ALL, ("all",)),
    }
    faults: list[Fault] = []
    while len(faults) < count:
        kinds = list(INJECT)
        dice.shuffle(kinds)
        faults += [Fault(kind, dice.choice(targets[kind])) for kind in kinds]
    return faults[:count]
