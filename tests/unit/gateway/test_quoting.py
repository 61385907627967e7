"""Quotations of a client's input in errors."""

from typing import Any

import pytest

from gateway.schemas.base import quote


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({"a": [1, None, True], "b": "é"}, '{"a": [1, null, true], "b": "é"}'),
        ([], "[]"), ("x" * 58, '"' + "x" * 58 + '"'), ("x" * 59, '"' + "x" * 59 + "…"), (1.5, "1.5"),
        ([[]] * 100, ("[" + "[], " * 15)[:60] + "…"),
    ],
)  # fmt: skip
def test_a_quoted_value_is_json(value: Any, text: str) -> None:
    """A short value is quoted whole; a long one ends with an ellipsis."""
    assert quote(value) == text


class _Endless(list[int]):
    """Fails the test if more of it is read than a quotation needs."""

    def __iter__(self) -> Any:
        for _ in range(100):
            yield 1
        pytest.fail("the whole list was read")


def test_quoting_reads_only_what_it_shows() -> None:
    """A value of megabytes costs as little as a short one."""
    assert quote(_Endless([1])) == ("[" + "1, " * 30)[:60] + "…"
