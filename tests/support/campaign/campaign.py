"""A campaign: a load, faults at random times, and what they cost."""

import asyncio
import contextlib
import json
import random
import signal
import sys
import tempfile
import time
from argparse import ArgumentParser, Namespace
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Final, Protocol

import httpx

from protos.service.grpc_options import open_channel
from protos.triptych.v1 import inference_pb2_grpc
from tests.support.campaign import faults
from tests.support.campaign.faults import Fault, Scene
from tests.support.campaign.load import Load
from tests.support.campaign.processes import tiny_chat_model
from tests.support.campaign.processes.inspection import leaks
from tests.support.campaign.processes.stack import MODEL, Stack, running_stack
from tests.support.campaign.questions import make_questions
from tests.support.campaign.streams import Stream, ask_grpc, ask_http

NUM_QUESTIONS: Final = 32
# Streams have a timeout of their own.
_PATIENT: Final = httpx.Timeout(None)
_NO_LIMITS: Final = httpx.Limits(max_connections=None, max_keepalive_connections=None)


@dataclass
class Report:
    """What a campaign found."""

    seed: int
    dtype: str
    pauses: list[tuple[Fault, float]] = field(default_factory=list)
    """For each fault, the longest time that a running stream waited for tokens."""
    answered: int = 0
    tokens: int = 0
    poisoned: int = 0
    failures: list[str] = field(default_factory=list)
    unsteady: list[str] = field(default_factory=list)
    leaks: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def line(self) -> str:
        """Returns the report as one line of JSON."""
        kinds: dict[str, list[float]] = {}
        for fault, pause in self.pauses:
            kinds.setdefault(fault.kind, []).append(pause)
        return json.dumps({
            "campaign": "faults", "seed": self.seed, "dtype": self.dtype, "faults": len(self.pauses),
            "answered": self.answered, "tokens": self.tokens, "poisoned": self.poisoned,
            "failed": len(self.failures), "unsteady": len(self.unsteady), "leaks": self.leaks,
            "recovery_s": _summary([pause for _, pause in self.pauses]),
            "recovery_s_by_kind": {kind: _summary(pauses) for kind, pauses in sorted(kinds.items())},
            "seconds": round(self.seconds),
        })  # fmt: skip


def _summary(pauses: Sequence[float]) -> dict[str, float]:
    if not pauses:
        return {"count": 0}
    return {"count": len(pauses), "median": round(median(pauses), 2), "worst": round(max(pauses), 2)}


def say(text: str) -> None:
    """Prints progress."""
    print(text, file=sys.stderr, flush=True)


class Findings(Protocol):
    """What a campaign or a soak found."""

    failures: list[str]
    leaks: list[str]

    def line(self) -> str:
        """Returns the report as one line of JSON."""


def command(parser: ArgumentParser, run: Callable[[Path, Path, Namespace], Awaitable[Findings]]) -> int:
    """Runs a campaign as a command and prints what it found.

    Returns:
        The exit code: 1 if something failed or was left behind.
    """
    parser.add_argument(
        "--seed", type=int, default=random.SystemRandom().randrange(1 << 32), help="repeats a campaign"
    )
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--width", type=int, default=24, help="requests at a time (24)")
    parser.add_argument("--folder", type=Path, help="empty folder for logs; default: a temporary one")
    options = parser.parse_args()
    say(f"seed {options.seed}")

    async def running() -> Findings:
        return await run(model, options.folder or Path(temporary), options)

    with tempfile.TemporaryDirectory() as temporary:
        model = tiny_chat_model.write(Path(temporary) / "model")
        found = asyncio.run(running())
    for text in (*found.failures, *found.leaks):
        say(text)
    print(found.line())
    return 1 if found.failures or found.leaks else 0


@asynccontextmanager
async def loaded_stack(
    model: Path, folder: Path, *, dtype: str, dice: random.Random
) -> AsyncIterator[tuple[Stack, Load]]:
    """Runs a stack within the block, with a load that has learnt its answers."""
    async with contextlib.AsyncExitStack() as cleanup:
        stack = await cleanup.enter_async_context(running_stack(model, folder, dtype=dtype))
        channel = await cleanup.enter_async_context(open_channel(stack.scheduler_address))
        stub = inference_pb2_grpc.InferenceStub(channel)
        http = await cleanup.enter_async_context(
            httpx.AsyncClient(
                base_url=stack.gateway_url, timeout=_PATIENT, limits=_NO_LIMITS, trust_env=False
            )
        )

        async def ask(stream: Stream) -> None:
            if stream.question.way == "grpc":
                await ask_grpc(stub, stream)
            else:
                await ask_http(http, MODEL, stream)

        load = Load(ask)
        await load.learn(make_questions(NUM_QUESTIONS, dice))
        yield stack, load


async def run(
    model: Path, folder: Path, *, count: int, seed: int, dtype: str = "float32", width: int = 24, scale: float = 1.0
) -> Report:  # fmt: skip
    """Applies `count` faults to a stack under load. SIGINT ends it before the next fault."""
    started = time.monotonic()
    dice = random.Random(seed)
    report = Report(seed, dtype)
    async with loaded_stack(model, folder, dtype=dtype, dice=dice) as (stack, load):
        await stack.idle()
        before = {service: await stack.inspect(service) for service in stack.services}
        scene, stop = Scene(stack, load, dice, scale), asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGINT, stop.set)
        told = 0
        async with load.clients(width, random.Random(seed)):
            for number, fault in enumerate(faults.plan(count, stack, dice), start=1):
                if stop.is_set():
                    break
                await load.received(dice.randrange(50, 800))
                report.pauses.append((fault, await _apply(fault, scene)))
                say(f"{number}/{count} {fault}: {report.pauses[-1][1]:.2f} s, {len(load.failures)} failures")
                for failure in load.failures[told:]:
                    say(f"  {failure}")
                told = len(load.failures)
        await stack.serving()
        await stack.idle()
        after = {service: await stack.inspect(service) for service in stack.services}
        for question in load.unsteady:
            say(question)
    report.leaks = leaks(before, after)
    report.answered, report.tokens, report.poisoned = load.answered, load.tokens, load.poisoned
    report.failures, report.unsteady = load.failures, load.unsteady
    report.seconds = time.monotonic() - started
    return report


async def _apply(fault: Fault, scene: Scene) -> float:
    """Applies a fault; returns the longest pause of a stream, once all have recovered."""
    pause = scene.load.pause()
    await faults.INJECT[fault.kind](scene, fault.target)
    await pause.recovered()
    return pause.longest_s
