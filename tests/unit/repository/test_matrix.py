"""The checks that the matrix of parameters relies on."""

import asyncio
from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest

from tests.support.matrix.answers import differences
from tests.support.matrix.bursts import Matrix, bursts
from tests.support.matrix.cases import Case, make_cases, some_cases
from tests.support.matrix.clients import Clients


class FakeClients(Clients):
    """Answers with the prompt; never answers the prompt "hang"."""

    def __init__(self) -> None:
        """Needs no connection."""

    async def ask(self, case: Case) -> Mapping[str, str]:
        if case.prompt == "hang" and "cache_salt" in case.fields:
            await asyncio.Event().wait()
        return {"text": case.prompt + case.fields.get("cache_salt", "")}


async def test_a_burst_names_cases_without_their_answers() -> None:
    """A missing answer, a different one, and none for an equal one."""
    cases = [Case(name, "kind", "chat", name) for name in ("same", "hang", "other", "changed")]
    matrix = Matrix(FakeClients())
    assert await matrix.learn(cases) == []
    assert await matrix.burst(cases, deadline_s=0.05) == [
        "hang, one of 4: no answer within 0.05 s",
        "changed, one of 4: answer.text is 'changed1', alone 'changed'",
    ]


@pytest.mark.parametrize(
    ("actual", "found"),
    [
        ({"a": [1, {"b": -0.5}]}, 0),
        ({"a": [1, {"b": -0.50001}]}, 0),
        ({"a": [1, {"b": -0.6}]}, 1),
        ({"a": [2, {"b": -0.6}]}, 2),
        ({"a": [1]}, 1),
        ({"a": [1, {"c": -0.5}]}, 1),
    ],
)
def test_differences_are_found_at_any_depth(actual: Any, found: int) -> None:
    """Rounded log-probabilities are equal; all else must be."""
    assert len(list(differences(actual, {"a": [1, {"b": -0.5}]}))) == found


def test_all_cases_have_names_of_their_own_and_all_protocols_a_share() -> None:
    """The quick choice has each parameter once; bursts leave no case out."""
    cases, some = make_cases(["a", "b", "c"]), some_cases(["a", "b", "c"])
    assert len({case.name for case in cases}) == len(cases) > 150
    assert {(case.name, case.prompt) for case in some} <= {(case.name, case.prompt) for case in cases}
    assert min(Counter(case.protocol for case in some).values()) >= 5
    assert {case.name for burst in bursts(some, 17) for case in burst} == {case.name for case in some}
    assert {len(burst) for burst in bursts(some, 17)} == {17}
