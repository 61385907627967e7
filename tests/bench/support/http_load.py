"""Streamed completions, spread over client processes so that no client is the limit."""

import asyncio
import itertools
import math
import multiprocessing
import random
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing.sharedctypes import Synchronized
from multiprocessing.synchronize import Event, Semaphore
from typing import Any, Final

import httpx

_TIMEOUT_S: Final = 120.0
# Ids below are special tokens.
_FIRST_TOKEN: Final = 100
_seeds = itertools.count()


@dataclass(frozen=True)
class Load:
    """What every stream requests."""

    url: str
    """The gateway's."""
    model: str
    """The served name."""
    vocab_size: int
    """Prompts are random token ids below this. They differ between calls, so that no prefix is found."""
    prompt_tokens: int
    """Tokens of a prompt."""
    output_tokens: int
    """Tokens of an answer."""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of the body."""


@dataclass(frozen=True)
class Arrivals:
    """One answer, whole or cut at the load's end."""

    at: tuple[float, ...]
    """Times of its chunks, by `time.monotonic`, seconds."""
    tokens_per_chunk: float
    """Its tokens by its chunks."""

    def tokens_between(self, begin: float, end: float) -> float:
        """Returns the tokens that arrived in `[begin, end)`."""
        return self.tokens_per_chunk * sum(begin <= at < end for at in self.at)


def tokens_per_second(
    load: Load,
    streams: int,
    warm_up_s: float,
    seconds: float,
    clients: int,
    on_start: Callable[[float], None] = lambda _: None,
) -> float:
    """Returns the output tokens per second of a closed loop, counted after its warm-up.

    Args:
        load: what is requested.
        streams: requests that run at a time.
        warm_up_s: seconds in which streams start, one after the other, and spread out.
        seconds: seconds in which tokens count.
        clients: processes that share the streams.
        on_start: gets the time at which the warm-up begins, by `time.monotonic`.
    """
    schedule = _Schedule(warm_up_s / 2, warm_up_s + seconds)
    start, arrivals = _run(load, streams, clients, schedule, on_start)
    begin = start + warm_up_s
    return sum(each.tokens_between(begin, begin + seconds) for each in arrivals) / seconds


def step_seconds(load: Load, streams: int, clients: int) -> float:
    """Returns the seconds in which every stream gets a token, while all of them run.

    Each stream requests one completion, all at once; their answers must be long enough to overlap.
    """
    _, arrivals = _run(load, streams, clients, _Schedule())
    begin, end = max(each.at[0] for each in arrivals), min(each.at[-1] for each in arrivals)
    if end <= begin:
        raise RuntimeError(
            f"of {streams} answers, one ended {begin - end:.3f} s before the last one began; raise output_tokens"
        )
    return (end - begin) * streams / sum(each.tokens_between(begin, end) for each in arrivals)


@dataclass(frozen=True)
class _Schedule:
    """When streams run, seconds after the common start."""

    spread_s: float = 0.0
    """The time over which the streams' starts are spread."""
    end_s: float | None = None
    """When streams leave their answers, having requested one after the other; None: each requests one."""


@dataclass(frozen=True)
class _Start:
    """The common start of the client processes, each of which imports for seconds first."""

    ready: Semaphore
    """Released by each client that can start."""
    begun: Event
    """Set once `at` is known."""
    at: "Synchronized[float]"
    """The start, by `time.monotonic`."""


_start: _Start
"""In a client process: the start of its load."""


def _set_start(start: _Start) -> None:
    global _start  # noqa: PLW0603 - a synchronization primitive reaches a process only when it begins
    _start = start


def _run(
    load: Load,
    streams: int,
    clients: int,
    schedule: _Schedule,
    on_start: Callable[[float], None] = lambda _: None,
) -> tuple[float, list[Arrivals]]:
    """Runs the streams in client processes; returns the time of their start, and all answers.

    Raises:
        RuntimeError: a client process does not start.
    """
    spawn = multiprocessing.get_context("spawn")
    start = _Start(spawn.Semaphore(0), spawn.Event(), spawn.Value("d"))
    shares = [list(range(streams))[client::clients] for client in range(min(clients, streams))]
    with ProcessPoolExecutor(len(shares), spawn, initializer=_set_start, initargs=(start,)) as pool:
        seed = str(next(_seeds))
        jobs = [pool.submit(_client, load, share, streams, schedule, seed) for share in shares]
        try:
            all_ready = all(start.ready.acquire(timeout=_TIMEOUT_S) for _ in shares)
        finally:
            start.at.value = time.monotonic()
            start.begun.set()  # in any case, because the pool waits for the clients that are ready
        if not all_ready:
            broken = (job.exception() for job in jobs)
            cause = next((error for error in broken if error is not None), None)
            raise RuntimeError("a client process does not start") from cause
        on_start(start.at.value)
        return start.at.value, [each for job in jobs for each in job.result()]


def _client(load: Load, share: Sequence[int], streams: int, schedule: _Schedule, seed: str) -> list[Arrivals]:
    """Runs a client process's share of the streams."""

    async def run() -> list[Arrivals]:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        async with httpx.AsyncClient(base_url=load.url, timeout=_TIMEOUT_S, limits=limits) as client:
            _start.ready.release()
            _start.begun.wait()
            begin = _start.at.value
            end = None if schedule.end_s is None else begin + schedule.end_s
            starts = {index: begin + schedule.spread_s * index / streams for index in share}
            answers = await asyncio.gather(
                *(
                    _stream(client, load, random.Random(f"{seed}-{index}"), start, end)
                    for index, start in starts.items()
                )
            )
        return [answer for each in answers for answer in each]

    return asyncio.run(run())


async def _stream(
    client: httpx.AsyncClient, load: Load, dice: random.Random, start: float, end: float | None
) -> list[Arrivals]:
    """Requests one completion, or one after the other until `end`, and leaves the last one then."""
    await asyncio.sleep(max(0.0, start - time.monotonic()))
    if end is None:
        return [await _answer(client, load, dice, math.inf)]
    answers = []
    while time.monotonic() < end:
        answers.append(await _answer(client, load, dice, end))
    return answers


async def _answer(client: httpx.AsyncClient, load: Load, dice: random.Random, end: float) -> Arrivals:
    """Requests a completion and reads it until `end`.

    Raises:
        RuntimeError: the answer is an error, or breaks off.
    """
    body = {
        "model": load.model,
        "prompt": [dice.randrange(_FIRST_TOKEN, load.vocab_size) for _ in range(load.prompt_tokens)],
        "max_tokens": load.output_tokens, "temperature": 0, "ignore_eos": True, "stream": True,
        **load.parameters,
    }  # fmt: skip
    times: list[float] = []
    whole, line = False, ""
    async with client.stream("POST", "/v1/completions", json=body) as response:
        if response.is_error:
            raise RuntimeError(f"{response.status_code}: {(await response.aread()).decode()}")
        async for line in response.aiter_lines():
            now = time.monotonic()
            if now >= end:
                break
            if line == "data: [DONE]":
                whole = True
            elif line.startswith('data: {"error"'):
                raise RuntimeError(line)
            elif line.startswith("data: "):
                times.append(now)
        else:
            if not whole or not times:
                raise RuntimeError(f"an answer broke off after {len(times)} chunks; its last line: {line!r}")
    # A gateway may send several tokens in a chunk when it falls behind.
    return Arrivals(tuple(times), load.output_tokens / len(times) if whole else 1.0)
