"""Content blocks of Anthropic's messages."""

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Final, Literal

from pydantic import BeforeValidator, Field, model_validator

from gateway.quoting import quote
from gateway.schemas.base import RequestModel
from gateway.schemas.sampling import or_default

BlockType = Literal["text", "thinking", "redacted_thinking", "tool_use", "tool_result"]

# The fields that each type of block must have.
_NEEDED: Final[Mapping[BlockType, tuple[str, ...]]] = {
    "text": ("text",),
    "thinking": ("thinking",),
    "redacted_thinking": (),
    "tool_use": ("id", "name", "input"),
    "tool_result": ("tool_use_id",),
}


def _blocks(*types: str) -> Callable[[Any], Any]:
    """Returns a validator that accepts text or blocks of these types, and returns blocks."""

    def check(content: Any) -> Any:
        if isinstance(content, str):
            return [{"type": "text", "text": content}]
        if not isinstance(content, list):
            raise ValueError(f"must be a string or a list of blocks, got {quote(content)}")  # noqa: TRY004
        for index, block in enumerate(content):
            kind = block.get("type") if isinstance(block, dict) else None
            if kind not in types:
                raise ValueError(
                    f"block {index} is not served; only blocks of type {_listed(types)} are, got"
                    f" {quote(kind or block)}"
                )
        return content

    return check


def _listed(types: tuple[str, ...]) -> str:
    names = [f"'{name}'" for name in types]
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} or {names[-1]}"


class TextBlock(RequestModel):
    """Text."""

    type: Literal["text"]
    text: str


TextBlocks = Annotated[
    list[TextBlock],
    Field(fail_fast=True),
    BeforeValidator(_blocks("text"), json_schema_input_type=str | list[TextBlock]),
]


class Block(RequestModel):
    """One block of a turn's content. Its type says which fields it has."""

    type: BlockType
    text: Annotated[str | None, Field(description="With the type text.")] = None
    thinking: Annotated[
        str | None, Field(description="With the type thinking: thinking of an earlier turn.")
    ] = None
    signature: Annotated[str | None, Field(description="With the type thinking; not verified.")] = None
    data: Annotated[str | None, Field(description="With the type redacted_thinking; not read.")] = None
    id: Annotated[
        str | None, Field(min_length=1, max_length=256, description="With the type tool_use: the call's id.")
    ] = None
    name: Annotated[
        str | None, Field(min_length=1, max_length=256, description="With the type tool_use: the tool.")
    ] = None
    input: Annotated[
        dict[str, Any] | None, Field(description="With the type tool_use: the call's arguments.")
    ] = None
    tool_use_id: Annotated[
        str | None,
        Field(min_length=1, max_length=256, description="With the type tool_result: the call's id."),
    ] = None
    content: Annotated[TextBlocks, or_default([]), Field(description="With the type tool_result.")] = Field(
        default_factory=list
    )
    is_error: Annotated[
        bool, or_default(False), Field(description="With the type tool_result: whether the call failed.")
    ] = False

    @model_validator(mode="after")
    def _complete(self) -> "Block":
        for name in _NEEDED[self.type]:
            if getattr(self, name) is None:
                raise ValueError(f"needs '{name}', because its type is '{self.type}'")
        return self


Blocks = Annotated[
    list[Block],
    Field(fail_fast=True),
    BeforeValidator(
        _blocks("text", "thinking", "redacted_thinking", "tool_use", "tool_result"),
        json_schema_input_type=str | list[Block],
    ),
]
