"""``cache_control`` marks: which prefixes of a prompt later requests share, and for how long."""

from collections.abc import Iterator
from typing import Final, NamedTuple

from gateway.messages.blocks import Block, CacheControl
from gateway.messages.schemas import PromptRequest, Turn

# Follows the system prompt and the tools, because templates write nothing without a turn.
_ANY_TURN: Final = Turn.model_construct(role="user", content=[Block.model_construct(type="text", text="-")])


class CacheHint(NamedTuple):
    """A prefix to keep."""

    body: PromptRequest
    """The request, up to the marked block."""
    ttl_s: int


def has_hints(body: PromptRequest) -> bool:
    """Returns whether the request marks any prefix."""
    return next(_marks(body), None) is not None


def hints_of(body: PromptRequest) -> list[CacheHint]:
    """Returns the longest marked prefix of each lifetime: at most two."""
    # Prefixes are put together at the end, because each block of a long conversation may have a mark.
    last = {mark.ttl_s: place for mark, place in _marks(body)}
    return [
        CacheHint(body.model_copy(update={"messages": _turns_to(body, place)}), ttl_s)
        for ttl_s, place in last.items()
    ]


class _Place(NamedTuple):
    """Where a marked prefix ends."""

    turn: int
    """The number of the last turn; -1: none."""
    blocks: int = 0
    """Its blocks that belong to the prefix."""


def _marks(body: PromptRequest) -> Iterator[tuple[CacheControl, _Place]]:
    """Yields each mark, in the prompt's order, with its place.

    A mark on a tool or in the system prompt keeps all of both: templates write either of them first.
    """
    for mark in [tool.cache_control for tool in body.tools] + [text.cache_control for text in body.system]:
        if mark is not None:
            yield mark, _Place(-1)
    for index, turn in enumerate(body.messages):
        for end, block in enumerate(turn.content, start=1):
            if block.cache_control is not None:
                yield block.cache_control, _Place(index, end)
    if body.cache_control is not None:
        yield body.cache_control, _Place(len(body.messages) - 1, len(body.messages[-1].content))


def _turns_to(body: PromptRequest, place: _Place) -> list[Turn]:
    """Returns the turns up to a place."""
    if place.turn < 0:
        return [_ANY_TURN]
    last = body.messages[place.turn]
    cut = Turn.model_construct(role=last.role, content=last.content[: place.blocks])
    return [*body.messages[: place.turn], cut]


def common_prefix(prompt: list[int], other: list[int]) -> list[int]:
    """Returns the tokens that both begin with."""
    for index, (left, right) in enumerate(zip(prompt, other, strict=False)):
        if left != right:
            return prompt[:index]
    return prompt[: len(other)]
