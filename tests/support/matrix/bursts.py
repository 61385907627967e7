"""Many requests at the same moment, whose answers must equal those of the same requests alone."""

import asyncio
import itertools
from collections.abc import Iterator, Sequence

from tests.support.matrix.answers import Answer, differences
from tests.support.matrix.cases import Case
from tests.support.matrix.clients import Clients

ALONE_S = 30.0
"""The deadline of a request alone."""
BURST_S = 60.0
"""The deadline of a burst."""


class Matrix:
    """Learns the answer of each case alone, and compares answers among others with it."""

    def __init__(self, clients: Clients) -> None:
        """Starts without answers."""
        self.clients = clients
        """Another stack's, to compare its answers with those of the stack that was asked first."""
        self._alone: dict[str, Answer] = {}
        self._salts = itertools.count()

    async def learn(self, cases: Sequence[Case], deadline_s: float = ALONE_S) -> list[str]:
        """Asks the cases one after the other; returns a line for each that has no answer."""
        problems = []
        for case in cases:
            try:
                async with asyncio.timeout(deadline_s):
                    self._alone[case.name] = await self.clients.ask(case)
            except (TimeoutError, ValueError) as error:
                problems.append(f"{case.name}, alone: {_reason(error, deadline_s)}")
        return problems

    async def burst(self, cases: Sequence[Case], deadline_s: float = BURST_S) -> list[str]:
        """Asks the cases at the same moment; returns a line for each without its answer.

        Every other one has a prefix cache of its own, so that it computes its prompt.
        """
        start = asyncio.Barrier(len(cases))
        mixed = [
            case.salted(f"{next(self._salts)}") if index % 2 else case for index, case in enumerate(cases)
        ]
        return [
            f"{case.name}, one of {len(cases)}: {problem}"
            for case, problem in zip(
                cases,
                await asyncio.gather(*(self._one(case, start, deadline_s) for case in mixed)),
                strict=True,
            )
            if problem
        ]

    async def _one(self, case: Case, start: asyncio.Barrier, deadline_s: float) -> str:
        await start.wait()
        return await self.ask(case, deadline_s)

    async def ask(self, case: Case, deadline_s: float = BURST_S) -> str:
        """Asks a case now; returns the first difference from its answer alone, or an empty text."""
        try:
            async with asyncio.timeout(deadline_s):
                answer = await self.clients.ask(case)
        except (TimeoutError, ValueError) as error:
            return _reason(error, deadline_s)
        if not case.compared:
            return ""
        return next(differences(answer, self._alone.get(case.name)), "")


def bursts(cases: Sequence[Case], count: int) -> Iterator[list[Case]]:
    """Yields bursts of `count` requests in which every case appears."""
    endless = itertools.cycle(cases)
    for _ in range(-(-len(cases) // count)):
        yield list(itertools.islice(endless, count))


def _reason(error: Exception, deadline_s: float) -> str:
    return f"no answer within {deadline_s:g} s" if isinstance(error, TimeoutError) else str(error)
