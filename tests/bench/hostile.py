"""Attacks a stack in one tenant's name, and measures what another tenant notices.

``python -m tests.bench.hostile [--quick] [--only TEXT] [--mixed-minutes N]`` runs `triptych up` with SmolLM2
and two API keys. Bob's attacks run one after the other. In another process, Alice asks for four tokens every
300 ms, and a probe measures the delay of the gateway's event loop every 5 ms. A line for each attack has:

- the longest delay of the loop, without time in which gateway or probe had no core;
- Alice's worst latency, and her requests that were refused;
- how much gateway, scheduler and worker grew at most: resident memory, children included;
- the attacker's answers by status.

The first line is without an attack. ``--mixed-minutes`` runs attacks in random order instead, with 16 streams
of Alice's, whose texts must be those of streams without attacks.

Ratios: the worst of all attacks by the aims of 50 ms, 500 ms and 64 MiB.
"""

import asyncio
import contextlib
import json
import random
import resource
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import httpx
import psutil

from tests.bench.support.hostile.attacks import ATTACKS, MODEL, Attack
from tests.bench.support.hostile.observer import Seen, Tenant, Watch, watching
from tests.bench.support.hostile.senders import Target
from tests.bench.support.report import parser, report
from tests.support.stack import Stack, running_stack
from worker_svc.model_files.loader import fetch

AIMS: Final = {"loop_ms": 50.0, "latency_ms": 500.0, "growth_mib": 64.0}
_ALICE, _BOB, _TOKEN = "alices-own-key", "bobs-own-key", "a-token-of-the-services"
_SERVICES: Final = ("gateway", "scheduler", "worker-0")
_STREAMS: Final = 16
_ATTACK_LIMIT_S: Final = 40.0
_IDLE_LIMIT_S: Final = 60.0
_HOLD_S: Final = 8.0
_SAMPLE_S: Final = 0.05


@dataclass(frozen=True)
class Row:
    """What an attack did."""

    attack: str
    statuses: dict[str, int]
    """Of the attacker's requests."""
    loop_ms: float
    """Longest delay of the gateway's event loop."""
    latency_ms: float
    """Longest latency of the other tenant's requests."""
    failed: int
    """The other tenant's requests without a 200."""
    growth_mib: dict[str, float]
    """Most that each process grew."""

    def __str__(self) -> str:
        """A line of the table."""
        statuses = " ".join(f"{count}x{status}" for status, count in sorted(self.statuses.items()))
        growth = " ".join(f"{self.growth_mib[name]:7.0f}" for name in _SERVICES)
        numbers = f"{self.loop_ms:8.0f} {self.latency_ms:8.0f} {self.failed:6} {growth}"
        return f"{self.attack[:54]:54} {numbers}  {statuses}"


HEADER: Final = f"{'attack':54} {'loop ms':>8} {'other ms':>8} {'failed':>6} {'gateway':>7} {'schedul':>7} {'worker':>7}  statuses"


class Sizes:
    """The most memory that each service has held, sampled on a thread of its own."""

    def __init__(self, stack: Stack) -> None:
        """Starts sampling."""
        self._processes = {name: psutil.Process(stack.pid(name)) for name in _SERVICES}
        self._most = self.now()
        self._lock = threading.Lock()
        threading.Thread(target=self._sample, daemon=True).start()

    def now(self) -> dict[str, float]:
        """Returns the resident memory of each service and its children, MiB."""
        return {name: _resident_mib(process) for name, process in self._processes.items()}

    def take(self) -> dict[str, float]:
        """Returns the most since the last call, MiB."""
        now = self.now()
        with self._lock:
            most, self._most = self._most, now
        return {name: max(most[name], now[name]) for name in now}

    def _sample(self) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            while True:
                now = self.now()
                with self._lock:
                    self._most = {name: max(now[name], self._most[name]) for name in now}
                time.sleep(_SAMPLE_S)


def _resident_mib(process: psutil.Process) -> float:
    total = process.memory_info().rss
    for child in process.children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            total += child.memory_info().rss
    return total / 2**20


@dataclass(frozen=True)
class Field:
    """A stack, who attacks it, and what watches."""

    target: Target
    watch: Watch
    sizes: Sizes

    async def run(self, attack: Attack | None) -> Row:
        """Runs an attack, or waits as long as a short one, and measures."""
        await self._settled()
        before = await asyncio.to_thread(self._take)
        statuses = Counter[str]()
        if attack is None:
            await asyncio.sleep(_HOLD_S)
        else:
            statuses = await self.send(attack)
        seen, most = await asyncio.to_thread(self._take)
        name = "nothing" if attack is None else f"{attack.kind}: {attack.name}"
        return Row(
            name, dict(statuses), seen.loop_ms, max(seen.latency_ms),
            seen.statuses.total() - seen.statuses["200"],
            {service: most[service] - before[1][service] for service in most},
        )  # fmt: skip

    async def send(self, attack: Attack) -> Counter[str]:
        """Runs an attack; an unfinished one is given up after a while."""
        try:
            async with asyncio.timeout(_ATTACK_LIMIT_S):
                return await attack.sender.send(self.target)
        except TimeoutError:
            return Counter({"given up": 1})

    def _take(self) -> tuple[Seen, dict[str, float]]:
        return self.watch.take(), self.sizes.take()

    async def _settled(self) -> None:
        """Waits until the stack runs nothing of the attacker's."""
        deadline = time.monotonic() + _IDLE_LIMIT_S
        url = f"http://{self.target.host}:{self.target.port}/load"
        async with httpx.AsyncClient(timeout=_IDLE_LIMIT_S) as client:
            while time.monotonic() < deadline:
                with contextlib.suppress(httpx.TransportError):
                    if (await client.get(url)).json().get("server_load", 0) <= 1:
                        break
                await asyncio.sleep(0.1)
        await asyncio.sleep(0.5)


@contextlib.contextmanager
def field(folder: Path) -> Iterator[Field]:
    """Runs a stack with two keys, and the other tenant, until the block ends."""
    keys = folder / "keys.json"
    keys.write_text(json.dumps({"keys": [{"name": "alice", "key": _ALICE}, {"name": "bob", "key": _BOB}]}))
    token = folder / "token"
    token.write_text(_TOKEN)
    token.chmod(0o600)
    keys.chmod(0o600)
    flags = (
        "--device", "cpu", "--max-model-len", "2048", "--max-num-seqs", "32", "--standby-workers", "0",
        "--api-key-file", str(keys), "--service-token-file", str(token),
    )  # fmt: skip
    with running_stack(fetch(MODEL), MODEL, folder / "run", *flags) as stack:
        port = int(stack.base_url.rsplit(":", 1)[1])
        target = Target("127.0.0.1", port, stack.scheduler_address, _TOKEN, _BOB, _HOLD_S)
        with watching(Tenant(port, stack.pid("gateway"), _ALICE, MODEL)) as watch:
            yield Field(target, watch, Sizes(stack))


async def attacked(target: Field, attacks: Sequence[Attack]) -> list[Row]:
    """Runs all attacks, after a row without one, and prints the table."""
    print(HEADER, flush=True)
    rows = []
    for attack in (None, *attacks):
        rows.append(await target.run(attack))
        print(rows[-1], flush=True)
    return rows


async def texts(target: Field) -> list[str]:
    """Returns the texts of 16 streams of the other tenant, run together; a failed one is its error."""
    url = f"http://{target.target.host}:{target.target.port}/v1/completions"
    async with httpx.AsyncClient(timeout=300, headers={"authorization": f"Bearer {_ALICE}"}) as client:

        async def one(number: int) -> str:
            body = {
                "model": MODEL, "prompt": f"Story {number}: once upon a time", "max_tokens": 64, "temperature": 0,
                "stream": True,
            }  # fmt: skip
            text = ""
            try:
                async with client.stream("POST", url, json=body) as answer:
                    if answer.status_code != httpx.codes.OK:
                        return f"failed: {answer.status_code}"
                    async for line in answer.aiter_lines():
                        if line.startswith("data: {"):
                            event = json.loads(line.removeprefix("data: "))
                            if "error" in event:
                                return f"failed: {event['error']['message']}"
                            text += event["choices"][0]["text"]
                        elif line == "data: [DONE]":
                            return text
            except httpx.HTTPError as error:
                return f"failed: {type(error).__name__}"
            return "failed: no end"

        return list(await asyncio.gather(*map(one, range(_STREAMS))))


async def mixed(target: Field, minutes: float, attacks: Sequence[Attack], seed: int = 0) -> dict[str, object]:
    """Runs attacks in random order beside honest streams; returns the figures."""
    expected = await texts(target)
    before = target.sizes.now()
    target.sizes.take()
    counts, deadline, rng = Counter[str](), time.monotonic() + 60 * minutes, random.Random(seed)

    async def attack() -> None:
        while time.monotonic() < deadline:
            await target.send(rng.choice(attacks))
            counts["attacks"] += 1

    async def stream() -> None:
        while time.monotonic() < deadline:
            for found, wanted in zip(await texts(target), expected, strict=True):
                counts["streams"] += 1
                counts["changed"] += found != wanted and not found.startswith("failed")
                if found.startswith("failed"):
                    counts["failed"] += 1
                    print(found, flush=True)

    await asyncio.gather(attack(), stream())
    seen, most = await asyncio.to_thread(target.watch.take), target.sizes.take()
    return {
        **{name: counts[name] for name in ("attacks", "streams", "failed", "changed")},
        "loop_ms": round(seen.loop_ms), "latency_ms": round(max(seen.latency_ms)),
        "growth_mib": {name: round(most[name] - before[name]) for name in _SERVICES},
    }  # fmt: skip


def summary(rows: Sequence[Row]) -> tuple[dict[str, object], dict[str, float]]:
    """Returns figures and ratios of a table whose first row is without an attack."""
    alone, *attacks = rows
    worst = {
        "loop_ms": max(row.loop_ms for row in attacks),
        "latency_ms": max(row.latency_ms for row in attacks),
        "growth_mib": max(max(row.growth_mib.values()) for row in attacks),
    }
    within = {
        "loop_ms": sum(row.loop_ms <= AIMS["loop_ms"] for row in attacks),
        "latency_ms": sum(row.latency_ms <= AIMS["latency_ms"] for row in attacks),
        "growth_mib": sum(max(row.growth_mib.values()) <= AIMS["growth_mib"] for row in attacks),
    }
    figures = {
        "attacks": len(attacks),
        "without_attack": {"loop_ms": round(alone.loop_ms), "latency_ms": round(alone.latency_ms)},
        "refused_to_the_other": sum(row.failed for row in attacks),
        "worst": {name: round(value) for name, value in worst.items()},
        "within_aim": within,
    }
    return figures, {f"{name}_to_aim": worst[name] / aim for name, aim in AIMS.items()}


def main() -> None:
    """Runs the bench and prints its line."""
    options = parser(__doc__, "some attacks of each kind")
    options.add_argument("--only", default="", help="only attacks whose kind or name has this text")
    options.add_argument("--mixed-minutes", type=float, default=0, help="minutes of mixed attacks instead")
    arguments = options.parse_args()
    chosen = [
        attack
        for attack in ATTACKS
        if (attack.quick or not arguments.quick) and arguments.only in f"{attack.kind}: {attack.name}"
    ]
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with tempfile.TemporaryDirectory() as temporary, field(Path(temporary)) as target:
        if arguments.mixed_minutes:
            report("hostile_mixed", asyncio.run(mixed(target, arguments.mixed_minutes, chosen)), {})
        else:
            rows = asyncio.run(attacked(target, chosen))
            figures, ratios = summary(rows)
            report("hostile", figures, ratios)


if __name__ == "__main__":
    main()
