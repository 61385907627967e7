"""Ranks that must have the same flags, packages and devices."""

import pytest

from protos.errors import ConfigurationRefused
from worker_svc.ranks.group import refuse_differences


def test_equal_facts_are_accepted() -> None:
    """Also if there are none."""
    refuse_differences([{"dtype": "bfloat16"}] * 3)
    refuse_differences([{}, {}])


@pytest.mark.parametrize(
    ("facts", "text"),
    [
        ([{"-O": "1"}, {"-O": "2"}], "rank 0 of the replica has -O 1 and rank 1 has 2;"),
        ([{"-O": "1"}, {"-O": "1"}, {"-O": "2"}, {"-O": "2"}],
         "ranks 0, 1 of the replica have -O 1 and ranks 2, 3 have 2;"),
        ([{"version of triton": "3"}, {}],
         "rank 0 of the replica has version of triton 3 and rank 1 has none;"),
        ([{"device": "H100"}, {"device": "H200"}], "rank 0 of the replica has device H100 and rank 1 has H200;"),
    ],
)  # fmt: skip
def test_a_difference_is_named(facts: list[dict[str, str]], text: str) -> None:
    """With the ranks that have each value."""
    with pytest.raises(ConfigurationRefused, match=text):
        refuse_differences(facts)
