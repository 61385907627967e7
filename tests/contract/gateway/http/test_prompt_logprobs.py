"""Log-probabilities of prompts: they arrive in parts, and long ones are encoded in a thread."""

import threading
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
import pytest_asyncio

from gateway.generation.logprobs import Reporter, TokenReport
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
    response = await stack.http.post(PATH, json=body)
    assert response.status_code == 200, response.text
    found: list[dict[str, Any]] = response.json()["choices"]
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
    threads: dict[str, list[str]] = {"report": [], "prompt": [], "completion": []}
    report, prompt, completion = Prompt.report, Reporter.prompt, Reporter.completion

    def noted(name: str) -> None:
        threads[name].append(threading.current_thread().name)

    def noted_report(self: Prompt, *args: Any) -> None:
        noted("report")
        report(self, *args)

    def noted_prompt(self: Reporter, *args: Any) -> Any:
        noted("prompt")
        return prompt(self, *args)

    def noted_completion(self: Reporter, tokens: Sequence[TokenReport]) -> Any:
        if len(tokens) > 100:
            noted("completion")
        return completion(self, tokens)

    monkeypatch.setattr(Prompt, "report", noted_report)
    monkeypatch.setattr(Reporter, "prompt", noted_prompt)
    monkeypatch.setattr(Reporter, "completion", noted_completion)
    long = {"prompt": list(range(100, 500)), "max_tokens": 2, "n": 2, "logprobs": 5}
    found = await choices(stack, {**long, "prompt_logprobs": 5, "echo": True})
    assert [len(choice["prompt_logprobs"]) for choice in found] == [400, 400]
    await stack.stream(PATH, {**long, "echo": True})
    assert len(threads["report"]) == 2
    assert len(threads["prompt"]) == 1
    assert len(threads["completion"]) == 4
    names = [name for noted in threads.values() for name in noted]
    assert all(name.startswith("text") for name in names)
