"""A long mixed load without faults: memory stays flat, and nothing stays behind."""

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import linear_regression
from typing import Final

from protos.service.grpc_options import open_channel
from tests.support.campaign.campaign import loaded_stack, say
from tests.support.campaign.load import Load
from tests.support.campaign.processes.inspection import leaks, resident_mib
from tests.support.campaign.processes.stack import Stack
from tests.support.matrix.bursts import Matrix
from tests.support.matrix.cases import Case, make_cases
from tests.support.matrix.clients import open_clients
from tests.support.matrix.serving import SHORTER_PROMPTS

BUSY_S: Final = 20.0
"""How long clients ask between two idle moments."""
WARM_UP: Final = 0.4
"""The share of the time in which caches fill; memory may grow meanwhile."""
MOST_MIB: Final = 12.0
MOST_SHARE: Final = 0.03
"""How much the memory of a process may grow after the warm-up: this share, but at least `MOST_MIB`."""


@dataclass
class Soak:
    """What a soak found."""

    seed: int
    dtype: str
    minutes: float = 0.0
    answered: int = 0
    parameters: int = 0
    """Requests of the matrix of parameters whose answers were right."""
    left: int = 0
    """Requests whose clients went away."""
    tokens: int = 0
    failures: list[str] = field(default_factory=list)
    leaks: list[str] = field(default_factory=list)
    memory: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    """For each process, pairs of minutes and MiB, at idle moments after the warm-up."""

    def growth(self) -> dict[str, float]:
        """Returns how much the line through each process' memory rises, MiB."""
        return {service: _rise(samples) for service, samples in self.memory.items()}

    def judge(self) -> None:
        """Counts memory that grew too much as a leak."""
        for service, rise in self.growth().items():
            if rise > max(MOST_MIB, MOST_SHARE * self.memory[service][0][1]):
                self.leaks.append(f"{service} grew by {rise:.1f} MiB after the warm-up")

    def line(self) -> str:
        """Returns the report as one line of JSON."""
        minutes = self.minutes * (1 - WARM_UP)
        return json.dumps({
            "campaign": "soak", "seed": self.seed, "dtype": self.dtype, "minutes": round(self.minutes, 1),
            "answered": self.answered, "parameters": self.parameters, "left": self.left, "tokens": self.tokens, "failed": len(self.failures),
            "leaks": self.leaks,
            "mib": {service: round(samples[-1][1]) for service, samples in self.memory.items()},
            "mib_per_minute": {service: round(rise / minutes, 2) for service, rise in self.growth().items()},
        })  # fmt: skip


def _rise(samples: Sequence[tuple[float, float]]) -> float:
    if len(samples) < 3:
        return 0.0
    minutes, mib = zip(*samples, strict=True)
    slope, _ = linear_regression(minutes, mib)
    return float(slope * (minutes[-1] - minutes[0]))


class Parameters:
    """Clients that ask for every parameter of an answer, one case after the other."""

    def __init__(self, matrix: Matrix, cases: Sequence[Case]) -> None:
        """Starts without clients."""
        self._matrix = matrix
        self._cases = cases
        self.answered = 0
        """Requests whose answers were right."""
        self.failures: list[str] = []
        """A line for each of the others."""

    async def learn(self) -> None:
        """Asks each case alone."""
        self.failures += await self._matrix.learn(self._cases)

    @asynccontextmanager
    async def clients(self, width: int, dice: random.Random) -> AsyncIterator[None]:
        """Keeps `width` requests running within the block, then lets them end."""
        stop = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            for _ in range(width):
                group.create_task(self._client(dice, stop))
            try:
                yield
            finally:
                stop.set()

    async def _client(self, dice: random.Random, stop: asyncio.Event) -> None:
        while not stop.is_set():
            case = dice.choice(self._cases)
            if problem := await self._matrix.ask(case):
                self.failures.append(f"{case.name}: {problem}")
            else:
                self.answered += 1


async def run(
    model: Path, folder: Path, *, minutes: float, seed: int, dtype: str = "float32", width: int = 24
) -> Soak:
    """Loads a stack for `minutes`, with idle moments in between."""
    dice, soak = random.Random(seed), Soak(seed, dtype)
    async with (
        loaded_stack(model, folder, dtype=dtype, dice=dice) as (stack, load),
        open_clients(stack.gateway_url, open_channel(stack.scheduler_address)) as clients,
    ):
        parameters = Parameters(Matrix(clients), make_cases(SHORTER_PROMPTS))
        await parameters.learn()
        started, before = time.monotonic(), None
        while soak.minutes < minutes:
            async with parameters.clients(width // 2, dice):
                await _busy(load, width // 2, dice)
            await stack.idle()
            soak.minutes = (time.monotonic() - started) / 60
            if soak.minutes >= WARM_UP * minutes:
                before = before or await _held(stack)
                _sample(soak, stack)
            say(
                f"{soak.minutes:.1f} minutes: {load.answered} + {parameters.answered} answers,"
                f" {len(load.failures)} + {len(parameters.failures)} failures"
            )
        soak.leaks = leaks(before or {}, await _held(stack))
    soak.answered, soak.tokens, soak.left = load.answered, load.tokens, load.left
    soak.parameters, soak.failures = parameters.answered, load.failures + parameters.failures
    soak.judge()
    return soak


async def _busy(load: Load, width: int, dice: random.Random) -> None:
    """Runs clients for a while; an eighth of the requests is left by their clients in the middle."""
    async with load.clients(width, dice, leave=0.125):
        await asyncio.sleep(BUSY_S)


async def _held(stack: Stack) -> Mapping[str, Mapping[str, object]]:
    return {service: await stack.inspect(service) for service in stack.services}


def _sample(soak: Soak, stack: Stack) -> None:
    for service in stack.services:
        pid = stack.pid(service)
        assert pid is not None, f"{service} is gone"
        soak.memory.setdefault(service, []).append((soak.minutes, resident_mib(pid)))
