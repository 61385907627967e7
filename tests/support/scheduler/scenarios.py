"""What the policies promise, as simulations: the traffic that would break each promise, and its figures.

Tests assert the figures, `python -m tests.bench.simulations` prints them. Step times are those of an 8B model
on an H100, except where a scenario says otherwise.
"""

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Final
from unittest import mock

from scheduler_svc.engine.placement import AttachedReplica, Placer
from scheduler_svc.requests.request import Request
from scheduler_svc.settings import Settings
from scheduler_svc.simulation.requests import SimulatedRequest
from scheduler_svc.simulation.run import Simulation
from tests.support.scheduler.simulated import H100_8B, poisson, simulated


@dataclass(frozen=True, slots=True)
class Figure:
    """A measured value, and the largest one that keeps the promise."""

    value: float
    limit: float
    """For tests: the present value may not grow beyond it."""
    missed_aim: float | None = None
    """A smaller limit that was aimed at."""

    @property
    def aim(self) -> float:
        """The limit of the bench."""
        return self.limit if self.missed_aim is None else self.missed_aim

    def ratio_to(self, limit: float) -> float:
        """Returns the value by a limit: above 1 it is exceeded."""
        if limit:
            return self.value / limit
        return 1 + self.value if self.value > 0 else 0.0


Figures = dict[str, Figure]


# ---- fairness ----


def streams(number: int, turns: int, prompt: int, output: int, *, tenant: str) -> list[SimulatedRequest]:
    """Returns requests of clients that send the next one when the last has ended."""
    return [
        SimulatedRequest(0.0, prompt, output, tenant=tenant, session=f"{tenant}{stream}")
        for stream in range(number)
        for _ in range(turns)
    ]


class Watched(Simulation):
    """A simulation that calls a function every 10 ms, which may end it."""

    def __init__(self, requests: Sequence[SimulatedRequest], **settings: Any) -> None:
        """Prepares the simulation; `settings` are fields of the scheduler's."""
        super().__init__(list(requests), Settings(**settings), [H100_8B])
        self.watch: Callable[[], None] = lambda: None

    def _look(self) -> None:
        self.watch()
        self._look_s = self.now + 0.01

    def served(self) -> dict[str, int]:
        """Returns the tokens that each tenant was served, computed ones of prompts included."""
        return {
            name: one.tokens + one.prompt_tokens - one.hit_tokens
            for name, one in self._measures.tenants.items()
        }


def flood(quick: bool) -> Figures:
    """A tenant keeps 800 requests waiting; another sends one now and then and is next, at any age."""
    every_s, last_s = (10, 40) if quick else (30, 200)
    crowd = streams(864, 2 if quick else 8, 500, 50, tenant="a")
    others = [SimulatedRequest(float(at), 100, 100, tenant="b") for at in range(5, last_s, every_s)]
    tenants = simulated(crowd + others, ageing_s=1.0)["tenants"]
    assert tenants["a"]["ttft_s"]["p50"] > 6, "the flood waits"
    return {"longest wait, s": Figure(tenants["b"]["ttft_s"]["p99"], 2.6)}


_BACKLOGS: Final = [
    ((70, 100, 400), (20, 1000, 400)),
    ((250, 100, 200), (200, 100, 200)),
    ((100, 2000, 30), (200, 100, 200)),
    ((250, 100, 300), (100, 3000, 20)),
    ((250, 200, 800), (200, 100, 50)),
]
"""Of two tenants: streams, tokens of their prompts and of their answers."""


def weights(quick: bool) -> Figures:
    """A tenant of four times the weight gets four times the tokens, whatever each sends."""
    return {
        f"deviation of the share, backlog {index}": Figure(abs(_served_ratio(a, b) / 4 - 1), 0.1)
        for index, (a, b) in enumerate(_BACKLOGS[:1] if quick else _BACKLOGS)
    }


def _served_ratio(a: tuple[int, int, int], b: tuple[int, int, int]) -> float:
    """Returns the tokens of tenant "a", of weight 4, by those of "b" between 10 and 90 s."""
    requests = [*streams(a[0], 50, *a[1:], tenant="a"), *streams(b[0], 50, *b[1:], tenant="b")]
    model = Watched(requests, max_num_seqs=32, tenant_weights={"a": 4.0})
    served: list[dict[str, int]] = []

    def watch() -> None:
        if model.now > (10, 90)[len(served)]:
            served.append(model.served())
        if len(served) == 2:
            raise TimeoutError

    model.watch = watch
    try:
        model.run()
    except TimeoutError:
        early, late = served
        return (late["a"] - early["a"]) / (late["b"] - early["b"])
    raise AssertionError("the backlog ended before the measurement")


def full_queue(quick: bool) -> Figures:
    """A tenant fills the queue; others' requests are accepted all the same, and the flood is bounded."""
    crowd = [SimulatedRequest(0.0, 100, 20 if quick else 200, tenant="a") for _ in range(1100)]
    tenants = simulated([*crowd, SimulatedRequest(0.1, 100, 50, tenant="b")])["tenants"]
    return {
        "others refused": Figure(tenants["b"]["rejected"], 0),
        "longest wait, s": Figure(tenants["b"]["ttft_s"]["p99"], 2.6),
        "accepted of the flood by the bound": Figure(tenants["a"]["requests"] / (1024 + 64), 1.0),
    }


def places_held(quick: bool) -> Figures:
    """A tenant holds all slots, or all memory, for long answers; another gets a place back soon."""
    figures = {}
    for name, prompt, blocks in (("slots", 100, None), ("memory", 5000, 64 * 50)):
        holders = streams(64, 1, prompt, 4000, tenant="a")
        late = [SimulatedRequest(20.0 + 3 * number, 1000, 100, tenant="b") for number in range(3)]
        model = Watched(holders + late, num_blocks=blocks)
        tenants, charged = model.engine.waiting.tenants, Counter[str]()
        with mock.patch.object(tenants, "charge", _counted(tenants.charge, charged)):
            found = model.run()
        figures[f"{name}: longest wait, s"] = Figure(found["tenants"]["b"]["ttft_s"]["p99"], 2.6)
        if name == "slots":
            figures[f"{name}: preemptions for three requests"] = Figure(found["preemptions"], 3)
        assert found["preemptions"], "the tenant holds every place"
        served = 64 * (prompt + 4000)
        figures[f"{name}: tokens charged by tokens served"] = Figure(charged["a"] / served, 1.0)
        if quick:
            break
    return figures


def _counted(charge: Callable[[str, int], None], charged: Counter[str]) -> Callable[[str, int], None]:
    def counted(tenant: str, tokens: int) -> None:
        charged[tenant] += tokens
        charge(tenant, tokens)

    return counted


def places_swing(quick: bool) -> Figures:
    """Long answers hold all slots; a second tenant takes back half of its share, the rest when some end."""
    crowd = 24 if quick else 128
    requests = [*streams(64, 1, 100, 5000, tenant="a"), *streams(crowd, 1, 100, 5000, tenant="b")]
    model = Watched([replace(one, arrival_s=5.0 * (one.tenant == "b")) for one in requests])
    held = 0

    def watch() -> None:
        nonlocal held
        if model.now < 31:  # the first answers end later
            running = (one for one in model.engine.live() if one.slot is not None)
            held = Counter(one.tenant for one in running)["b"]

    model.watch = watch
    found = model.run()
    return {
        "half of the share by places taken back": Figure(16 / held, 1.0),
        "places taken back by half of the share": Figure(held / 16, 1.0),
        "preemptions": Figure(found["preemptions"], 32),
    }


# ---- priorities ----


def shared_blocks(quick: bool) -> Figures:
    """An urgent request meets eight that share a prefix: a shared block is free when its last user leaves."""
    prefix = (("system", 4096),)
    figures = {}
    for name, peer_priority, needed in (("too few blocks", 0, 17_000), ("enough blocks", 1, 14_000)):
        # After 10 s each has 45 blocks of 128 tokens, 32 of them shared.
        users = [SimulatedRequest(0.0, 4196, 2000, prefix, priority=1) for _ in range(7)]
        peer = SimulatedRequest(0.0, 4196, 3000, prefix, tenant="peer", priority=peer_priority)
        urgent = SimulatedRequest(10.0, needed, 10, tenant="urgent")
        found = simulated([peer, *users, urgent], num_blocks=174)
        if peer_priority:
            wait_s = found["tenants"]["urgent"]["ttft_s"]["p99"]
            alone_s = -(-needed // 512) * (H100_8B.chunk(512) + H100_8B.decode(8))
            figures[f"{name}: wait by its own chunks"] = Figure(wait_s / alone_s, 1.2)
            figures[f"{name}: preemptions"] = Figure(found["preemptions"], 8)
        else:
            figures[f"{name}: preempted in vain"] = Figure(found["preemptions"], 0)
    return figures


# ---- prompts and memory ----


def long_prompts(quick: bool) -> Figures:
    """A tenant queues sixty prompts of 8,000 tokens; another's short ones run between their chunks."""
    queued = [SimulatedRequest(0.0, 8000, 100, tenant="a") for _ in range(60)]
    short = [SimulatedRequest(1.0 + second, 100, 50, tenant="b") for second in range(2 if quick else 8)]
    figures = simulated([*queued, *short])
    return {
        "short: longest TTFT, s": Figure(figures["tenants"]["b"]["ttft_s"]["p99"], 0.1),
        # Sixty prompts in a row, with a decode step after each chunk.
        "long: longest TTFT, s": Figure(figures["tenants"]["a"]["ttft_s"]["p99"], 32.0),
        "uncomputed share of KV": Figure(figures["kv_uncomputed_share"], 0.1),
    }


def small_chunks(quick: bool) -> Figures:
    """Prompts do not queue behind their padding, and blocks are allocated little before they are computed."""
    figures = {}
    # At 40 a second, chunks and steps take more time than there is: waiting grows with the trace.
    for rate, prompt, limit_s, missed_s in (
        (30, 100, 0.05, None),
        (40, 100, 0.3, None),
        (16, 1000, 0.36, 0.3),
    ):
        requests = poisson(rate, 400, prompt, 200)
        found, one_size = (simulated(requests, prefill_bucket_limit=limit) for limit in (4, 1))
        name = f"{prompt} tokens at {rate}/s"
        figures[f"{name}: median TTFT, s"] = Figure(found["ttft_s"]["p50"], limit_s, missed_s)
        missed_gap_s = 0.025 if prompt == 1000 else None
        figures[f"{name}: p99 of gaps, s"] = Figure(found["gap_s"]["p99"], 0.028, missed_gap_s)
        figures[f"{name}: uncomputed share of KV"] = Figure(found["kv_uncomputed_share"], 0.1)
        if prompt == 100:
            padding = found["padding_share"] / one_size["padding_share"]
            figures[f"{name}: padding by that of one chunk size"] = Figure(padding, 0.5)
        if quick:
            break
    return figures


# ---- placement ----

Free = list[AttachedReplica]


def _by_load(_: Placer, request: Request, free: Free) -> Free:
    def load(replica: AttachedReplica) -> tuple[int, int]:
        scheduler = replica.scheduler
        return scheduler.num_running + scheduler.num_deferred, -scheduler.cached_tokens(request)

    return sorted(free, key=load)


def _by_prefix(_: Placer, request: Request, free: Free) -> Free:
    def hit(replica: AttachedReplica) -> tuple[int, int]:
        return -replica.scheduler.cached_tokens(request), replica.scheduler.num_running

    return sorted(free, key=hit)


def with_systems(requests: Sequence[SimulatedRequest], count: int) -> list[SimulatedRequest]:
    """Returns the requests, each with one of so many system prompts of 2,000 tokens and its own output."""
    dice = random.Random(7)
    return [
        replace(
            one,
            prompt_tokens=2000 + one.prompt_tokens,
            output_tokens=dice.randint(200, 400),
            prefix=[(f"system-{dice.randrange(count)}", 2000)],
        )
        for one in requests
    ]


def _bursts() -> list[SimulatedRequest]:
    """Returns requests of which 24 at a time arrive together."""
    crowd = [SimulatedRequest(index // 24 * 2.0, 100, 0) for index in range(240)]
    return with_systems(crowd, 3)


def _conversations() -> list[SimulatedRequest]:
    """Returns the turns of conversations, each of which contains the turns before it."""
    dice, turns = random.Random(1), []
    for begun in poisson(6, 100, 0, 0):
        pieces, at_s = [("system", 500)], begun.arrival_s
        for turn in range(dice.randint(1, 9)):
            pieces.append((f"{begun.arrival_s}/{turn}", dice.randint(50, 400)))
            size, output = sum(count for _, count in pieces), dice.randint(50, 250)
            turns.append(SimulatedRequest(at_s, size, output, tuple(pieces)))
            pieces.append((f"{begun.arrival_s}/{turn} answer", output))
            at_s += output * 0.01 + dice.expovariate(1 / 3)
    return turns


_PLACED: Final[dict[str, Callable[[], list[SimulatedRequest]]]] = {
    "one system prompt": lambda: with_systems(poisson(12, 250, 100, 0), 1),
    "eight": lambda: with_systems(poisson(12, 400, 100, 0), 8),
    "forty": lambda: with_systems(poisson(12, 600, 100, 0), 40),
    "busy": lambda: with_systems(poisson(24, 600, 100, 0), 3),
    "quiet": lambda: with_systems(poisson(3, 200, 100, 0), 1),
    "bursts": _bursts,
    "conversations": _conversations,
}


def placement(quick: bool) -> Figures:
    """On four replicas, latency is that of placement by load, and hits are those of placement by prefix."""
    figures = {}
    for name, trace in list(_PLACED.items())[: 1 if quick else None]:
        requests = trace()
        ours = simulated(requests, replicas=4)
        with _placed(_by_load):
            even = simulated(requests, replicas=4)
        with _placed(_by_prefix):
            affine = simulated(requests, replicas=4)
        latency = ours["latency_s"]["p50"] / even["latency_s"]["p50"]
        figures[f"{name}: latency by that of even load"] = Figure(latency, 1.05)
        missed = affine["prefix_hit_share"] - ours["prefix_hit_share"]
        figures[f"{name}: hits missed by affinity's"] = Figure(missed, 0.02)
    return figures


@contextmanager
def _placed(order: Callable[[Placer, Request, Free], Free]) -> Iterator[None]:
    with mock.patch.object(Placer, "by_cost", order):
        yield


SCENARIOS: Final[Sequence[Callable[[bool], Figures]]] = (
    flood, weights, full_queue, placement, long_prompts, small_chunks, places_held, places_swing, shared_blocks,
)  # fmt: skip
