"""Content blocks of Anthropic's messages."""

from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, Final, Literal

import orjson
from pydantic import BeforeValidator, Field, model_validator

from gateway.quoting import clip, omitted, quote
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


# Blocks of other tools and files, which are read as text. An image is one only within a result: a user's turn
# with an image asks about it, which no model here can answer.
_IN_WORDS: Final = frozenset({
    "advisor_tool_result", "browser_state", "bash_code_execution_tool_result", "code_execution_tool_result", "compaction",
    "container_upload", "document", "fallback", "mcp_tool_result", "mcp_tool_use", "search_result", "server_tool_use",
    "text_editor_code_execution_tool_result", "tool_reference", "tool_search_tool_result", "web_fetch_tool_result",
    "web_search_tool_result",
})  # fmt: skip
_IN_RESULTS: Final = _IN_WORDS | {"image"}

_CALLS: Final = frozenset({"server_tool_use", "mcp_tool_use"})
# Fields of blocks with text, or with blocks that have it, in the order of reading.
_TEXTS: Final = (
    "title",
    "context",
    "url",
    "text",
    "stdout",
    "stderr",
    "error_code",
    "source",
    "data",
    "content",
)
# Deeper blocks than any of Anthropic's.
_MAX_DEPTH: Final = 6


def _in_words(block: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a block of text for one that no model here can read: its texts, else a line that names it."""
    kind = block["type"]
    if kind in _CALLS:
        text = f"[{clip(str(block.get('name')))} was called with {_json(block.get('input'))}]"
    else:
        text = "\n".join(_texts(block, 0)) or omitted(kind)
    return {"type": "text", "text": text}


def _texts(value: Any, depth: int) -> Iterator[str]:
    """Yields the texts in a block; files and images are named instead of shown."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list) and depth < _MAX_DEPTH:
        for item in value:
            yield from _texts(item, depth + 1)
    elif isinstance(value, dict) and depth < _MAX_DEPTH:
        kind = value.get("type")
        if kind in ("base64", "url", "file"):
            return
        if kind in ("image", "document") and not any(_texts(value.get("source"), depth + 1)):
            yield omitted(kind, value.get("title"))
            value = {"context": value.get("context")}
        for name in _TEXTS:
            yield from _texts(value.get(name), depth + 1)


def _json(value: Any) -> str:
    try:
        return orjson.dumps(value).decode()
    except orjson.JSONEncodeError as error:
        raise ValueError("is nested too deep; flatten it") from error


def _blocks(*types: str, in_words: frozenset[str] = frozenset()) -> Callable[[Any], Any]:
    """Returns a validator that accepts text or blocks of these types, and returns blocks.

    Args:
        types: the blocks that stay as they are.
        in_words: the blocks that become text.
    """

    def check(content: Any) -> Any:
        if isinstance(content, str):
            return [{"type": "text", "text": content}]
        if not isinstance(content, list):
            raise ValueError(f"must be a string or a list of blocks, got {quote(content)}")  # noqa: TRY004
        found = []
        for index, block in enumerate(content):
            kind = block.get("type") if isinstance(block, dict) else None
            if isinstance(kind, str) and kind in in_words:
                found.append(_in_words(block))
            elif kind in types:
                found.append(block)
            else:
                raise ValueError(
                    f"block {index} is not served; only blocks of type {_listed(types)} are, got"
                    f" {quote(kind or block)}"
                )
        return found

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
ResultBlocks = Annotated[
    list[TextBlock],
    Field(fail_fast=True),
    BeforeValidator(_blocks("text", in_words=_IN_RESULTS), json_schema_input_type=str | list[TextBlock]),
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
    content: Annotated[
        ResultBlocks,
        or_default([]),
        Field(description="With the type tool_result. Texts of documents count; a line stands for an image."),
    ] = Field(default_factory=list)
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
        _blocks("text", "thinking", "redacted_thinking", "tool_use", "tool_result", in_words=_IN_WORDS),
        json_schema_input_type=str | list[Block],
    ),
]
