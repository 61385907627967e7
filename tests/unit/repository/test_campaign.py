"""The links and checks that the fault campaign relies on."""

import asyncio

import pytest

from tests.support.campaign.load import Load
from tests.support.campaign.processes.inspection import leaks
from tests.support.campaign.questions import Question
from tests.support.campaign.streams import Scored, Stream

IDLE = {"tasks": 5, "futures": 9, "rss_mib": 100.0, "live": 0, "blocks": 0, "integrity": ""}


@pytest.mark.parametrize(
    ("held", "found"),
    [
        ({}, 0),
        ({"tasks": 13}, 0),
        ({"tasks": 14}, 1),
        ({"futures": 50}, 1),
        ({"rss_mib": 174.0}, 1),
        ({"live": 1, "blocks": 2}, 2),
        ({"integrity": "block 3 is lost"}, 1),
    ],
)
def test_what_an_idle_service_holds_is_a_leak(held: dict[str, object], found: int) -> None:
    """A few tasks and futures may remain; no request, no block and no broken pool."""
    assert len(leaks({"s": IDLE}, {"s": {**IDLE, **held}})) == found


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        ([1, 2, 3], ""),
        ([1, 2], "2 tokens"),
        ([1, 2, 2, 3], "from 2 on: (2, 3), not (3,)"),
        ([1, 5, 3], "from 1 on: (5, 3), not (2, 3)"),
    ],
)
async def test_a_wrong_answer_is_a_failure(answer: list[int], why: str) -> None:
    async def ask(stream: Stream) -> None:
        stream.add(0, answer)
        stream.end(0, "length")

    load, question = Load(ask), Question("q", "grpc", "greedy", (1,), 3)
    load.expected[question] = (((1, 2, 3), "length"),)
    await load.ask(question)
    assert load.answered == (not why)
    assert why in "".join(load.failures)


@pytest.mark.parametrize(
    ("scored", "right"),
    [
        (Scored(2, (-0.5, -0.25)), True),
        (Scored(2, (-0.5001, -0.25)), True),
        (Scored(2, (-0.6, -0.25)), False),
        (Scored(2, (-0.5,)), False),
        (Scored(3, (-0.5, -0.25)), False),
        (2, False),
    ],
)
async def test_wrong_log_probabilities_are_a_failure(scored: Scored | int, right: bool) -> None:
    """They may be rounded otherwise, but not be those of another token, differ or be missing."""

    async def ask(stream: Stream) -> None:
        stream.add(0, [Scored(1, (-0.1, -0.1)), scored])
        stream.end(0, "length")

    load, question = Load(ask), Question("q", "grpc", "logprobs", (1,), 2)
    load.expected[question] = (((Scored(1, (-0.1, -0.1)), Scored(2, (-0.5, -0.25))), "length"),)
    await load.ask(question)
    assert load.answered == right
    assert bool(load.failures) != right


async def test_a_second_attempt_must_repeat_the_first() -> None:
    """An answer that begins again gives the tokens that the client has, and then new ones."""
    second = [1, 2, 3]

    async def ask(stream: Stream) -> None:
        stream.add(0, [1, 2])
        stream.begin_again()
        stream.add(0, second)
        stream.end(0, "length")

    load, question = Load(ask), Question("q", "http", "greedy", (1,), 3)
    load.expected[question] = (((1, 2, 3), "length"),)
    await load.ask(question)
    assert (load.answered, load.tokens) == (1, 3)
    second[1] = 7
    await load.ask(question)
    assert "differs from an earlier attempt" in load.failures[0]


async def test_a_pause_ends_when_the_streams_have_recovered() -> None:
    """Tokens that were under way before the fault do not end it."""
    waits = asyncio.Event()

    async def ask(stream: Stream) -> None:
        stream.add(0, [1])
        await waits.wait()
        stream.add(0, range(2, 40))
        stream.end(0, "length")

    load, question = Load(ask), Question("q", "grpc", "greedy", (1,), 39)
    load.expected[question] = ((tuple(range(1, 40)), "length"),)
    asking = asyncio.create_task(load.ask(question))
    await load.received(1)
    pause = load.pause()
    recovered = asyncio.create_task(pause.recovered())
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(asyncio.shield(recovered), 0.05)
    waits.set()
    await recovered
    await asking
    assert pause.longest_s >= 0.05
