"""``cache_control`` marks: which prefixes of a prompt later requests share, and for how long."""

from collections.abc import Iterator
from typing import Final, NamedTuple

from gateway.messages.blocks import Block, CacheControl
from gateway.messages.schemas import PromptRequest, Turn

# Stands behind the system prompt and the tools, because templates write nothing without a turn.
_ANY_TURN: Final = Turn.model_construct(role="user", content=[Block.model_construct(type="text", text="-")])


class CacheHint(NamedTuple):
    """A prefix to keep."""

    body: PromptRequest
    """The request, up to the marked block."""
    ttl_s: int


def hints_of(body: PromptRequest) -> list[CacheHint]:
    """Returns the longest marked prefix of each lifetime: at most two."""
    hints: dict[int, CacheHint] = {}
    for mark, turns in _marks(body):
        hints[mark.ttl_s] = CacheHint(body.model_copy(update={"messages": turns}), mark.ttl_s)
    return list(hints.values())


def _marks(body: PromptRequest) -> Iterator[tuple[CacheControl, list[Turn]]]:
    """Yields each mark, in the prompt's order, with the turns up to it.

    A mark on a tool or in the system prompt keeps all of both: templates write either of them first.
    """
    for mark in [tool.cache_control for tool in body.tools] + [text.cache_control for text in body.system]:
        if mark is not None:
            yield mark, [_ANY_TURN]
    for index, turn in enumerate(body.messages):
        for end, block in enumerate(turn.content, start=1):
            if block.cache_control is not None:
                cut = Turn.model_construct(role=turn.role, content=turn.content[:end])
                yield block.cache_control, [*body.messages[:index], cut]
    if body.cache_control is not None:
        yield body.cache_control, body.messages


def common_prefix(prompt: list[int], other: list[int]) -> list[int]:
    """Returns the tokens that both begin with."""
    for index, (left, right) in enumerate(zip(prompt, other, strict=False)):
        if left != right:
            return prompt[:index]
    return prompt[: len(other)]
