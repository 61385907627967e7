"""Sends the requests of a workload and takes the time of each token that arrives."""

import asyncio
import random
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, nullcontext
from dataclasses import dataclass, field
from itertools import accumulate, cycle
from math import ceil
from typing import Any, Final

import httpx

from deploy.client.answers import event_of
from deploy.client.connection import ClientError, Connection, error_text
from deploy.client.workloads import Prompt

# A request searches all connections of its client, so many requests need several clients.
_REQUESTS_PER_CLIENT: Final = 32
# From this burstiness on, intervals differ by less than a millionth.
_EVEN: Final = 1e12


@dataclass
class Outcome:
    """The outcome of one request."""

    num_prompt_tokens: int
    """By the server's count, if it gives one."""
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
    """Requests per second, at random intervals; infinite: all at once."""
    max_concurrency: int | None
    """Requests that run at the same time."""
    seed: int = 0
    burstiness: float = 1.0
    """Shape of the intervals' gamma distribution: 1 is a Poisson process, less burstier, infinite even."""

    def schedule_s(self, count: int) -> list[float]:
        """Returns when to send each request, in seconds from the start.

        As in vLLM, the intervals are scaled so that the last request leaves at `count / request_rate`.
        """
        source = random.Random(self.seed)  # noqa: S311 - no secrets
        shape = self.burstiness
        gaps = [1.0 if shape >= _EVEN else source.gammavariate(shape, 1.0) for _ in range(count)]
        total = sum(gaps)
        whole_s = count / self.request_rate
        return [moment / total * whole_s if total else 0.0 for moment in accumulate(gaps)]


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
    at_once = min(len(prompts), pace.max_concurrency or len(prompts))
    async with AsyncExitStack() as stack:
        count = ceil(at_once / _REQUESTS_PER_CLIENT)
        clients = [await stack.enter_async_context(target.connection.async_client()) for _ in range(count)]
        started = time.perf_counter()

        async def send(prompt: Prompt, client: httpx.AsyncClient, at: float) -> Outcome:
            await asyncio.sleep(at - time.perf_counter())
            async with slots:
                return await _send(client, target, prompt)

        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(send(prompt, client, started + delay))
                for prompt, client, delay in zip(
                    prompts, cycle(clients), pace.schedule_s(len(prompts)), strict=False
                )
            ]
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
                    outcome.num_output_tokens = usage.get("completion_tokens") or 0
                    outcome.num_prompt_tokens = usage.get("prompt_tokens") or outcome.num_prompt_tokens
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
