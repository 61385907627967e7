"""``cache_control``: marked prefixes are pinned after the answer and within bounds."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from protos.errors import Overloaded
from tests.support.gateway.anthropic_types import PATH
from tests.support.gateway.serving import Stack, running_gateway, running_stack, smollm2_folder
from tests.support.gateway.tool_templates import THINKING, folder_with
from tests.support.scheduler.fake_worker import FakeWorker
from tests.support.scheduler.running_scheduler import joined, run_scheduler

pytestmark = [pytest.mark.contract, pytest.mark.asyncio(loop_scope="module")]

MARK = {"cache_control": {"type": "ephemeral"}}
HOUR = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
SYSTEM = [{"type": "text", "text": "Answer in one word.", **HOUR}]


def user(text: str, **fields: Any) -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "text", "text": text, **fields}]}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    folder: Path = folder_with(tmp_path_factory.mktemp("qwen"), THINKING, ["<think>"])
    async with running_stack("x", folder=folder, max_parked_requests=0, pins_per_tenant=2) as stack:
        yield stack


async def send(stack: Stack, tenant: str, *turns: dict[str, Any], **fields: Any) -> None:
    """Sends a conversation for a tenant, and waits until its hints are followed or ignored."""
    body = {"model": "smollm2", "max_tokens": 9, "messages": list(turns), **fields}
    response = await stack.http.post(PATH, json=body, headers={"x-tenant": tenant})
    assert response.status_code == 200, response.text
    await stack.gateway.app.state.prefix_pins.settled()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_marked_prefix_is_pinned(stack: Stack, stream: bool) -> None:
    """Up to the marked block, for the mark's time, with the request's salt; one pin for each lifetime."""
    tenant = f"marks-{stream}"
    await send(stack, tenant, user("a", **MARK), user("b"), system=SYSTEM, cache_salt="s", stream=stream)
    pins = sorted(stack.scheduler.pins.values(), key=lambda pin: pin.ttl_s)
    assert [(pin.ttl_s, pin.cache_salt) for pin in pins] == [(300, "s"), (3600, "s")]
    prompt = list(stack.scheduler.requests[-1].prompt_token_ids)
    lengths = [len(pin.prompt_token_ids) for pin in pins]
    assert all(prompt[: len(pin.prompt_token_ids)] == list(pin.prompt_token_ids) for pin in pins)
    assert len(prompt) > lengths[0] > lengths[1] > 5


async def test_a_conversation_holds_one_pin(stack: Stack) -> None:
    """The pin of a longer prefix replaces that of its beginning; the same prefix again is pinned once."""
    turns = [user("first", **MARK)]
    await send(stack, "talk", *turns)
    (first,) = stack.scheduler.pins.values()
    turns += [{"role": "assistant", "content": "ok"}, user("second", **MARK)]
    await send(stack, "talk", *turns)
    await send(stack, "talk", *turns)
    (second,) = stack.scheduler.pins.values()
    assert list(second.prompt_token_ids[: len(first.prompt_token_ids)]) == list(first.prompt_token_ids)
    assert stack.scheduler.num_pins == 2


async def test_a_tenant_holds_a_bounded_number_of_pins(stack: Stack) -> None:
    """The pin that would end first makes room; other tenants have their own."""
    for text in ("one", "two", "three"):
        await send(stack, "many", user(text, **MARK))
    assert list(stack.scheduler.pins) == ["2", "3"]
    await send(stack, "other", user("one"), cache_control=MARK["cache_control"])
    assert list(stack.scheduler.pins) == ["2", "3", "4"]


async def test_a_hint_that_cannot_be_followed_costs_nothing(stack: Stack) -> None:
    """The request is answered and nothing is pinned; the next one is followed."""
    stack.scheduler.refuse_pin = Overloaded("pins hold too much")
    await send(stack, "refused", user("a", **MARK))
    assert stack.scheduler.num_pins == 0
    stack.scheduler.refuse_pin = None
    await send(stack, "refused", user("a", **MARK))
    assert stack.scheduler.num_pins == 1


async def test_hints_are_ignored_by_default() -> None:
    """Pins take memory from other tenants, so a gateway follows hints only where it was told to."""
    async with running_stack("x") as stack:
        await send(stack, "t", user("a", **MARK), cache_control=MARK["cache_control"])
        assert stack.scheduler.num_pins == 0


async def test_a_real_scheduler_keeps_the_prefix() -> None:
    """The answer has filled the cache, so the pin computes nothing; the next request finds the prefix."""
    folder = smollm2_folder()
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    worker = FakeWorker(files=files, vocab_size=49152, max_model_len=128)
    async with (
        run_scheduler() as scheduler,
        joined(scheduler, worker),
        running_gateway(scheduler.port, pins_per_tenant=2) as gateway,
        httpx.AsyncClient(base_url=gateway.base_url, timeout=20) as http,
    ):
        ask = {"max_tokens": 2, "messages": [user("A prompt that is longer than a chunk.", **MARK)]}
        first = (await http.post(PATH, json=ask)).json()["usage"]
        assert worker.device is not None
        prefilled = worker.device.prefilled
        await gateway.app.state.prefix_pins.settled()
        (replica_id,) = scheduler.engine.replicas
        assert (scheduler.engine.pinned.count(replica_id), worker.device.prefilled) == (1, prefilled)
        second = (await http.post(PATH, json=ask)).json()["usage"]
        assert first["cache_read_input_tokens"] == 0
        assert second["cache_read_input_tokens"] > 10
