"""Log-probabilities of prompts: they arrive in parts, and long ones are encoded in a thread."""

import threading
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from gateway.generation.logprobs import Reporter
from gateway.generation.sequence_text import Prompt
from tests.support.gateway.serving import Stack, running_stack

pytestmark = [pytest.mark.contract, pytest.mark.asyncio(loop_scope="module")]

PATH = "/v1/completions"
SCORED: dict[str, Any] = {"prompt": "The capital of France", "max_tokens": 3, "n": 2}
ECHOED = {**SCORED, "echo": True, "logprobs": 2}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running() -> AsyncIterator[Stack]:
    async with running_stack("Paris is the capital of France.") as stack:
        yield stack


async def choices(stack: Stack, body: dict[str, Any]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = (await stack.post(PATH, **body))["choices"]
    return found


async def streamed(stack: Stack, body: dict[str, Any]) -> list[tuple[str, list[str]]]:
    """Returns each choice's text and reported tokens."""
    found: list[tuple[str, list[str]]] = [("", []), ("", [])]
    for event in (await stack.stream(PATH, body))[:-1]:
        (choice,) = event["choices"]
        text, tokens = found[choice["index"]]
        reported = choice["logprobs"]["tokens"] if choice["logprobs"] else []
        found[choice["index"]] = (text + choice["text"], tokens + reported)
    return found


@pytest.mark.parametrize("others_first", [False, True])
@pytest.mark.parametrize("break_in_prompt", [False, True])
@pytest.mark.parametrize("size", [1, 2])
async def test_parts_add_up(stack: Stack, size: int, break_in_prompt: bool, others_first: bool) -> None:
    """The answer is the same however the prompt's log-probabilities arrive.

    They may need several events, start again after a broken stream, and arrive after another sequence's
    tokens.
    """
    scored = {**SCORED, "prompt_logprobs": 1}
    whole = [await choices(stack, scored), await choices(stack, ECHOED)]
    stream = await streamed(stack, ECHOED)
    stack.scheduler.prompt_logprobs_per_event, stack.scheduler.others_first = size, others_first
    for body, expected in zip((scored, ECHOED), whole, strict=True):
        stack.scheduler.break_in_prompt = break_in_prompt
        assert await choices(stack, body) == expected
    stack.scheduler.break_in_prompt = break_in_prompt
    assert await streamed(stack, ECHOED) == stream
    assert stream == [(choice["text"], choice["logprobs"]["tokens"]) for choice in whole[1]]


async def test_long_prompts_are_encoded_in_a_thread(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    """Long prompts take seconds, in which other streams continue.

    The reports of an echo are made once per prompt.
    """
    calls: list[tuple[str, str]] = []

    def note(kind: type, name: str) -> None:
        function = getattr(kind, name)

        def noted(self: Any, *args: Any) -> Any:
            if name != "completion" or len(args[0]) > 100:
                calls.append((name, threading.current_thread().name))
            return function(self, *args)

        monkeypatch.setattr(kind, name, noted)

    note(Prompt, "report")
    note(Reporter, "prompt")
    note(Reporter, "completion")
    long = {"prompt": list(range(100, 500)), "max_tokens": 2, "n": 2, "logprobs": 5}
    found = await choices(stack, {**long, "prompt_logprobs": 5, "echo": True})
    assert [len(choice["prompt_logprobs"]) for choice in found] == [400, 400]
    await stack.stream(PATH, {**long, "echo": True})
    assert Counter(name for name, _ in calls) == {"report": 2, "prompt": 1, "completion": 4}
    assert all(thread.startswith("text") for _, thread in calls)
