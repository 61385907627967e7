"""SageMaker's hosting contract: `/invocations` runs any request, `/adapters` loads LoRA adapters."""

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio
from pydantic import SecretStr

from protos.errors import InvalidArgument
from protos.triptych.v1 import common_pb2 as pb
from tests.support.gateway.fake_scheduler import FakeScheduler, serving
from tests.support.gateway.serving import (
    CHAT,
    TEXT,
    Stack,
    minilm_folder,
    running_gateway,
    running_stack,
)

pytestmark = [pytest.mark.contract, pytest.mark.asyncio(loop_scope="module")]

ADMIN = {"Authorization": "Bearer the-admin-key"}
ADAPTER = "X-Amzn-SageMaker-Adapter-Identifier"
PROMPT = {"prompt": "The capital", "max_tokens": 3}
INPUT = {"input": ["a", "b c"]}
QUERY = {"query": "a", "documents": ["b", "c"]}
PAIR = {"text_1": "a", "text_2": ["b", "c"]}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running() -> AsyncIterator[Stack]:
    """Without any key."""
    async with running_stack(TEXT, max_parked_requests=0) as stack:
        yield stack


def same(first: httpx.Response, second: httpx.Response) -> bool:
    """Whether two answers differ in their ids and times alone."""
    bodies = [dict(each.json()) for each in (first, second)]
    for body in bodies:
        body.pop("id", None)
        body.pop("created", None)
    return first.status_code == second.status_code == 200 and bodies[0] == bodies[1]


@pytest.mark.parametrize(("path", "body"), [("/v1/chat/completions", CHAT), ("/v1/completions", PROMPT)])
async def test_a_generating_model_takes_chats_and_prompts(
    stack: Stack, path: str, body: dict[str, Any]
) -> None:
    """Collected or streamed."""
    assert same(await stack.http.post("/invocations", json=body), await stack.http.post(path, json=body))
    chunks = await stack.stream("/invocations", body)
    assert chunks[-1] == "[DONE]"
    assert len(chunks) == len(await stack.stream(path, body))


@pytest.mark.parametrize(
    ("tasks", "calls"),
    [
        ((pb.POOL_TASK_EMBED,), [("/v1/embeddings", INPUT), ("/rerank", QUERY), ("/score", PAIR)]),
        (
            (pb.POOL_TASK_SCORE, pb.POOL_TASK_CLASSIFY),
            [("/classify", INPUT), ("/rerank", QUERY), ("/score", PAIR), ("/score", {"queries": "a", "items": "b"})],
        ),
        ((pb.POOL_TASK_TOKEN_CLASSIFY,), [("/pooling", INPUT)]),
    ],
)  # fmt: skip
async def test_a_pooling_model_takes_what_it_serves(
    tasks: tuple["pb.PoolTask.ValueType", ...], calls: list[tuple[str, dict[str, Any]]]
) -> None:
    """The body says which route is meant, as far as the model leaves a choice."""
    scheduler = FakeScheduler(
        minilm_folder(),
        model="minilm",
        pooled_size=1,
        pool_tasks=tasks,
        pool_values=lambda request: [0.5] * len(request.prompt_token_ids),
    )
    async with (
        serving(scheduler) as server,
        running_gateway(server.port) as gateway,
        httpx.AsyncClient(base_url=gateway.base_url, timeout=20) as http,
    ):
        for path, body in calls:
            assert same(await http.post("/invocations", json=body), await http.post(path, json=body)), path
        refused = await http.post("/invocations", json={"prompt": "a"})
    assert refused.status_code == 400
    assert "send 'input', 'query' or 'text_1'" in refused.json()["error"]["message"]


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b'{"input": "a"}', "send 'messages' or 'prompt'"),
        (b'{"prompt": 1}', "'prompt'"),
        (b"{", "not valid JSON"),
        (b"[]", "must be a JSON object"),
        (b"", "has no body"),
    ],
)
async def test_other_bodies_are_refused(stack: Stack, body: bytes, text: str) -> None:
    """One line says what to send."""
    response = await stack.http.post("/invocations", content=body)
    assert response.status_code == 400
    assert text in response.json()["error"]["message"]


async def test_a_header_names_the_adapter(stack: Stack) -> None:
    """It comes before the body's `model`, and a client that leaves still ends its request."""
    stack.scheduler.loras["sql"] = "/adapters/sql"
    sent = {**PROMPT, "model": "smollm2"}
    response = await stack.http.post("/invocations", json=sent, headers={ADAPTER: "sql"})
    assert response.json()["model"] == "sql"
    assert [request.lora_name for request in stack.scheduler.requests] == ["sql"]
    stack.scheduler.pause_after = 1
    with pytest.raises(httpx.ReadTimeout):
        await stack.http.post("/invocations", json=sent, headers={ADAPTER: "sql"}, timeout=0.2)
    await stack.scheduler.until(lambda: len(stack.scheduler.aborted) == 1)


async def test_adapters_are_loaded_and_unloaded() -> None:
    """Bodies have SageMaker's names, and so have errors."""
    async with running_stack(TEXT, max_parked_requests=0, admin_api_key=SecretStr("the-admin-key")) as stack:
        body = {"name": "team/sql", "src": "/adapters/sql", "preload": True, "pin": False}
        assert (await stack.http.post("/adapters", json=body)).status_code == 401
        loaded = await stack.http.post("/adapters", json=body, headers=ADMIN)
        assert (loaded.json()["id"], loaded.json()["root"]) == ("team/sql", "/adapters/sql")
        assert stack.scheduler.loras == {"team/sql": "/adapters/sql"}
        assert (await stack.http.delete("/adapters/team/sql")).status_code == 401
        unloaded = await stack.http.delete("/adapters/team/sql", headers=ADMIN)
        assert unloaded.json() == {"id": "team/sql", "object": "model", "deleted": True}
        assert not stack.scheduler.loras
        stack.scheduler.refuse_lora = InvalidArgument("no folder", param="source")
        error = (await stack.http.post("/adapters", json=body, headers=ADMIN)).json()["error"]
        assert error["param"] == "src"
        stack.scheduler.refuse_lora = None
        assert (await stack.http.delete("/adapters/sql", headers=ADMIN)).status_code == 404


async def test_without_an_admin_key_adapters_stay(stack: Stack) -> None:
    """The answer names the setting."""
    for response in (
        await stack.http.post("/adapters", json={"name": "a", "src": "b"}),
        await stack.http.delete("/adapters/a"),
    ):
        assert response.status_code == 403
        assert "--admin-api-key" in response.json()["error"]["message"]
