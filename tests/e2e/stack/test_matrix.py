"""Every parameter of an answer has the same answer for a request alone and for many at once."""

import asyncio
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.matrix.bursts import Matrix, bursts
from tests.support.matrix.cases import Case, kinds_of, make_cases, some_cases
from tests.support.matrix.clients import open_clients
from tests.support.matrix.serving import PROMPTS, SHORTER_PROMPTS, matrix_stack
from tests.support.stack import Stack

pytestmark = [pytest.mark.e2e, pytest.mark.stack, pytest.mark.timeout(300)]

LAYOUTS = {
    "one worker": (),
    "two workers": ("--workers", "2"),
    "two stages": ("--pipeline-parallel-size", "2"),
}
DEADLINE_S = 30.0


async def differing(
    matrix: Matrix, cases: Sequence[Case], counts: Sequence[int], *, most: int | None = None
) -> list[str]:
    """Sends bursts of each kind; returns a line for each difference."""
    problems = []
    for members in kinds_of(cases).values():
        for count in counts:
            for burst in itertools.islice(bursts(members, count), most):
                problems += await matrix.burst(burst)
    return problems


async def test_parameters_have_the_same_answers_at_once(stack: Stack) -> None:
    """Bursts of 17 of each kind, and of all kinds mixed, get the answers of requests alone."""
    cases = some_cases(SHORTER_PROMPTS)
    async with open_clients(stack.base_url, stack.open_channel()) as clients:
        matrix = Matrix(clients)
        assert await matrix.learn(cases) == []
        assert await differing(matrix, cases, (17,), most=1) == []
        assert await matrix.burst(cases[:: len(cases) // 17]) == []


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_layouts_have_the_same_answers_at_once(smollm2: Path, tmp_path: Path) -> None:
    """One worker, two workers and two stages give the same answers to 1, 2 and 17 requests at once."""
    cases, some = make_cases(PROMPTS), some_cases(PROMPTS)
    matrix: Matrix | None = None
    problems = []
    for layout, flags in LAYOUTS.items():
        with matrix_stack(smollm2, tmp_path / layout.replace(" ", "-"), *flags) as stack:
            async with open_clients(stack.base_url, stack.open_channel()) as clients:
                found = []
                if matrix is None:
                    matrix = Matrix(clients)
                    found = await matrix.learn(cases) + await differing(matrix, cases, (17,))
                matrix.clients = clients
                found += await differing(matrix, some, (2, 17), most=1)
                found += await matrix.burst(some)
                problems += [f"{layout}, {problem}" for problem in found]
    assert problems == []


async def completions(stack: Stack, *bodies: dict[str, Any]) -> list[str]:
    """Sends all bodies to /v1/completions at once; returns the texts of the answers."""
    async with (
        httpx.AsyncClient(base_url=stack.base_url, timeout=DEADLINE_S) as client,
        asyncio.timeout(DEADLINE_S),
    ):
        responses = await asyncio.gather(*(client.post("/v1/completions", json=body) for body in bodies))
    return [response.raise_for_status().json()["choices"][0]["text"] for response in responses]


async def test_two_requests_at_once_report_log_probabilities(stack: Stack) -> None:
    """Log-probabilities of two requests at once do not delay one another."""
    body = {"prompt": "The river is", "max_tokens": 4, "temperature": 0, "logprobs": 0}
    (alone,) = await completions(stack, body)
    assert await completions(stack, body, body) == [alone, alone]


async def test_a_request_without_log_probabilities_beside_one_with(stack: Stack) -> None:
    """A short request is answered during a long answer with log-probabilities, and so is that answer."""
    long = {"prompt": "a b c " * 66, "temperature": 0, "logprobs": 1, "max_tokens": 50}
    short = {"prompt": "Hi there", "temperature": 0, "max_tokens": 2}
    alone = [*await completions(stack, long), *await completions(stack, short)]
    assert await completions(stack, long, short) == alone
