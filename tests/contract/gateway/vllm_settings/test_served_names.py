"""A model with several names: all of them work, and answers have the first one."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.support.gateway.serving import CHAT, TEXT, Stack, running_stack

pytestmark = [pytest.mark.contract, pytest.mark.asyncio(loop_scope="module")]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running() -> AsyncIterator[Stack]:
    """Runs a gateway whose scheduler's model has three names."""
    async with running_stack(TEXT, aliases=("small", "org/smol")) as stack:
        yield stack


@pytest.mark.parametrize("name", [None, "smollm2", "small", "org/smol"])
async def test_every_name_is_served(stack: Stack, name: str | None) -> None:
    """The scheduler is asked for the model itself, and the answer names it."""
    body = {**CHAT, "model": name} if name else CHAT
    answer = (await stack.http.post("/v1/chat/completions", json=body)).json()
    assert answer["model"] == "smollm2"
    assert [(each.model, each.lora_name) for each in stack.scheduler.requests] == [("smollm2", "")]
    tokens = (
        await stack.http.post("/tokenize", json={"prompt": "a", **({"model": name} if name else {})})
    ).json()
    assert tokens["count"] == 1


async def test_models_lists_every_name(stack: Stack) -> None:
    """Each name has a card of its own, also alone; other names are unknown."""
    listed = (await stack.http.get("/v1/models")).json()["data"]
    assert [card["id"] for card in listed] == ["smollm2", "small", "org/smol"]
    assert (await stack.http.get("/v1/models/org/smol")).json() == listed[2]
    assert (await stack.http.get("/v1/models/other")).status_code == 404
