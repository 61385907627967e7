"""LoRA adapters over HTTP: named as `model`, listed, loaded and unloaded with the admin key."""

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio
from pydantic import SecretStr

from protos.errors import InvalidArgument, NotFound, Unavailable
from protos.triptych.v1 import common_pb2 as pb
from tests.support.gateway.serving import CHAT, TEXT, Stack, minilm_folder, running_stack

pytestmark = [pytest.mark.contract, pytest.mark.asyncio(loop_scope="module")]

KEY = "the-admin-key"
ADMIN = {"Authorization": f"Bearer {KEY}"}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running() -> AsyncIterator[Stack]:
    """Runs a gateway with an admin key, which closes nothing but the routes of operators."""
    async with running_stack(TEXT, max_parked_requests=0, admin_api_key=SecretStr(KEY)) as stack:
        yield stack


async def load(stack: Stack, body: dict[str, Any], headers: dict[str, str] = ADMIN) -> httpx.Response:
    return await stack.http.post("/v1/load_lora_adapter", json=body, headers=headers)


async def unload(stack: Stack, name: str, headers: dict[str, str] = ADMIN) -> httpx.Response:
    return await stack.http.post("/v1/unload_lora_adapter", json={"lora_name": name}, headers=headers)


@pytest.mark.parametrize(
    ("path", "body"), [("/v1/chat/completions", CHAT), ("/v1/completions", {"prompt": "hi"})]
)
async def test_a_request_names_an_adapter_as_its_model(stack: Stack, path: str, body: dict[str, Any]) -> None:
    """The scheduler gets the adapter's name beside the base model's; the answer repeats the client's name."""
    stack.scheduler.loras["sql"] = "/adapters/sql"
    answer = (await stack.http.post(path, json={**body, "model": "sql"})).json()
    assert answer["model"] == "sql"
    chunks = await stack.stream(path, {**body, "model": "sql"})
    assert {chunk["model"] for chunk in chunks[:-1]} == {"sql"}
    for request in stack.scheduler.requests:
        assert (request.model, request.lora_name) == ("smollm2", "sql")
    await stack.http.post(path, json={**body, "model": "smollm2"})
    await stack.http.post(path, json=body)
    assert [request.lora_name for request in stack.scheduler.requests[-2:]] == ["", ""]


@pytest.mark.parametrize("model", ["gpt-9", "ä" * 200])
@pytest.mark.parametrize("stream", [False, True])
async def test_an_unknown_model_is_not_found(stack: Stack, model: str, stream: bool) -> None:
    """Whether the gateway or the scheduler refuses it: OpenAI's error, in the same words."""
    status, error = await stack.refusal("/v1/completions", prompt="x", model=model, stream=stream)
    assert status == 404
    assert error == {
        "message": f"the model '{model}' is not served here; use 'smollm2'",
        "type": "invalid_request_error",
        "param": "model",
        "code": "model_not_found",
    }


async def test_an_embedding_model_has_no_adapters() -> None:
    async with running_stack(TEXT, folder=minilm_folder()) as stack:
        stack.scheduler.pool_tasks = [pb.POOL_TASK_EMBED]
        stack.gateway.app.state.context.watcher.served().model.pool_tasks.append(pb.POOL_TASK_EMBED)
        for path, body in (("/v1/embeddings", {"input": "x"}), ("/v1/completions", {"prompt": "x"})):
            response = await stack.http.post(path, json={**body, "model": "sql"})
            assert response.status_code == 404


async def test_adapters_are_listed_with_their_base(stack: Stack) -> None:
    """`root` is where an adapter came from, `parent` the base model."""
    stack.scheduler.loras["org/sql"] = "/adapters/sql"
    base, adapter = (await stack.http.get("/v1/models")).json()["data"]
    assert (base["id"], base["parent"]) == ("smollm2", None)
    assert adapter == {**base, "id": "org/sql", "root": "/adapters/sql", "parent": "smollm2"}
    assert (await stack.http.get("/v1/models/org/sql")).json() == adapter
    assert (await stack.http.get("/v1/models/other")).status_code == 404


async def test_an_adapter_shares_the_tokenizer(stack: Stack) -> None:
    """Both routes take its name; another name is not found."""
    stack.scheduler.loras["sql"] = "/adapters/sql"
    for model, status in (("sql", 200), ("smollm2", 200), ("other", 404)):
        tokens = await stack.http.post("/tokenize", json={"model": model, "prompt": "hi"})
        text = await stack.http.post("/detokenize", json={"model": model, "tokens": [5]})
        assert (tokens.status_code, text.status_code) == (status, status)


async def test_adapters_come_and_go_with_the_admin_key(stack: Stack) -> None:
    """A load answers with the adapter's card; after an unload, its name is unknown."""
    loaded = await load(stack, {"lora_name": "sql", "lora_path": "/adapters/sql"})
    assert loaded.status_code == 200
    assert (loaded.json()["id"], loaded.json()["root"]) == ("sql", "/adapters/sql")
    again = await load(stack, {"lora_name": "sql", "lora_path": "/adapters/sql2"})
    assert (again.status_code, again.json()["error"]["param"]) == (400, "lora_name")
    replaced = await load(stack, {"lora_name": "sql", "lora_path": "/adapters/sql2", "load_inplace": True})
    assert replaced.json()["root"] == "/adapters/sql2"
    assert (await unload(stack, "sql")).json() == {"id": "sql", "object": "model", "deleted": True}
    gone = await unload(stack, "sql")
    assert (gone.status_code, gone.json()["error"]["param"]) == (404, "lora_name")


async def test_all_fields_of_vllms_bodies_are_known(stack: Stack) -> None:
    """Those without effect are accepted; stacked weights of experts are refused by name."""
    body = {
        "lora_name": "sql",
        "lora_path": "/adapters/sql",
        "load_inplace": None,
        "is_3d_lora_weight": False,
    }
    assert (await load(stack, body)).status_code == 200
    refused = await load(stack, {**body, "is_3d_lora_weight": True})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "is_3d_lora_weight")
    gone = {"lora_name": "sql", "lora_int_id": 3}
    assert (await stack.http.post("/v1/unload_lora_adapter", json=gone, headers=ADMIN)).status_code == 200


@pytest.mark.parametrize(
    ("refusal", "status", "param"),
    [
        (InvalidArgument("adapter bad: rank 64 is too high", param="source"), 400, "lora_path"),
        (NotFound("adapter bad: there is no folder /bad", param="source"), 404, "lora_path"),
        (Unavailable("no worker is ready"), 503, None),
    ],
)
async def test_a_bad_adapter_is_refused(stack: Stack, refusal: Any, status: int, param: str | None) -> None:
    """The client gets the workers' reason, with this API's names of fields."""
    stack.scheduler.refuse_lora = refusal
    response = await load(stack, {"lora_name": "bad", "lora_path": "/bad"})
    assert response.status_code == status
    error = response.json()["error"]
    assert (error["message"], error["param"]) == (refusal.message, param)


async def test_without_an_admin_key_the_routes_are_off() -> None:
    """Whatever key the client sends; the error names the setting."""
    async with running_stack(TEXT) as stack:
        for response in (await load(stack, {"lora_name": "a", "lora_path": "/a"}), await unload(stack, "a")):
            assert response.status_code == 403
            assert "--admin-api-key" in response.json()["error"]["message"]
