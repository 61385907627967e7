"""Bodies may have fields that have no effect; errors quote a client's input in part."""

import json
from typing import Annotated, Any, ClassVar

import pytest
from pydantic import AliasChoices, BeforeValidator, Field, ValidationInfo

from gateway.schemas.base import IgnoredFields, RequestModel, Unserved, ignore, parse, quote
from protos.errors import InvalidArgument, Unsupported


def _part(value: Any, info: ValidationInfo) -> Any:
    if value.pop("hint", None):
        ignore(info, "hint")
    return value


class Inner(RequestModel):
    size: int = 0


class Outer(RequestModel):
    unserved: ClassVar = {"best": Unserved((1,))}

    name: Annotated[str, Field(alias="called")] = ""
    other: Annotated[str, Field(validation_alias=AliasChoices("other", "another"))] = ""
    inner: list[Inner] = Field(default_factory=list)
    part: Annotated[dict[str, Any], BeforeValidator(_part)] = Field(default_factory=dict)


def body(**fields: Any) -> bytes:
    return json.dumps(fields).encode()


def test_fields_without_effect_are_dropped_and_named() -> None:
    ignored = IgnoredFields()
    parsed = parse(
        Outer,
        body(
            called="x",
            another="y",
            metadata={"a": 1},
            unheard_of=[1],
            best=1,
            inner=[{"size": 1, "colour": 2}, {"colour": 3}],
            part={"hint": True},
        ),
        ignored,
    )
    assert (parsed.name, parsed.other, parsed.inner[0].size) == ("x", "y", 1)
    assert ignored.names == ["metadata", "unheard_of", "inner.colour", "part.hint"]


def test_null_is_not_named() -> None:
    ignored = IgnoredFields()
    parse(Outer, body(metadata=None, best=None), ignored)
    assert ignored.names == []


def test_names_are_bounded() -> None:
    """A body with many long names fills no log."""
    ignored = IgnoredFields()
    parse(Outer, body(**{f"{number}{'x' * 100}": 1 for number in range(200)}), ignored)
    assert len(ignored.names) == 32
    assert max(map(len, ignored.names)) < 70


def test_fields_that_would_change_the_output_are_refused() -> None:
    with pytest.raises(Unsupported, match=r"^best=2 is not supported"):
        parse(Outer, body(best=2))


class _Endless(list[int]):
    """Fails the test if more of it is read than a quotation needs."""

    def __iter__(self) -> Any:
        for _ in range(100):
            yield 1
        pytest.fail("the whole list was read")


def test_quoting_reads_only_what_it_shows() -> None:
    assert quote(_Endless([1])) == ("[" + "1, " * 30)[:60] + "…"


@pytest.mark.parametrize(
    ("fields", "param", "kind"),
    [
        ({"called": "x", "inner": [{"size": 1}] * 100_001}, "inner", "lists and objects"),
        ({"part": {"a": [[]] * 100_001}, "called": "x"}, "part", "lists and objects"),
        ({"other": "x", "part": {str(n): 1 for n in range(100_001)}}, "part", "texts"),
        ({"unheard_of": [1] * 500_002, "inner": []}, "unheard_of", "values"),
    ],
)
def test_items_are_counted_before_they_are_read(fields: dict[str, Any], param: str, kind: str) -> None:
    with pytest.raises(InvalidArgument, match=rf"more than \d+ {kind}, most of them in '{param}'") as refusal:
        parse(Outer, body(**fields))
    assert refusal.value.param == param
