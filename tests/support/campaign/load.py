"""Many clients at a time, whose answers must equal those of an undisturbed run."""

import asyncio
import itertools
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Final, TypeAlias

from tests.support.campaign.questions import Question
from tests.support.campaign.streams import Answer, Pause, Stream, StreamError

Ask: TypeAlias = Callable[[Stream], Awaitable[None]]

_SHOWN: Final = 8


class Load:
    """Asks questions; counts tokens, answers and failures."""

    def __init__(self, ask: Ask) -> None:
        """Starts without clients; `ask` receives the answer of one."""
        self._ask = ask
        self._numbers = itertools.count()
        self.running: set[Stream] = set()
        self.tokens = 0
        """Tokens received."""
        self.answered = 0
        """Requests whose answers were right."""
        self.failures: list[str] = []
        """What went wrong with the others."""
        self.expected: dict[Question, Answer] = {}
        """The questions, and their answers without faults; filled by `learn`."""
        self.unsteady: list[str] = []
        """Questions that `learn` dropped: their answers differ without any fault."""
        self.left = 0
        """Requests whose clients went away."""
        self.poisoned = 0
        """Requests that failed and had to."""
        self._pause: Pause | None = None
        self._waiters: list[tuple[int, asyncio.Event]] = []

    async def learn(self, questions: Sequence[Question]) -> None:
        """Asks each question twice, in different company, and keeps those that have one answer.

        Raises:
            StreamError: a request failed.
        """
        together = await self._answers(questions)
        half = len(questions) // 2
        apart = {**await self._answers(questions[half:]), **await self._answers(questions[:half])}
        self.expected = {
            question: answer for question, answer in together.items() if answer == apart[question]
        }
        self.unsteady = [
            f"{question.name}: {_difference(apart[question], answer)}"
            for question, answer in together.items()
            if question not in self.expected
        ]

    async def _answers(self, questions: Sequence[Question]) -> dict[Question, Answer]:
        streams = [self._stream(question) for question in questions]
        await asyncio.gather(*(stream.run(self._ask) for stream in streams))
        return {stream.question: stream.answer for stream in streams}

    @asynccontextmanager
    async def clients(self, width: int, dice: random.Random, *, leave: float = 0.0) -> AsyncIterator[None]:
        """Keeps `width` requests running within the block, then lets them end."""
        stop = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            for _ in range(width):
                group.create_task(self._client(dice, stop, leave))
            try:
                yield
            finally:
                stop.set()

    async def received(self, count: int) -> None:
        """Waits until all clients together have received `count` more tokens."""
        event = asyncio.Event()
        self._waiters.append((self.tokens + count, event))
        await event.wait()

    def pause(self) -> Pause:
        """Begins to measure how long streams wait, those included that begin before the fault has passed."""
        self._pause = Pause()
        for stream in self.running:
            self._pause.watch(stream)
        return self._pause

    async def _client(self, dice: random.Random, stop: asyncio.Event, leave: float) -> None:
        questions = list(self.expected)
        while not stop.is_set():
            question = dice.choice(questions)
            if dice.random() < leave:
                await self._ask_and_leave(question, dice.randrange(question.max_tokens))
            else:
                await self.ask(question)

    async def _ask_and_leave(self, question: Question, after: int) -> None:
        """Goes away after some tokens, or at the end of the answer if that comes first."""
        enough = asyncio.Event()
        stream = Stream(
            question, next(self._numbers), lambda _: enough.set() if stream.tokens > after else None
        )
        asking = asyncio.create_task(stream.run(self._ask))
        leaving = asyncio.create_task(enough.wait())
        await asyncio.wait((asking, leaving), return_when=asyncio.FIRST_COMPLETED)
        asking.cancel()
        leaving.cancel()
        (failure, _) = await asyncio.gather(asking, leaving, return_exceptions=True)
        if isinstance(failure, StreamError):
            self._fail(stream, str(failure))
        self.left += 1

    async def ask(self, question: Question) -> None:
        """Asks a question and judges the answer."""
        stream = self._stream(question)
        self.running.add(stream)
        if self._pause is not None:
            self._pause.watch(stream)
        try:
            await stream.run(self._ask)
        except StreamError as failure:
            self._fail(stream, str(failure))
        else:
            if stream.answer == self.expected[question]:
                self.answered += 1
            else:
                self._fail(stream, _difference(stream.answer, self.expected[question]))
        finally:
            self.running.discard(stream)

    async def ask_poison(self, question: Question) -> None:
        """Asks what must fail because it kills workers."""
        stream = self._stream(question)
        try:
            await stream.run(self._ask)
        except StreamError as failure:
            if "workers were lost" in str(failure):
                self.poisoned += 1
            else:
                self._fail(stream, str(failure))
        else:
            self._fail(stream, "poison was answered")

    def _stream(self, question: Question) -> Stream:
        return Stream(question, next(self._numbers), self._count)

    def _count(self, tokens: int) -> None:
        self.tokens += tokens
        for waiter in tuple(self._waiters):
            at, event = waiter
            if self.tokens >= at:
                self._waiters.remove(waiter)
                event.set()

    def _fail(self, stream: Stream, why: str) -> None:
        question = stream.question
        self.failures.append(
            f"{question.name} by {question.way}, attempt {stream.attempts}, {stream.tokens} tokens: {why}"
        )


def _difference(answer: Answer, expected: Answer) -> str:
    for index, ((units, reason), (wanted, why)) in enumerate(zip(answer, expected, strict=True)):
        if (units, reason) != (wanted, why):
            place = next(
                (
                    place
                    for place, (one, other) in enumerate(zip(units, wanted, strict=False))
                    if one != other
                ),
                min(len(units), len(wanted)),
            )
            return (
                f"sequence {index} has {len(units)} tokens and ends as {reason}, not {len(wanted)} and {why};"
                f" from {place} on: {units[place : place + _SHOWN]}, not {wanted[place : place + _SHOWN]}"
            )
    raise AssertionError("the answers are equal")
