"""Sends the requests of a workload and takes the time of each token that arrives."""

import asyncio
import random
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, nullcontext
from dataclasses import dataclass, field
from itertools import cycle
from math import ceil
from typing import Any, Final

import httpx

from deploy.client.answers import event_of
from deploy.client.connection import ClientError, Connection, error_text
from deploy.client.workloads import Prompt

# A request searches all connections of its client, so many requests need several clients.
_REQUESTS_PER_CLIENT: Final = 32


@dataclass
class Outcome:
    """The outcome of one request."""

    num_prompt_tokens: int
    started_s: float
    """By the monotonic clock, as the arrivals are."""
    arrivals_s: list[float] = field(default_factory=list)
    """When each chunk arrived."""
    num_output_tokens: int = 0
    error: str = ""
    """Why it failed, in one line."""

    @property
    def ttft_s(self) -> float:
        """The time to the first chunk."""
        return self.arrivals_s[0] - self.started_s

    @property
    def latency_s(self) -> float:
        """The time to the last chunk."""
        return self.arrivals_s[-1] - self.started_s


@dataclass(frozen=True)
class Pace:
    """When requests are sent."""

    request_rate: float
    """Requests per second, at random intervals (a Poisson process); infinite: all at once."""
    max_concurrency: int | None
    """Requests that run at the same time."""
    seed: int
    burstiness: float = 1.0
    """Shape of the intervals' gamma distribution; 1 is the Poisson process, less is burstier."""

    def interval_s(self, source: random.Random) -> float:
        """Returns the time to the next request."""
        if self.request_rate == float("inf"):
            return 0.0
        return source.gammavariate(self.burstiness, 1 / (self.request_rate * self.burstiness))


@dataclass(frozen=True)
class Target:
    """Where requests go, and in which form."""

    connection: Connection
    model: str
    """The name that requests use."""
    path: str
    chat: bool
    """Whether the path takes chats instead of completions."""
    extra: Mapping[str, Any]
    """Further fields of each request."""

    def body(self, prompt: Prompt) -> dict[str, Any]:
        """Returns a request."""
        if self.chat:
            asked = {
                "messages": [{"role": "user", "content": prompt.prompt}],
                "max_completion_tokens": prompt.max_tokens,
            }
        else:
            asked = {"prompt": prompt.prompt, "max_tokens": prompt.max_tokens}
        streamed = {"stream": True, "stream_options": {"include_usage": True}}
        return {"model": self.model, **asked, **streamed, **self.extra}


async def send_all(target: Target, prompts: Sequence[Prompt], pace: Pace) -> tuple[list[Outcome], float]:
    """Sends all requests and waits for their answers.

    Args:
        target: where to send them.
        prompts: what to send, in this order.
        pace: when.

    Returns:
        An outcome of each prompt, and the seconds from the first request to the last answer.
    """
    slots: AbstractAsyncContextManager[Any] = (
        nullcontext() if pace.max_concurrency is None else asyncio.Semaphore(pace.max_concurrency)
    )
    source = random.Random(pace.seed)  # noqa: S311 - no secrets
    at_once = min(len(prompts), pace.max_concurrency or len(prompts))
    async with AsyncExitStack() as stack:
        count = ceil(at_once / _REQUESTS_PER_CLIENT)
        clients = [await stack.enter_async_context(target.connection.async_client()) for _ in range(count)]
        started = due = time.perf_counter()

        async def send(prompt: Prompt, client: httpx.AsyncClient, at: float) -> Outcome:
            await asyncio.sleep(at - time.perf_counter())
            async with slots:
                return await _send(client, target, prompt)

        tasks = []
        async with asyncio.TaskGroup() as group:
            for prompt, client in zip(prompts, cycle(clients), strict=False):
                tasks.append(group.create_task(send(prompt, client, due)))
                due += pace.interval_s(source)
        return [task.result() for task in tasks], time.perf_counter() - started


async def _send(client: httpx.AsyncClient, target: Target, prompt: Prompt) -> Outcome:
    outcome = Outcome(prompt.num_tokens, time.perf_counter())
    try:
        async with client.stream("POST", target.path, json=target.body(prompt)) as response:
            if response.is_error:
                outcome.error = f"{response.status_code}: {error_text(await response.aread())}"
                return outcome
            async for line in response.aiter_lines():
                event = event_of(line) or {}
                if _has_tokens(event, first=not outcome.arrivals_s):
                    outcome.arrivals_s.append(time.perf_counter())
                if usage := event.get("usage"):
                    outcome.num_output_tokens = usage["completion_tokens"]
    except (httpx.HTTPError, ClientError) as error:
        outcome.error = str(error) or type(error).__name__
    if not outcome.arrivals_s and not outcome.error:
        outcome.error = "the answer had no tokens"
    return outcome


def _has_tokens(event: Mapping[str, Any], *, first: bool) -> bool:
    """Whether a chunk has tokens: the first chunk of a chat has the role alone, the last one an end alone."""
    for choice in event.get("choices") or ():
        delta = choice.get("delta")
        if delta is None or (first and choice.get("finish_reason")):
            return True
        if any(delta.get(name) for name in ("content", "reasoning", "reasoning_content", "tool_calls")):
            return True
    return False
