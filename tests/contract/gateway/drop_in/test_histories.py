"""Histories of every form that the clients of OpenAI and Anthropic can write."""

import types
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal, NotRequired, Required, Union, get_args, get_origin

import pytest
from anthropic.types import ContentBlockParam
from anthropic.types.beta import BetaContentBlockParam
from openai.types.responses import ResponseInputItemParam
from typing_extensions import get_type_hints, is_typeddict

from tests.support.gateway.serving import Stack

pytestmark = [pytest.mark.contract, pytest.mark.asyncio(loop_scope="module")]

# Levels of a value with an example for each alternative; deeper parts are as short as can be.
DEEPEST = 2
WRAPPERS: Any = (Annotated, Required, NotRequired)
REQUIRED: Any = Required


def plain(kind: Any) -> Any:
    while get_origin(kind) in WRAPPERS:
        kind = get_args(kind)[0]
    return kind


def members(union: Any) -> list[Any]:
    """Returns the alternatives of a union, those of unions within it included."""
    union = plain(union)
    if get_origin(union) not in (Union, types.UnionType):
        return [union]
    return [member for part in get_args(union) for member in members(part)]


def examples(kind: Any, depth: int = 0) -> list[Any]:
    """Returns values of a type; each alternative of its parts is in one of them."""
    kind = plain(kind)
    origin, args = get_origin(kind), get_args(kind)
    if is_typeddict(kind):
        return objects(kind, depth + 1)[: None if depth < DEEPEST else 1]
    if origin in (Union, types.UnionType):
        return [example for arg in members(kind) for example in examples(arg, depth)]
    if origin is Literal:
        return [args[0]]
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return [{"key": "value"}]
    if isinstance(origin, type) and issubclass(origin, Iterable):
        return [[example] for example in examples(args[0], depth + 1)] or [[]]
    return [{int: 1, float: 0.5, bool: True, type(None): None}.get(kind, "text")]


def objects(kind: Any, depth: int) -> list[dict[str, Any]]:
    """Returns an object with the required fields, then one for each example of each field."""
    hints = get_type_hints(kind, include_extras=True)
    fields = {
        name: examples(hint, depth)
        for name, hint in hints.items()
        if depth <= DEEPEST or get_origin(hint) is REQUIRED
    }
    needed = {name: found[0] for name, found in fields.items() if get_origin(hints[name]) is REQUIRED}
    found = [needed, *({**needed, name: value} for name, values in fields.items() for value in values)]
    return [each for index, each in enumerate(found) if each not in found[:index]]


# Forms that are refused: an image that the user asks about, references to a store, results without a call.
REFUSED_ITEMS = {"EasyInputMessageParam", "Message", "ItemReference", "FunctionCallOutput"}
TURNS = {
    "thinking": {"assistant"},
    "redacted_thinking": {"assistant"},
    "tool_use": {"assistant"},
    "tool_result": {"user"},
}


@pytest.mark.parametrize("item", members(ResponseInputItemParam), ids=lambda item: item.__name__)
async def test_items_of_responses(stack: Stack, item: Any) -> None:
    """Each is served, by itself or by a line that stands for it, or refused by name."""
    statuses = []
    for example in examples(item):
        asked = {"input": [{"role": "user", "content": "Hi"}, example, {"role": "user", "content": "Go"}]}
        response = await stack.http.post("/v1/responses", json={**asked, "max_output_tokens": 2})
        statuses.append(response.status_code)
        assert response.status_code in (200, 400), (example, response.text)
        if response.status_code == 400:
            assert response.json()["error"]["param"].startswith("input"), (example, response.text)
            assert item.__name__ in REFUSED_ITEMS, (example, response.text)
    assert 200 in statuses or item.__name__ == "ItemReference"


@pytest.mark.parametrize("role", ["user", "assistant"])
@pytest.mark.parametrize(
    "block",
    {
        examples(block)[0]["type"]: block
        for block in (*members(BetaContentBlockParam), *members(ContentBlockParam))
        if is_typeddict(block)
    }.values(),
    ids=lambda block: block.__name__,
)
async def test_blocks_of_messages(stack: Stack, block: Any, role: str) -> None:
    """Each is served, by itself or by a line that stands for it, or refused by name."""
    for example in examples(block):
        turns = [{"role": role, "content": [example]}, {"role": "user", "content": "Go"}]
        response = await stack.http.post("/v1/messages", json={"max_tokens": 2, "messages": turns})
        assert response.status_code in (200, 400), (example, response.text)
        belongs = role in TURNS.get(example["type"], {role}) and example["type"] != "image"
        assert belongs == (response.status_code == 200), (example, response.text)
        if not belongs:
            assert example["type"] in response.json()["error"]["message"]
